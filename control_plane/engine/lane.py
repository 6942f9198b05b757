"""One worker as the engine core sees it: its scheduler, its rows, its plans in flight.

Keeps the books of one worker; what happens to requests when it goes away is decided in `core.py` and `recovery.py`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Final

from control_plane.engine.facts import Facts
from control_plane.engine.live import Live
from control_plane.engine.logprobs import check_told
from control_plane.engine.pacing import PrefillPacer
from control_plane.engine.row_book import PlanInFlight, RowBook, check_result
from plugins.errors import InvariantBroken, PlanOutOfOrder
from plugins.scheduler import Scheduler, SchedulerLoad
from plugins.types import GenerationId, Request, RequestId, StepPlan, StepResult, WorkerId, WorkerInfo

MAX_PLUGIN_FAILURES: Final = 3  # of a worker's schedulers within the period; then nobody builds another one
PLUGIN_FAILURE_PERIOD_S: Final = 60.0
NO_LOAD: Final = SchedulerLoad(num_running=0, num_waiting=0, num_blocks=0, num_free_blocks=0)


def total_load(loads: Sequence[SchedulerLoad]) -> SchedulerLoad:
    """Add loads up."""
    sums = {each.name: sum(getattr(load, each.name) for load in loads) for each in fields(SchedulerLoad)}
    return SchedulerLoad(**sums)


class Lane:
    """The way of plans to one worker and of results back. Owned by the engine core.

    Invariant: it has a scheduler from `attach` to `detach`; plans go out while its link is LIVE besides.
    """

    def __init__(self, worker_id: WorkerId, target_inter_token_ms: float | None) -> None:
        self.worker_id = worker_id
        self.facts = Facts()
        self.generation = GenerationId("")  # of the worker that was last attached
        self.scheduler: Scheduler | None = None
        self.live: dict[RequestId, Live] = {}  # the requests that the scheduler has
        self.in_flight: deque[PlanInFlight] = deque()
        self.probe: Live | None = None  # the one suspect that is tried here
        self.num_watched = 0  # requests whose text may end them
        self._num_told = 0  # requests that asked for log-probabilities
        self._plugin_failures_s: deque[float] = deque()  # when its schedulers raised, within the period
        self._rows: RowBook | None = None  # as the worker knows them; None while there is no scheduler
        self._load: SchedulerLoad | None = None  # what the scheduler said last; None: it has changed since
        self._vocab_size = 0
        self._target_inter_token_ms = target_inter_token_ms
        self._pacer = PrefillPacer(None)

    def attach(self, scheduler: Scheduler, worker: WorkerInfo, generation: GenerationId) -> None:
        """A worker is there: plans may go out, from seq 1."""
        self.scheduler = scheduler
        self._load = None
        self.generation = generation
        self._rows = RowBook(worker)
        self._vocab_size = worker.model.vocab_size
        self._pacer = PrefillPacer(self._target_inter_token_ms)

    def detach(self) -> tuple[list[Live], set[Live]]:
        """The worker is gone. Returns its requests, oldest first, and those of them that were in lost plans."""
        requests = sorted(self.live.values(), key=lambda live: live.request.arrival)
        lost = {owner for plan in self.in_flight for owner in plan.owners.values()}
        self.scheduler = self.probe = self._rows = None
        self.live.clear()
        self.num_watched = self._num_told = 0
        self.in_flight.clear()
        for live in requests:
            live.lane = None
        return requests, lost.intersection(requests)

    def add(self, live: Live) -> None:
        """Give the scheduler a request, with the output that it has. It is the lane's even if that raises."""
        live.lane = self
        live.num_tokens_here = 0
        self.live[live.request.request_id] = live
        self._count(live, 1)
        self._load = None
        self._schedulers().add_request(live.continued if live.token_ids else live.request)

    def forget(self, live: Live) -> None:
        """A request has ended; the scheduler knows."""
        if self.live.pop(live.request.request_id, None) is not None:
            self._count(live, -1)
        live.lane = None
        if self.probe is live:
            self.probe = None

    def _count(self, live: Live, sign: int) -> None:
        if live.watcher is not None:
            self.num_watched += sign
        if live.tells_logprobs or live.tells_prompt:
            self._num_told += sign

    @property
    def may_try_suspect(self) -> bool:
        """True if a death of this worker would tell on a suspect: it tries no other, and who came back has settled."""
        return (
            self.scheduler is not None
            and self.probe is None
            and all(live.is_settled or not live.is_recovered for live in self.live.values())
        )

    def note_plugin_failure(self, now_s: float) -> None:
        """A scheduler that is a plug-in raised."""
        self._plugin_failures_s.append(now_s)
        while now_s - self._plugin_failures_s[0] > PLUGIN_FAILURE_PERIOD_S:
            self._plugin_failures_s.popleft()

    @property
    def has_too_many_plugin_failures(self) -> bool:
        """True if nobody should build another scheduler."""
        return len(self._plugin_failures_s) >= MAX_PLUGIN_FAILURES

    def load(self) -> SchedulerLoad:
        """How busy the scheduler is; zeros while there is none."""
        if self.scheduler is None:
            return NO_LOAD
        if self._load is None:
            self._load = self.scheduler.load()
        return self._load

    def num_cached_tokens(self, request: Request) -> int:
        """How many leading tokens of the prompt need no computing here."""
        return 0 if self.scheduler is None else self.scheduler.num_cached_tokens(request)

    def cancel(self, request_id: RequestId) -> None:
        """Let the scheduler drop a request."""
        self._load = None
        self._schedulers().cancel_request(request_id)

    def reset_prefix_cache(self) -> None:
        """Let the scheduler forget all cached blocks."""
        self._load = None
        self._schedulers().reset_prefix_cache()

    # -- plans and results --------------------------------------------------------------------------------------

    def next_plan(self) -> StepPlan | None:
        """Ask the scheduler for a plan, if another may be in flight; None: there is none to make.

        Raises: InvariantBroken: no worker could carry the plan out; whatever the scheduler raises.
        """
        scheduler = self._schedulers()
        self._load = None
        if len(self.in_flight) >= scheduler.max_plans_in_flight or not scheduler.has_work():
            return None
        plan = scheduler.schedule(throttle_prefills=True) if self._pacer.throttles else scheduler.schedule()
        if plan.is_empty or self._rows is None:
            return None
        in_flight = self._rows.read(plan, self.live)
        self.in_flight.append(in_flight)
        self._pacer.note_plan(in_flight.num_prompts)
        return plan

    def take(self, result: StepResult) -> PlanInFlight:
        """Match a result with the oldest plan in flight, and return that. The scheduler is to be told of it.

        Raises: PlanOutOfOrder: it is not that plan's, or says what no result of it could.
        """
        if not self.in_flight or self.in_flight[0].seq != result.seq:
            expected = self.in_flight[0].seq if self.in_flight else "none"
            raise PlanOutOfOrder(f"result {result.seq} came, expected {expected}")
        plan, *later = self.in_flight
        check_result(plan, later, result, self._vocab_size)
        if self._num_told:
            check_told(plan, result)
        self._load = None
        self._pacer.note_result(plan.num_decodes, plan.num_prompts, result)
        self.in_flight.popleft()
        return plan

    def _schedulers(self) -> Scheduler:
        if self.scheduler is None:
            raise InvariantBroken(f"worker {self.worker_id} has no scheduler")
        return self.scheduler


@dataclass(frozen=True, slots=True)
class GuardedLane:
    """A lane as others may ask it: if its scheduler raises, the lane is lost and the answer is nothing."""

    lane: Lane
    guard: Callable[[Lane], AbstractContextManager[None]]

    def load(self) -> SchedulerLoad:
        """How busy it is."""
        load = NO_LOAD
        with self.guard(self.lane):
            load = self.lane.load()
        return load

    def num_cached_tokens(self, request: Request) -> int:
        """How many leading tokens of the prompt need no computing there."""
        num_tokens = 0
        with self.guard(self.lane):
            num_tokens = self.lane.num_cached_tokens(request)
        return num_tokens
