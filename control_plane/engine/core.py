"""The engine without its surroundings: requests and results in, plans and deliveries out.

No I/O, no clock, no await: drivers (asyncio, in process, simulated) carry plans to a worker and deliveries to readers,
and decide nothing about requests.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from control_plane.engine.facts import Facts, Intake, Link
from plugins.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    InvariantBroken,
    NotServing,
    PlanOutOfOrder,
    QueueFull,
    RequestCancelled,
    ServingError,
    StepFailed,
)
from plugins.scheduler import Scheduler, SchedulerLoad
from plugins.types import FinishReason, Request, RequestId, Row, StepPlan, StepResult, TokenId, WorkerInfo

NO_LOAD = SchedulerLoad(num_running=0, num_waiting=0, num_blocks=0, num_free_blocks=0, num_preemptions=0)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What happened to one request in this step. The one with `finish` is the last of its request."""

    request_id: RequestId
    token_ids: tuple[TokenId, ...] = ()
    finish: FinishReason | None = None
    error: ServingError | None = None  # set when the end is not STOP or LENGTH


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step asks of its driver: hand the plans out in order, bring the deliveries to their readers."""

    plans: tuple[StepPlan, ...]
    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Live:
    """One use of a request's name. Compared by identity: a name may be used again while old plans are in flight."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class _PlanInFlight:
    """Whose row is whose in one plan: its result is read through this, never through today's rows."""

    seq: int
    owners: dict[Row, _Live]


