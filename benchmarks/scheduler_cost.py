"""Measures what a step of the scheduler costs, without any worker.

    python -m benchmarks.scheduler_cost [--only i,ii] [--repeats 2] [--profile]

`schedule` and `update` are timed one by one, in the order in which the engine calls them; making the results that
they are fed with is not. Exits with 1 if the cost per token at 2,000 running is over that at 256 by too much.
"""

import cProfile
import gc
import pstats
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.fake_rows import FakeRows
from benchmarks.machine import machine_facts
from benchmarks.results_file import write_results
from benchmarks.scheduler_scenarios import (
    BLOCK_SIZE,
    FIRST_SEED,
    GC_MODES,
    MAX_MODEL_LEN,
    SCENARIOS,
    VOCAB_SIZE,
    Cost,
    Drawn,
    Scenario,
    Step,
    draw_requests,
    in_child,
    reduce_steps,
    run_steps,
)
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from control_plane.scheduling.synchronous import SynchronousScheduler
from plugins.errors import InvalidConfig
from plugins.scheduler import Scheduler
from plugins.types import ModelInfo, Request, RequestId, SamplingParams, StepResult, TokenId, WorkerInfo

RESULTS = Path(__file__).parent / "results"
SCHEDULERS: Mapping[str, type[Scheduler]] = {"synchronous": SynchronousScheduler, "run_ahead": RunAheadScheduler}
MAX_GROWTH = 1.2  # cost per token at 2,000 running over that at 256
NUM_PROFILE_LINES = 25
PROGRESS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
_now_ns = time.perf_counter_ns

app = App(name="python -m benchmarks.scheduler_cost", help="Measure what a step of the scheduler costs.")


@app.default
def measure_all(
    *,
    only: str = ",".join(SCENARIOS),
    schedulers: str = ",".join(SCHEDULERS),
    gc_modes: str = ",".join(GC_MODES),
    repeats: int = 2,
    cpu: int | None = None,
    profile: bool = False,
    name: str = "scheduler_cost",
) -> int:
    """Measure the chosen scenarios, each in a process of its own.

    Parameters
    ----------
    only: which scenarios, by comma
    schedulers: synchronous, run_ahead or both
    gc_modes: with the garbage collector on, off or both
    repeats: measurements of each, with other requests
    cpu: the core to run on; any if left out
    profile: print where the time goes instead, by cProfile, which makes small functions look dearer than they are
    name: of the file in benchmarks/results
    """
    console = Console()
    try:
        cases = list(product(choose(only, SCENARIOS), choose(schedulers, SCHEDULERS), choose(gc_modes, GC_MODES)))
    except InvalidConfig as error:
        console.print(str(error), style="red", markup=False)
        return 1
    if profile:
        for scenario, scheduler, _ in cases:
            console.rule(f"{scenario}: {SCENARIOS[scenario].what}; {scheduler}")
            console.print(
                profile_steps(SCENARIOS[scenario], SCHEDULERS[scheduler]), markup=False, highlight=False, soft_wrap=True
            )
        return 0
    runs: list[dict[str, Any]] = []
    with Progress(*PROGRESS, console=console, redirect_stdout=False, redirect_stderr=False) as progress:
        task = progress.add_task("", total=repeats * len(cases))
        for repeat, (scenario, scheduler, gc_mode) in product(range(repeats), cases):
            progress.update(task, description=f"{scenario} {scheduler} gc {gc_mode}")
            cost = measure_ours(scenario, scheduler, gc_mode, FIRST_SEED + repeat, cpu)
            runs.append({"scenario": scenario, "scheduler": scheduler, "gc": gc_mode, "repeat": repeat} | cost)
            progress.advance(task)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_results(path, {"machine": machine_facts(), "runs": runs})
    console.print(_table(runs))
    console.print(f"written to {path}", highlight=False)
    growths = {key: growth(runs, key) for key in {run["scheduler"] for run in runs}}
    for key, value in sorted(growths.items()):
        if value is not None:
            console.print(f"{key}: a token at 2,000 running costs {value:.2f} of one at 256 (at most {MAX_GROWTH:g})")
    return 1 if any(value is not None and value > MAX_GROWTH for value in growths.values()) else 0


def choose(names: str, known: Sequence[str] | Mapping[str, object]) -> tuple[str, ...]:
    """Split a list by comma. Raises: InvalidConfig: a name is not among the known ones."""
    chosen = tuple(filter(None, names.split(",")))
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise InvalidConfig(f"there is no {', '.join(unknown) or 'name'}; there are {', '.join(known)}")
    return chosen


def measure_ours(scenario: str, scheduler: str, gc_mode: str, seed: int, cpu: int | None) -> dict[str, float]:
    """Measure one scenario in a child process."""
    return in_child(lambda: measure(SCENARIOS[scenario], SCHEDULERS[scheduler], gc_mode, seed), cpu)


