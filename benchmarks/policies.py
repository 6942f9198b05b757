"""Compares policies and routers on simulated workers, in virtual time, with the real schedulers and routers.

    python -m benchmarks.policies [--replicas 4] [--requests 4000]

A worker's step takes as long as a formula says, and nothing else takes any time: what differs between the rows of the
table is what was decided. Exits with 1 if routing by prefix hits too little more of it than taking turns does.
"""

import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from itertools import count, product
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.fake_rows import FakeRows, Work
from benchmarks.results_file import write_results
from benchmarks.scheduler_cost import PROGRESS, choose
from benchmarks.traces import (
    ORDINARY,
    TENANTS,
    URGENT,
    VOCAB_SIZE,
    TraceConfig,
    TracedRequest,
    describe_trace,
    generate_trace,
)
from control_plane.engine.router import Router, make_router
from control_plane.engine.scheduler_choice import choose_scheduler
from control_plane.scheduling.config import SchedulerConfig
from plugins.errors import InvalidConfig
from plugins.scheduler import Scheduler
from plugins.types import ModelInfo, Request, RequestId, SamplingParams, StepResult, TokenId, WorkerInfo

RESULTS = Path(__file__).parent / "results"
POLICIES = ("fcfs", "priority", "fair_share")
ROUTERS = ("round_robin", "power_of_two", "least_load", "prefix_affinity")
BLOCK_SIZE = 16
BAR_LOAD = "roomy"
HASH_KEY = "the same in every run"
MIN_AFFINITY = 1.5  # hit rate of prefix affinity over that of round robin