class EngineCore:
    """The requests of one worker, from submission to their one end. Called from one task or thread.

    Invariant: every request that `submit` took gets exactly one delivery with `finish`, and none after it.
    """

    def __init__(self, make_scheduler: Callable[[WorkerInfo], Scheduler], max_waiting: int) -> None:
        self.facts = Facts()
        self._make_scheduler = make_scheduler
        self._max_waiting = max_waiting
        self._scheduler: Scheduler | None = None  # None while no worker is attached
        self._live: dict[RequestId, _Live] = {}  # submitted and not ended
        self._ending: set[RequestId] = set()  # ended, and the next step delivers it: the name is not free yet
        self._owners: dict[Row, _Live] = {}  # today's rows
        self._in_flight: deque[_PlanInFlight] = deque()
        self._deliveries: list[Delivery] = []

    # -- commands -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Somebody is about to open a step stream to the worker."""
        self.facts.move_link(Link.CONNECTING)

    def attach(self, worker: WorkerInfo) -> None:
        """A worker's step stream is live: plans may go out, from seq 1."""
        self.facts.move_link(Link.LIVE)
        self._scheduler = self._make_scheduler(worker)

    def detach(self, error: ServingError) -> None:
        """The step stream is gone: every request of that worker ends with this error."""
        self.facts.move_link(Link.LOST)
        self._scheduler = None
        self._owners.clear()
        self._in_flight.clear()
        for request_id in tuple(self._live):
            self._end(request_id, FinishReason.FAILED, error)

    def give_up(self) -> None:
        """The worker is lost for good: nobody will connect to it again until someone acts."""
        self.facts.move_link(Link.FAILED)

    def submit(self, request: Request) -> None:
        """Take a request.

        Raises: NotServing: no worker is attached, or intake is closed; DuplicateRequest; QueueFull.
        """
        if self.facts.intake is Intake.DRAINING:
            raise NotServing("the server is draining and takes no new requests")
        if self._scheduler is None:
            raise NotServing("no worker is connected")
        if request.request_id in self._live or request.request_id in self._ending:
            raise DuplicateRequest(request.request_id)
        num_waiting = self._scheduler.load().num_waiting
        if num_waiting >= self._max_waiting:
            raise QueueFull(num_waiting, self._max_waiting, retry_after_s=1.0)
        self._scheduler.add_request(request)
        self._live[request.request_id] = _Live(request.request_id)

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request early, CANCELLED or DEADLINE. Unknown and ended ones are ignored."""
        if request_id not in self._live or self._scheduler is None:
            return
        self._scheduler.cancel_request(request_id)
        if reason is FinishReason.DEADLINE:
            self._end(request_id, reason, DeadlineExceeded("the deadline passed before the output was complete"))
        else:
            self._end(request_id, reason, RequestCancelled("the request was cancelled"))

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self, results: Iterable[StepResult] = ()) -> StepOutput:
        """Take the results that arrived, in order, and plan as far ahead as the scheduler allows.

        Raises: PlanOutOfOrder: a result is not that of the oldest plan in flight, or tells of rows that are not in
        it; whatever the scheduler raises, as it was.
        """
        for result in results:
            self._take(result)
        plans = self._plan()
        deliveries, self._deliveries = tuple(self._deliveries), []
        self._ending.clear()
        return StepOutput(plans, deliveries)

    def has_work(self) -> bool:
        """True while a request is at hand or a plan in flight."""
        return bool(self._live or self._in_flight or self._deliveries)

    @property
    def max_waiting(self) -> int:
        """Requests that may wait for a row; `submit` refuses more."""
        return self._max_waiting

    @property
    def num_in_flight(self) -> int:
        """Plans that have no result yet."""
        return len(self._in_flight)

    def load(self) -> SchedulerLoad:
        """Tell how busy the scheduler is; zeros while no worker is attached."""
        return NO_LOAD if self._scheduler is None else self._scheduler.load()

    def _plan(self) -> tuple[StepPlan, ...]:
        plans: list[StepPlan] = []
        scheduler = self._scheduler
        while (
            scheduler is not None
            and self.facts.permit_step
            and len(self._in_flight) < scheduler.max_plans_in_flight
            and scheduler.has_work()
        ):
            plan = scheduler.schedule()
            if plan.is_empty:
                break
            self._in_flight.append(_PlanInFlight(plan.seq, self._owners_in(plan)))
            plans.append(plan)
        return tuple(plans)

    def _owners_in(self, plan: StepPlan) -> dict[Row, _Live]:
        """Bring today's rows up to date, and return those that the plan computes.

        Raises: InvariantBroken: the scheduler released or planned an empty row, or admitted a request that ended.
        """
        try:
            for row in plan.released_rows:
                del self._owners[row]
            for admission in plan.admitted:
                self._owners[admission.row] = self._live[admission.request_id]
            return {chunk.row: self._owners[chunk.row] for chunk in plan.chunks}
        except KeyError as error:
            raise InvariantBroken(f"plan {plan.seq} names {error}, which holds or is no request in flight") from None

    def _take(self, result: StepResult) -> None:
        if self._scheduler is None:
            return  # a result that was on its way when its worker was detached
        if not self._in_flight or self._in_flight[0].seq != result.seq:
            expected = self._in_flight[0].seq if self._in_flight else "none"
            raise PlanOutOfOrder(f"result {result.seq} came, expected {expected}")
        owners = self._in_flight.popleft().owners
        strangers = {*result.rows, *(failure.row for failure in result.failures)} - owners.keys()
        if strangers:
            raise PlanOutOfOrder(f"result {result.seq} tells of rows {sorted(strangers)}, which its plan does not name")
        finished = {end.request_id: end.reason for end in self._scheduler.update(result)}
        start = 0
        for row, count in zip(result.rows, result.counts, strict=True):
            tokens = result.token_ids[start : start + count]
            start += count
            self._deliver(owners[row], tokens, finished)
        for failure in result.failures:
            owner = owners[failure.row]
            if self._live.get(owner.request_id) is owner:
                finished.pop(owner.request_id, None)
                self._end(owner.request_id, FinishReason.FAILED, StepFailed(failure.reason, failure.message))
        for request_id, reason in finished.items():
            self._end(request_id, reason)

    def _deliver(self, owner: _Live, tokens: tuple[TokenId, ...], finished: dict[RequestId, FinishReason]) -> None:
        request_id = owner.request_id
        if self._live.get(request_id) is not owner:
            return  # ended while this plan was on its way
        finish = finished.pop(request_id, None)
        if finish is not None:
            self._forget(request_id)
        elif not tokens:
            return
        self._deliveries.append(Delivery(request_id, tokens, finish))

    def _end(self, request_id: RequestId, reason: FinishReason, error: ServingError | None = None) -> None:
        if request_id in self._live:
            self._forget(request_id)
            self._deliveries.append(Delivery(request_id, (), reason, error))

    def _forget(self, request_id: RequestId) -> None:
        del self._live[request_id]
        self._ending.add(request_id)
