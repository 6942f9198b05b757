"""Drives schedulers and engine cores with fake workers, and keeps what came of it.

Checks that each request ends once; what else is right is told by the tests.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.core import EngineCore
from control_plane.engine.outputs import Delivery
from control_plane.engine.router import RoundRobin, Router
from control_plane.engine.stopping import StopWatcher
from control_plane.scheduling.batching import BatchingScheduler
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.errors import ServingError, WorkerLost
from plugins.scheduler import Scheduler
from plugins.types import (
    Admission,
    FinishReason,
    GenerationId,
    Request,
    RequestId,
    Row,
    StepPlan,
    StepResult,
    TokenId,
    TokenLogprobs,
    WorkerId,
    WorkerInfo,
)
from tests.fakes import FakeWorker, request, worker_info

MAX_STEPS = 20_000  # more is a loop without end


def asking(name: str, prompt: Iterable[int] = range(3, 8), max_tokens: int = 4, **fields: Any) -> Request:
    """A request with any field set."""
    return replace(request(name, prompt, max_tokens), **fields)


def outputs(name: str, num: int, prompt: Iterable[int] = range(3, 8), max_tokens: int = 4) -> tuple[Request, ...]:
    """The outputs of one request, as admission names them."""
    first = asking(name, prompt, max_tokens)
    others = (asking(f"{name}·{index}", prompt, max_tokens, sibling_of=first.request_id) for index in range(1, num))
    return (first, *others)


class StopsAt:
    """A StopWatcher that ends an output with its token number `num_tokens`, and remembers what it was given."""

    def __init__(self, num_tokens: int | None) -> None:
        self.num_tokens = num_tokens
        self.token_ids: list[TokenId] = []
        self.is_stopped = False  # the worker said so

    def push(self, token_ids: Sequence[TokenId], is_stopped: bool = False) -> int | None:
        num_before = len(self.token_ids)
        self.token_ids += token_ids
        self.is_stopped = is_stopped
        if self.num_tokens is None or len(self.token_ids) < self.num_tokens:
            return None
        return self.num_tokens - num_before


class Bench:
    """A scheduler beside the worker that it plans for. Results are given back in order, when the test says so."""

    def __init__(self, scheduler: BatchingScheduler, worker: FakeWorker | None = None) -> None:
        self.scheduler = scheduler
        self.worker = worker or FakeWorker()
        self.plans: list[StepPlan] = []
        self.outputs: dict[RequestId, tuple[TokenId, ...]] = {}
        self.ends: dict[RequestId, FinishReason] = {}
        self._rows: dict[Row, RequestId] = {}
        self._in_flight: deque[tuple[StepResult, dict[Row, RequestId]]] = deque()

    def add(self, *requests: Request) -> None:
        """Give the scheduler requests."""
        for each in requests:
            if each.cache_salt:
                self.worker.salts[each.request_id] = each.cache_salt
            self.scheduler.add_request(each)

    def plan(self, throttle_prefills: bool = False) -> StepPlan:
        """Make one plan and let the worker carry it out; its result stays on its way."""
        plan = self.scheduler.schedule(throttle_prefills)
        if plan.is_empty:
            return plan
        for row in plan.released_rows:
            del self._rows[row]
        self._rows |= {admission.row: admission.request_id for admission in plan.admitted}
        self._in_flight.append((self.worker.execute(plan), dict(self._rows)))
        self.plans.append(plan)
        return plan

    def answer(self) -> None:
        """Bring the oldest result to the scheduler."""
        result, owners = self._in_flight.popleft()
        ended = self.scheduler.update(result)
        start = 0
        for row, count in zip(result.rows, result.counts, strict=True):
            if count:
                tokens = result.token_ids[start : start + count]
                self.outputs[owners[row]] = self.outputs.get(owners[row], ()) + tokens
            start += count
        for end in ended:
            assert end.request_id not in self.ends, f"{end.request_id} ends twice"
            self.ends[end.request_id] = end.reason
        self.scheduler.kv.check()

    def step(self) -> StepPlan:
        """Make one plan and answer it."""
        plan = self.plan()
        while self._in_flight:
            self.answer()
        return plan

    def finish_all(self, ahead: int = 1) -> None:
        """Plan and answer until nothing is left, with so many plans in flight."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_work():
                break
            plan = self.plan()
            assert not plan.is_empty or self._in_flight, "there is work, and nothing moves"
            while self._in_flight and (plan.is_empty or len(self._in_flight) >= ahead):
                self.answer()
                plan = self.plan() if plan.is_empty and self.scheduler.has_work() else plan
        assert not self.scheduler.has_work(), f"not done after {MAX_STEPS} steps"
        while self._in_flight:
            self.answer()

    def admissions(self, name: str) -> list[Admission]:
        """All admissions of one request, in order."""
        return [each for plan in self.plans for each in plan.admitted if each.request_id == name]

    def cached(self, name: str) -> int:
        """How many tokens of a request were found when it was first admitted."""
        return self.admissions(name)[0].num_cached_tokens