app = App(name="python -m benchmarks.policies", help="Compare policies and routers on simulated workers.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """How long a step takes: about as a model of 8 billion parameters on one large accelerator."""

    step_s: float = 8e-3  # reading the weights
    prompt_token_s: float = 5e-5
    decode_s: float = 2e-5  # per row
    context_token_s: float = 5e-8  # reading one token's keys and values
    num_blocks: int = 12_000
    max_sequences: int = 128
    max_step_tokens: int = 2_048

    def duration_s(self, work: Work) -> float:
        """Return the time of one step."""
        return (
            self.step_s
            + self.prompt_token_s * work.num_prompt_tokens
            + self.decode_s * work.num_decodes
            + self.context_token_s * work.num_context_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How fast the trace comes, and how much each worker can keep."""

    conversations_per_s: float
    num_blocks: int


LOADS: Mapping[str, Load] = {
    "roomy": Load(conversations_per_s=16.0, num_blocks=12_000),  # queues are short and caches last to the next turn
    "crowded": Load(conversations_per_s=24.0, num_blocks=4_000),  # bursts exceed what the workers can do
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trace met. Times are virtual seconds; TTFT runs from the arrival to the first token."""

    output_tokens_per_s: float
    ttft_s_p50: float
    ttft_s_p99: float
    urgent_ttft_s_p99: float
    ordinary_ttft_s_p99: float
    small_tenant_ttft_s_p99: float
    preemptions: int
    hit_ratio: float  # of prompt tokens, each request counted once


@app.default
def compare(
    *,
    policies: str = ",".join(POLICIES),
    routers: str = ",".join(ROUTERS),
    watermarks: str = "0.01,0",
    loads: str = ",".join(LOADS),
    replicas: int = 4,
    requests: int = 4_000,
    seed: int = 1,
    name: str = "policies",
) -> int:
    """Run one trace through every combination.

    Parameters
    ----------
    policies: of the scheduler, by comma
    routers: by comma
    watermarks: values of scheduler.watermark_ratio, by comma
    loads: roomy, crowded or both
    replicas: simulated workers
    requests: length of the trace
    seed: of the trace, and of the chance that routers take
    name: of the file in benchmarks/results
    """
    console = Console()
    try:
        cases = list(product(choose(policies, POLICIES), choose(routers, ROUTERS), map(float, watermarks.split(","))))
        chosen = choose(loads, LOADS)
    except InvalidConfig as error:
        console.print(str(error), style="red", markup=False)
        return 1
    runs: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    with Progress(*PROGRESS, console=console) as progress:
        task = progress.add_task("", total=len(chosen) * len(cases))
        for load in chosen:
            progress.update(task, description=f"{load}: the trace")
            rate = LOADS[load].conversations_per_s
            trace = generate_trace(TraceConfig(num_requests=requests, conversations_per_s=rate, seed=seed))
            facts[load] = asdict(LOADS[load]) | asdict(describe_trace(trace, BLOCK_SIZE))
            model = WorkerModel(num_blocks=LOADS[load].num_blocks)
            for policy, router, watermark in cases:
                progress.update(task, description=f"{load}: {policy}, {router}, {watermark:g}")
                outcome = simulate(trace, model, policy, router, watermark, replicas, seed)
                case = {"load": load, "policy": policy, "router": router, "watermark": watermark}
                runs.append(case | asdict(outcome))
                progress.advance(task)
    gain = affinity_gain(run for run in runs if run["load"] == BAR_LOAD)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    results = {
        "traces": facts,
        "worker": asdict(WorkerModel()),
        "replicas": replicas,
        "affinity_gain": gain,
        "runs": runs,
    }
    write_results(path, results)
    for load in chosen:
        console.print(f"{load}: {facts[load]}", highlight=False, soft_wrap=True)
        console.print(_table([run for run in runs if run["load"] == load]))
    if gain is not None:
        console.print(
            f"{BAR_LOAD}: prefix affinity hits {gain:.2f} times what round robin does (bar: {MIN_AFFINITY:g})"
        )
    console.print(f"written to {path}", highlight=False)
    return 1 if gain is not None and gain < MIN_AFFINITY else 0


def affinity_gain(runs: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the least ratio of the two routers' hit rates, over policies and watermarks; None if one is missing."""
    hits = {(run["policy"], run["watermark"], run["router"]): float(run["hit_ratio"]) for run in runs}
    gains = [
        hit / hits[policy, watermark, "round_robin"]
        for (policy, watermark, router), hit in hits.items()
        if router == "prefix_affinity" and (policy, watermark, "round_robin") in hits
    ]
    return round(min(gains), 3) if gains else None


def simulate(
    trace: Sequence[TracedRequest],
    model: WorkerModel,
    policy: str,
    router: str,
    watermark: float,
    num_replicas: int,
    seed: int,
) -> Outcome:
    """Serve a trace to its end. The same arguments give the same outcome."""
    factory = choose_scheduler(SchedulerConfig(policy=policy, watermark_ratio=watermark, prefix_hash_key=HASH_KEY))
    replicas = [_Replica(factory(_worker_info(model)), model, trace) for _ in range(num_replicas)]
    simulation = _Simulation(replicas, make_router(router, random.Random(seed).randrange))
    end_s = simulation.run(trace)
    ttft_s = {request.request_id: simulation.first_s[request.request_id] - request.arrival_s for request in trace}
    loads = [replica.scheduler.load() for replica in replicas]
    small = min(TENANTS, key=lambda tenant: tenant[1])[0]

    def p99(requests: Iterable[TracedRequest]) -> float:
        return _quantile([ttft_s[request.request_id] for request in requests], 0.99)

    return Outcome(
        output_tokens_per_s=round(sum(len(request.output_token_ids) for request in trace) / end_s, 1),
        ttft_s_p50=_quantile(ttft_s.values(), 0.5),
        ttft_s_p99=p99(trace),
        urgent_ttft_s_p99=p99(request for request in trace if request.priority == URGENT),
        ordinary_ttft_s_p99=p99(request for request in trace if request.priority == ORDINARY),
        small_tenant_ttft_s_p99=p99(request for request in trace if request.tenant == small),
        preemptions=sum(load.num_preemptions for load in loads),
        hit_ratio=round(sum(load.num_prefix_hits for load in loads) / sum(load.num_prefix_tokens for load in loads), 4),
    )


class _Replica:
    """One worker and its scheduler. Steps run one after the other; plans are made ahead as far as the scheduler may."""

    def __init__(self, scheduler: Scheduler, model: WorkerModel, trace: Sequence[TracedRequest]) -> None:
        self.scheduler = scheduler
        self._model = model
        self._outputs = {request.request_id: request.output_token_ids for request in trace}
        self._firsts: list[str] = []  # requests whose first token the plan at hand samples
        self._rows = FakeRows(self._token)
        self._in_flight: deque[tuple[StepResult, float, list[str]]] = deque()
        self._is_computing = False

    def start(self) -> float | None:
        """Plan what may be planned. Returns how long the next step takes, if the worker was idle and has one now."""
        while self.scheduler.has_work() and len(self._in_flight) < self.scheduler.max_plans_in_flight:
            plan = self.scheduler.schedule()
            if plan.is_empty:
                break
            result, work = self._rows.execute(plan)
            self._in_flight.append((result, self._model.duration_s(work), self._firsts))
            self._firsts = []
        if self._is_computing or not self._in_flight:
            return None
        self._is_computing = True
        return self._in_flight[0][1]

    def finish(self) -> list[str]:
        """The step at hand is done. Returns the requests that have their first token from it."""
        result, _, firsts = self._in_flight.popleft()
        self.scheduler.update(result)
        self._is_computing = False
        return firsts

    def _token(self, request_id: RequestId, index: int) -> TokenId:
        if index == 0:
            self._firsts.append(request_id)
        return self._outputs[request_id][index]


class _Simulation:
    """A router before its workers, in virtual time."""

    def __init__(self, replicas: Sequence[_Replica], router: Router) -> None:
        self.first_s: dict[str, float] = {}  # when each request had its first token
        self._replicas = replicas
        self._router = router
        self._events: list[tuple[float, int, int]] = []  # when, a number that orders ties, whose step ends
        self._numbers = count()

    def run(self, trace: Sequence[TracedRequest]) -> float:
        """Serve all requests; returns when the last one ended."""
        now_s = 0.0
        schedulers = [replica.scheduler for replica in self._replicas]
        for arrival, traced in enumerate(trace, 1):
            now_s = self._advance(traced.arrival_s)
            request = _request(traced, arrival)
            chosen = self._router.choose(request, schedulers)
            schedulers[chosen].add_request(request)
            self._start(chosen, traced.arrival_s)
        return max(now_s, self._advance(float("inf")))

    def _advance(self, until_s: float) -> float:
        """Let steps end that end by then; returns when the last of them did."""
        now_s = 0.0
        while self._events and self._events[0][0] <= until_s:
            now_s, _, index = heappop(self._events)
            for request_id in self._replicas[index].finish():
                self.first_s[request_id] = now_s
            self._start(index, now_s)
        return now_s

    def _start(self, index: int, now_s: float) -> None:
        duration_s = self._replicas[index].start()
        if duration_s is not None:
            heappush(self._events, (now_s + duration_s, next(self._numbers), index))


def _request(traced: TracedRequest, arrival: int) -> Request:
    sampling = SamplingParams(max_tokens=len(traced.output_token_ids), temperature=0.0, seed=0, ignore_eos=True)
    return Request(
        request_id=RequestId(traced.request_id),
        prompt_token_ids=traced.prompt_token_ids,
        sampling=sampling,
        tenant=traced.tenant,
        priority=traced.priority,
        arrival=arrival,
        arrival_s=traced.arrival_s,
    )


def _worker_info(model: WorkerModel) -> WorkerInfo:
    return WorkerInfo(
        model=ModelInfo(
            name="simulated",
            architecture="LlamaForCausalLM",
            dtype="bfloat16",
            vocab_size=VOCAB_SIZE,
            max_model_len=TraceConfig().max_model_len,
            eos_token_ids=(),
            num_parameters=0,
        ),
        incarnation="one",
        num_blocks=model.num_blocks,
        block_size=BLOCK_SIZE,
        max_sequences=model.max_sequences,
        max_step_tokens=model.max_step_tokens,
        kv_cache_dtype="bfloat16",
        kv_bytes=0,
        tokenizer_sha256="",
        load_s=0.0,
    )


def _quantile(values: Iterable[float], quantile: float) -> float:
    ordered = sorted(values)
    return round(ordered[round((len(ordered) - 1) * quantile)], 4) if ordered else 0.0


def _table(runs: Sequence[Mapping[str, Any]]) -> Table:
    headings = {
        "output_tokens_per_s": "tok/s",
        "ttft_s_p50": "TTFT\np50 s",
        "ttft_s_p99": "\np99 s",
        "urgent_ttft_s_p99": "urgent\np99 s",
        "small_tenant_ttft_s_p99": "small\np99 s",
        "preemptions": "pre-\nempted",
        "hit_ratio": "hits",
    }
    table = Table("policy", "router", "water-\nmark", *headings.values(), box=None, padding=(0, 1, 0, 0))
    table.columns[1].no_wrap = True
    for run in runs:
        figures = (f"{run[name]:,.0f}" if run[name] >= 100 else f"{run[name]:.3g}" for name in headings)
        table.add_row(run["policy"], run["router"], f"{run['watermark']:g}", *figures)
    return table


if __name__ == "__main__":
    sys.exit(app())