def measure(scenario: Scenario, scheduler_class: type[Scheduler], gc_mode: str, seed: int) -> Cost:
    """Measure one scenario in this process, and leave its garbage collector changed."""
    rng = random.Random(seed)
    scheduler = build(scenario, scheduler_class)
    gc.collect()
    gc.freeze()
    (gc.enable if gc_mode == "on" else gc.disable)()
    add_ns = add_all(scheduler, draw_requests(scenario, rng))
    drive = Drive(scheduler, rng)
    steps, num_preemptions = run_steps(scenario, drive.step, lambda: scheduler.load().num_preemptions)
    return reduce_steps(steps, add_ns, num_preemptions)


def build(scenario: Scenario, scheduler_class: type[Scheduler]) -> Scheduler:
    """Make a scheduler for a worker on which the scenario fits; its configuration is the default one."""
    worker = WorkerInfo(
        model=ModelInfo(
            name="none",
            architecture="LlamaForCausalLM",
            dtype="bfloat16",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(),
            num_parameters=0,
        ),
        incarnation="one",
        num_blocks=scenario.num_blocks,
        block_size=BLOCK_SIZE,
        max_sequences=scenario.max_sequences,
        max_step_tokens=scenario.max_step_tokens,
        kv_cache_dtype="bfloat16",
        kv_bytes=0,
        tokenizer_sha256="",
        load_s=0.0,
    )
    return scheduler_class(SchedulerConfig(), worker)  # type: ignore[call-arg]  # how all are built, says Scheduler


def add_all(scheduler: Scheduler, drawn: Iterable[Drawn]) -> list[int]:
    """Give a scheduler its requests; return how long each took to make and to add, in nanoseconds."""
    add_ns = []
    for arrival, each in enumerate(drawn, 1):
        token_ids = tuple(map(TokenId, each.token_ids))
        start_ns = _now_ns()
        sampling = SamplingParams(max_tokens=each.max_tokens, temperature=0.0, seed=0, ignore_eos=True)
        scheduler.add_request(
            Request(
                request_id=RequestId(each.request_id), prompt_token_ids=token_ids, sampling=sampling, arrival=arrival
            )
        )
        add_ns.append(_now_ns() - start_ns)
    return add_ns


class Drive:
    """Steps a scheduler as the engine does: it plans while the worker's answers are under way, as far as it may."""

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self._scheduler = scheduler
        self._rows = FakeRows(lambda _request_id, _index: TokenId(rng.randrange(VOCAB_SIZE)))
        self._in_flight: deque[StepResult] = deque()

    def step(self) -> Step:
        """Plan once, and take the oldest result if no further plan may be made ahead of it."""
        start_ns = _now_ns()
        plan = self._scheduler.schedule()
        schedule_ns = _now_ns() - start_ns
        if not plan.is_empty:
            result, _ = self._rows.execute(plan)
            self._in_flight.append(result)
        update_ns, num_finished = 0, 0
        if self._in_flight and (plan.is_empty or len(self._in_flight) >= self._scheduler.max_plans_in_flight):
            result = self._in_flight.popleft()
            start_ns = _now_ns()
            num_finished = len(self._scheduler.update(result))
            update_ns = _now_ns() - start_ns
        num_running = self._scheduler.load().num_running
        return Step(schedule_ns, update_ns, len(plan.chunks), plan.num_tokens, num_running, num_finished)


def profile_steps(scenario: Scenario, scheduler_class: type[Scheduler]) -> str:
    """Return where the time of the measured steps goes, as cProfile tells it."""
    rng = random.Random(FIRST_SEED)
    scheduler = build(scenario, scheduler_class)
    add_all(scheduler, draw_requests(scenario, rng))
    drive = Drive(scheduler, rng)
    run_steps(replace(scenario, num_steps=0), drive.step, lambda: 0)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(scenario.num_steps):
        drive.step()
    profiler.disable()
    text = StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(NUM_PROFILE_LINES)
    return text.getvalue()


def growth(runs: Sequence[Mapping[str, Any]], scheduler: str) -> float | None:
    """Return what a token costs in the median step at 2,000 running, over that at 256; None if one was not measured."""

    def median_of(scenario: str) -> float | None:
        costs = [
            float(run["both_us_p50"] / run["tokens_in_step"])
            for run in runs
            if (run["scenario"], run["scheduler"]) == (scenario, scheduler)
        ]
        return statistics.median(costs) if costs else None

    few, many = median_of("i"), median_of("iii-2000")
    return None if few is None or many is None else round(many / few, 3)


def _table(runs: Sequence[Mapping[str, Any]]) -> Table:
    headings = {
        "schedule_us_p50": "schedule\nus",
        "update_us_p50": "update\nus",
        "both_us_p50": "both\nus",
        "us_per_request": "us per\nrequest",
        "us_per_token": "us per\ntoken",
        "add_us_p50": "add\nus",
        "num_preemptions": "pre-\nempted",
    }
    table = Table("scenario", "scheduler", "gc", *headings.values(), box=None, padding=(0, 1, 0, 0))
    for key in dict.fromkeys((run["scenario"], run["scheduler"], run["gc"]) for run in runs):
        same = [run for run in runs if (run["scenario"], run["scheduler"], run["gc"]) == key]
        figures = [f"{statistics.median(run[name] for run in same):,.4g}" for name in headings]
        table.add_row(*key, *figures)
    return table


if __name__ == "__main__":
    sys.exit(app())