class Cluster:
    """An engine core beside its workers. Results of a worker are given back when the test says so."""

    def __init__(
        self,
        make_scheduler: Callable[[WorkerInfo], Scheduler] | None = None,
        limits: AdmissionConfig | None = None,
        router: Router | None = None,
        config: SchedulerConfig | None = None,
        **keys: Any,
    ) -> None:
        scheduling = config or SchedulerConfig()
        self.core = EngineCore(
            make_scheduler or (lambda worker: RunAheadScheduler(scheduling, worker)),
            limits or AdmissionConfig(),
            router or RoundRobin(),
            **keys,
        )
        self.now_s = 0.0
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.plans: list[tuple[WorkerId, StepPlan]] = []
        self.lost: list[tuple[WorkerId, ServingError]] = []
        self.outputs: dict[RequestId, tuple[TokenId, ...]] = {}
        self.logprobs: defaultdict[RequestId, tuple[TokenLogprobs | None, ...]] = defaultdict(tuple)
        self.prompt_logprobs: defaultdict[RequestId, tuple[TokenLogprobs, ...]] = defaultdict(tuple)
        self.ends: dict[RequestId, Delivery] = {}
        self.on_their_way: defaultdict[WorkerId, list[StepResult]] = defaultdict(list)

    def attach(self, name: str, generation: str = "g", info: WorkerInfo | None = None) -> None:
        """A worker is there, and remembers nothing."""
        worker_id = WorkerId(name)
        self.workers[worker_id] = FakeWorker(info or worker_info())
        self.on_their_way[worker_id].clear()
        self.core.connect(worker_id)
        self.core.attach(worker_id, self.workers[worker_id].info, GenerationId(generation), self.now_s)

    def kill(self, name: str, error: ServingError | None = None) -> None:
        """A worker goes away; its results stay on their way."""
        self.core.detach(WorkerId(name), error or WorkerLost("it was killed"), self.now_s)

    def submit(self, *requests: Request, generation: str = "g") -> None:
        """Give the core requests."""
        for each in requests:
            self.core.submit(each, GenerationId(generation), self.now_s)

    def submit_together(self, *requests: Request, watchers: Sequence[StopWatcher | None] | None = None) -> None:
        """Give the core all outputs of one request."""
        self.core.submit_all(requests, GenerationId("g"), self.now_s, watchers)

    def step(self, *names: str) -> tuple[Delivery, ...]:
        """Bring the results of some workers to the core, and its plans to the workers."""
        results = [(WorkerId(name), result) for name in names for result in self.on_their_way.pop(WorkerId(name), [])]
        output = self.core.step(results, self.now_s)
        for worker_id, plan in output.plans:
            self.plans.append((worker_id, plan))
            self.on_their_way[worker_id].append(self.workers[worker_id].execute(plan))
        for delivery in output.deliveries:
            request_id = delivery.request_id
            assert request_id not in self.ends, f"{request_id} hears of itself after its end"
            self.outputs[request_id] = self.outputs.get(request_id, ()) + delivery.token_ids
            self.logprobs[request_id] += delivery.logprobs
            self.prompt_logprobs[request_id] += delivery.prompt_logprobs
            if delivery.finish is not None:
                self.ends[request_id] = delivery
        self.lost += output.lost
        return output.deliveries

    def step_all(self) -> tuple[Delivery, ...]:
        """Bring all results to the core."""
        return self.step(*self.on_their_way)

    def finish_all(self) -> None:
        """Go on until nothing is left."""
        for _ in range(MAX_STEPS):
            if not self.core.has_work():
                return
            self.step_all()
        raise AssertionError(f"not done after {MAX_STEPS} steps")

    def placed(self) -> dict[str, str]:
        """Which worker admitted each request last."""
        return {each.request_id: worker_id for worker_id, plan in self.plans for each in plan.admitted}
