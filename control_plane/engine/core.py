"""The engine without its surroundings: requests and results in, plans and deliveries out.

No I/O, no clock, no await: drivers (asyncio, in process, simulated) carry plans to workers and deliveries to readers,
and decide nothing about requests.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.facts import INTAKE_MOVES, Facts, Intake, Link, move
from control_plane.engine.lane import GuardedLane, Lane, total_load
from control_plane.engine.ledger import Ledger
from control_plane.engine.live import Live
from control_plane.engine.outputs import StepOutput
from control_plane.engine.quota import RETRY_AFTER_S
from control_plane.engine.recovery import Recovery, is_culprit, judge_death
from control_plane.engine.router import Router
from control_plane.engine.stopping import StopWatcher, cut_at_stops
from plugins.errors import (
    DeadlineExceeded,
    InvariantBroken,
    NotServing,
    PlanOutOfOrder,
    PluginFailed,
    QueryOfDeath,
    QueuedTooLong,
    RecoveryTimedOut,
    RequestCancelled,
    ServingError,
    WorkerLeaving,
    WorkerTaken,
)
from plugins.kv_events import BlocksCleared, KvEvent
from plugins.scheduler import Scheduler, SchedulerLoad
from plugins.types import (
    FinishReason,
    GenerationId,
    Request,
    RequestId,
    StepPlan,
    StepResult,
    WorkerId,
    WorkerInfo,
)


class EngineCore:
    """The requests of one control plane, from submission to their one end. Called from one task or thread.

    Each request is on one worker's lane, or kept until there is one. Times are seconds on the driver's clock.
    Invariant: every request that `submit` took gets exactly one delivery with `finish`, and none after it.
    """

    def __init__(
        self,
        make_scheduler: Callable[[WorkerInfo], Scheduler],
        limits: AdmissionConfig,
        router: Router,
        recovery_timeout_s: float = 30.0,
        target_inter_token_ms: float | None = None,
        reraises: bool = False,
    ) -> None:
        self._make_scheduler = make_scheduler
        self._is_builtin = bool(getattr(make_scheduler, "is_builtin", True))
        self._ledger = Ledger(limits)
        self._router = router
        self._target_inter_token_ms = target_inter_token_ms
        self._reraises = reraises  # a scheduler's exception goes to the caller as it was
        self.intake = Intake.OPEN  # of the server; each worker has one of its own
        self._lanes: dict[WorkerId, Lane] = {}
        self._dirty: dict[WorkerId, Lane] = {}  # lanes that may have another plan to make
        self._recovery = Recovery(recovery_timeout_s)
        self._now_s = 0.0  # the latest time that anybody told
        self._lost: list[tuple[WorkerId, ServingError]] = []
        self._kv_events: list[tuple[WorkerId, KvEvent]] = []
        self._records_kv_events = False

    # -- workers ------------------------------------------------------------------------------------------------

    def connect(self, worker_id: WorkerId) -> None:
        """Somebody is about to open a step stream to the worker."""
        lane = self._lanes.get(worker_id)
        if lane is None:
            lane = self._lanes[worker_id] = Lane(worker_id, self._target_inter_token_ms)
        lane.facts.move_link(Link.CONNECTING)

    def attach(self, worker_id: WorkerId, worker: WorkerInfo, generation: GenerationId, now_s: float) -> None:
        """A worker's step stream is live: plans may go out, from seq 1.

        Raises: PluginFailed: no scheduler could be built for it, and `detach` is due.
        """
        self._now_s = now_s
        lane = self._lane(worker_id)
        try:
            scheduler = self._make_scheduler(worker)
            scheduler.record_kv_events(self._records_kv_events)
        except Exception as error:
            if self._is_builtin or self._reraises:
                raise
            failed = self._plugin_failed(lane, error)
            self._detach(lane, failed)
            raise failed from error
        lane.facts.move_link(Link.LIVE)
        lane.attach(scheduler, worker, generation)
        self._dirty[worker_id] = lane
        self._recovery.note_adopted(generation)
        for live in self._recovery.take_homeless(generation):
            self._place(live)

    def halt(self, worker_id: WorkerId) -> None:
        """Plan no more for a worker that will be detached: its requests are not to be blamed for plans it never saw."""
        facts = self._lane(worker_id).facts
        if facts.link is Link.LIVE:
            facts.move_link(Link.LOST)

    def detach(self, worker_id: WorkerId, error: ServingError, now_s: float) -> None:
        """The step stream is gone: its requests go to others, or wait for one. Nothing happens if it is detached."""
        self._now_s = now_s
        self._detach(self._lane(worker_id), error)

    def give_up(self, worker_id: WorkerId) -> None:
        """The worker is lost for good: nobody will connect to it again until someone acts."""
        self._lane(worker_id).facts.move_link(Link.FAILED)

    def remove(self, worker_id: WorkerId) -> None:
        """Forget a worker that is detached. Raises: InvariantBroken: it is attached."""
        if self._lane(worker_id).scheduler is not None:
            raise InvariantBroken(f"worker {worker_id} is removed while it is attached")
        del self._lanes[worker_id]
        self._dirty.pop(worker_id, None)

    def move_intake(self, to: Intake, worker_ids: Collection[WorkerId] = ()) -> None:
        """Open, pause or drain some workers, or with none named the server. All or nothing.

        Raises: InvariantBroken: not a legal move, or no such worker.
        """
        lanes = [self._lane(worker_id) for worker_id in worker_ids]
        for lane in lanes:
            move(INTAKE_MOVES, lane.facts.intake, to)
        for lane in lanes:
            lane.facts.move_intake(to)
        if not worker_ids:
            self.intake = move(INTAKE_MOVES, self.intake, to)
        self._dirty |= {lane.worker_id: lane for lane in self._lanes.values()}

    def reset_prefix_cache(self, worker_ids: Collection[WorkerId] = ()) -> None:
        """Let some workers, or all, forget their cached blocks. Raises: InvariantBroken: no such worker."""
        for lane in [self._lane(worker_id) for worker_id in worker_ids] or tuple(self._lanes.values()):
            if lane.scheduler is not None:
                self._dirty[lane.worker_id] = lane
                with self._guarded(lane):
                    lane.reset_prefix_cache()

    def record_kv_events(self, is_on: bool) -> None:
        """Begin or cease to tell what happens to cached blocks."""
        self._records_kv_events = is_on
        for lane in tuple(self._lanes.values()):
            if lane.scheduler is not None:
                with self._guarded(lane):
                    lane.scheduler.record_kv_events(is_on)

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, generation: GenerationId, now_s: float, watcher: StopWatcher | None = None
    ) -> None:
        """Take a request of one output for the workers of a generation. Raises: as `submit_all`."""
        self.submit_all((request,), generation, now_s, (watcher,))

    def submit_all(
        self,
        requests: Sequence[Request],
        generation: GenerationId,
        now_s: float,
        watchers: Sequence[StopWatcher | None] | None = None,
    ) -> None:
        """Take all outputs of one request, or none; the first one leads. Watchers say where each of them ends.

        Raises: NotServing: none is attached, or intake is closed; DuplicateRequest; QueueFull; TenantQuotaExceeded.
        """
        self._now_s = now_s
        if self.intake is Intake.DRAINING:
            raise NotServing("the server is draining and takes no new requests")
        lanes = self._lanes_of(generation)
        if lanes and all(lane.facts.intake is Intake.DRAINING for lane in lanes):
            raise NotServing(f"no worker takes requests: {len(lanes)} drain; open them by name with resume-intake")
        if not lanes:
            raise NotServing("no worker that takes requests is connected")
        self._ledger.check(requests)
        for live in self._ledger.enter(requests, generation, now_s, watchers or (None,) * len(requests)):
            self._place(live)

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request early, CANCELLED or DEADLINE. Unknown and ended ones are ignored.

        The first of several outputs stands for all of them, ended or not; another one only for itself.
        """
        error: ServingError = RequestCancelled("the request was cancelled")
        if reason is FinishReason.DEADLINE:
            error = DeadlineExceeded("the deadline passed before the output was complete")
        for live in self._ledger.outputs_of(request_id):
            self.end(live.request.request_id, reason, error)

    def expire_waiting(self, request_id: RequestId, waited_s: float) -> None:
        """End a request that has waited too long, if none of its outputs ever had a row.

        Those that wait while another one runs are not late: siblings wait until the prompt is computed, for one.
        """
        live = self._ledger.live.get(request_id)
        if live is not None and not live.had_turn:
            self.end(request_id, FinishReason.FAILED, QueuedTooLong(waited_s, RETRY_AFTER_S))

    def expire_homeless(self, now_s: float) -> None:
        """End the requests whose generation has been without a worker for too long."""
        for live, waited_s in self._recovery.expired(now_s):
            self._end(live, FinishReason.FAILED, RecoveryTimedOut(round(waited_s, 1)))

    def next_expiry_s(self) -> float | None:
        """When `expire_homeless` will first have something to do; None: not as things are."""
        return self._recovery.next_expiry_s()

    def end(self, request_id: RequestId, reason: FinishReason, error: ServingError) -> None:
        """End a request early, for any reason. Unknown and ended ones are ignored."""
        live = self._ledger.live.get(request_id)
        if live is None:
            return
        lane = live.lane
        self._end(live, reason, error)
        if lane is not None and lane.scheduler is not None:
            self._dirty[lane.worker_id] = lane
            with self._guarded(lane):
                lane.cancel(request_id)

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self, results: Iterable[tuple[WorkerId, StepResult]], now_s: float) -> StepOutput:
        """Take the results that arrived, in order, and plan as far ahead as the schedulers allow.

        A worker whose result is out of order, or whose plug-in scheduler raises, is detached.
        Raises: whatever a built-in scheduler raises, which is a bug; in process, whatever any scheduler raises.
        """
        self._now_s = now_s
        for worker_id, result in results:
            lane = self._lanes.get(worker_id)
            if lane is not None and lane.scheduler is not None:  # else it was on its way when its worker was detached
                self._dirty[worker_id] = lane
                with self._guarded(lane):
                    self._take(lane, lane.scheduler, result)
        if len(self._recovery):
            self._try_suspects()
        plans = self._plan()
        output = StepOutput(plans, self._ledger.take_deliveries(), tuple(self._lost), tuple(self._kv_events))
        self._lost, self._kv_events = [], []
        return output

    def has_work(self) -> bool:
        """True while a request is at hand or a plan in flight."""
        ledger = self._ledger
        return bool(ledger.live or ledger.has_news or any(lane.in_flight for lane in self._lanes.values()))

    @property
    def has_news(self) -> bool:
        """True if the next step has something to tell, whatever else happens."""
        return self._ledger.has_news or bool(self._lost)

    # -- what there is to know ----------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All workers that were connected and not removed."""
        return tuple(self._lanes)

    @property
    def max_waiting(self) -> int:
        """Requests that may wait for a row; `submit` refuses more."""
        return self._ledger.quota.max_waiting

    @property
    def num_waiting(self) -> int:
        """Requests that never had a row."""
        return self._ledger.quota.num_waiting

    def num_in_flight(self, worker_id: WorkerId) -> int:
        """Plans of a worker that have no result yet."""
        return len(self._lane(worker_id).in_flight)

    def num_live(self, worker_id: WorkerId | None = None) -> int:
        """Requests at hand, of one worker or in all."""
        return len(self._ledger.live) if worker_id is None else len(self._lane(worker_id).live)

    def facts(self, worker_id: WorkerId) -> Facts:
        """The four facts of a worker, to read. Raises: InvariantBroken: no such worker."""
        return self._lane(worker_id).facts

    def worker_load(self, worker_id: WorkerId) -> SchedulerLoad:
        """How busy a worker is; zeros while it is not attached."""
        return self._guard(self._lane(worker_id)).load()

    def load(self) -> SchedulerLoad:
        """How busy all workers are together; requests without a worker wait."""
        loads = [self._guard(lane).load() for lane in tuple(self._lanes.values())]
        return total_load([*loads, SchedulerLoad(num_waiting=len(self._recovery))])

    # -- placing ------------------------------------------------------------------------------------------------

    def _lane(self, worker_id: WorkerId) -> Lane:
        try:
            return self._lanes[worker_id]
        except KeyError:
            raise InvariantBroken(f"worker {worker_id} is unknown") from None

    def _lanes_of(self, generation: GenerationId) -> list[Lane]:
        return [lane for lane in self._lanes.values() if lane.scheduler is not None and lane.generation == generation]

    def _place(self, live: Live) -> None:
        """Give a request to a worker of its generation; with none there, keep it."""
        lanes = self._lanes_of(live.generation)
        if not lanes:
            self._recovery.add(live)
            self._recovery.note_orphaned(live.generation, self._now_s)
            return
        leader = self._ledger.live.get(live.request.sibling_of) if live.request.sibling_of is not None else None
        if leader is not None and leader.lane is not None and leader.generation == live.generation:
            self._add(leader.lane, live)
            return
        for intake in (Intake.OPEN, Intake.PAUSED, Intake.DRAINING):
            candidates = [lane for lane in lanes if lane.facts.intake is intake]
            if candidates:
                # A newcomer beside a suspect would share the blame for a death: it goes elsewhere if it can.
                candidates = [lane for lane in candidates if lane.probe is None] or candidates
                self._add(self._choose(live.request, candidates), live)
                return

    def _choose(self, request: Request, lanes: list[Lane]) -> Lane:
        if len(lanes) == 1:
            return lanes[0]
        trusted = self._is_builtin  # ours need no guard, which costs more than the question
        return lanes[self._router.choose(request, lanes if trusted else [self._guard(lane) for lane in lanes])]

    def _guard(self, lane: Lane) -> GuardedLane:
        return GuardedLane(lane, self._guarded)

    def _add(self, lane: Lane, live: Live) -> None:
        if lane.scheduler is None:
            self._place(live)  # its scheduler raised while it was asked
            return
        self._dirty[lane.worker_id] = lane
        with self._guarded(lane):
            lane.add(live)

    def _try_suspects(self) -> None:
        """Give each worker that could try one the oldest suspect of its generation."""
        for lane in tuple(self._lanes.values()):
            if lane.may_try_suspect and self._may_step(lane):
                suspect = self._recovery.take_suspect(lane.generation)
                if suspect is not None:
                    lane.probe = suspect
                    self._add(lane, suspect)

    # -- losing -------------------------------------------------------------------------------------------------

    @contextmanager
    def _guarded(self, lane: Lane) -> Iterator[None]:
        """Let what goes wrong with one worker, or with its plug-in, end at that worker."""
        try:
            yield
        except PlanOutOfOrder as error:
            self._lose(lane, error)
        except Exception as error:
            if self._is_builtin or self._reraises:
                self._dirty[lane.worker_id] = lane  # whoever goes on all the same finds everything as it was
                raise
            self._lose(lane, self._plugin_failed(lane, error))

    def _lose(self, lane: Lane, error: ServingError) -> None:
        self._lost.append((lane.worker_id, error))
        self._detach(lane, error)

    def _plugin_failed(self, lane: Lane, error: Exception) -> PluginFailed:
        lane.note_plugin_failure(self._now_s)
        return PluginFailed(f"the scheduler raised {type(error).__name__}: {error}")

    def _detach(self, lane: Lane, error: ServingError) -> None:
        if lane.facts.link is Link.FAILED:
            return
        is_failed = lane.has_too_many_plugin_failures and isinstance(error, PluginFailed)
        lane.facts.move_link(Link.FAILED if is_failed else Link.LOST)
        if lane.scheduler is None:
            return
        requests, lost = lane.detach()
        if self._records_kv_events:
            self._kv_events.append((lane.worker_id, BlocksCleared()))
        if isinstance(error, PluginFailed):
            for live in requests:
                self._end(live, FinishReason.FAILED, error)
        else:
            self._move_on(requests, lost, is_death=not isinstance(error, WorkerLeaving | WorkerTaken))
        if not self._lanes_of(lane.generation):
            self._recovery.note_orphaned(lane.generation, self._now_s)

    def _move_on(self, requests: list[Live], lost: set[Live], is_death: bool) -> None:
        """Find another place for the requests of a lost worker, oldest first, or keep them until there is one."""
        suspects = judge_death(lost) if is_death else set()
        for live in requests:
            if is_culprit(live):
                self._end(live, FinishReason.FAILED, QueryOfDeath(live.request.request_id))
                continue
            live.is_recovered = live in lost
            if is_death and live in lost:
                live.is_suspect = live in suspects
            if live.is_suspect:
                self._recovery.add(live)
            else:
                self._place(live)

    # -- planning and delivering --------------------------------------------------------------------------------

    def _may_step(self, lane: Lane) -> bool:
        return self.intake is not Intake.PAUSED and lane.facts.permit_step

    def _plan(self) -> tuple[tuple[WorkerId, StepPlan], ...]:
        plans: list[tuple[WorkerId, StepPlan]] = []
        while self._dirty:
            worker_id, lane = self._dirty.popitem()
            while lane.scheduler is not None and self._may_step(lane):
                plan = None
                with self._guarded(lane):
                    plan = lane.next_plan()
                if plan is None:
                    break
                for admission in plan.admitted:
                    self._ledger.note_started(self._ledger.live[admission.request_id], admission.num_cached_tokens)
                plans.append((worker_id, plan))
            if self._records_kv_events and lane.scheduler is not None:
                with self._guarded(lane):
                    self._kv_events += [(worker_id, event) for event in lane.scheduler.take_kv_events()]
        return tuple(plans)

    def _take(self, lane: Lane, scheduler: Scheduler, result: StepResult) -> None:
        plan = lane.take(result)
        if lane.num_watched:
            cut = cut_at_stops(result, plan.owners)
            result = cut.result
            for broken, error in cut.broken:
                self._end(broken, FinishReason.FAILED, error)
                lane.cancel(broken.request.request_id)
        finished = {end.request_id: end.reason for end in scheduler.update(result)}
        self._ledger.read(plan, result, finished)
        for request_id, reason in finished.items():
            live = lane.live.get(request_id)
            if live is not None:
                self._end(live, reason)

    def _end(self, live: Live, reason: FinishReason, error: ServingError | None = None) -> None:
        if live.lane is None:
            self._recovery.discard(live)
        self._ledger.end(live, reason, error)
