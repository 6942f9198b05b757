"""The engine core with its promises checked after every step, and what a request is doing right now.

Looks into the core and its schedulers, and changes nothing.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any, Protocol

from control_plane.engine.core import EngineCore
from control_plane.engine.facts import Intake
from control_plane.engine.lane import Lane
from control_plane.engine.outputs import StepOutput
from control_plane.scheduling.batching import BatchingScheduler
from control_plane.scheduling.sequence import State
from plugins.errors import PluginFailed, ServingError, WorkerLeaving, WorkerTaken
from plugins.types import Admission, FinishReason, RequestId, Row, StepPlan, StepResult, WorkerId
from tests.simulation.clients import Client, Moment
from tests.simulation.faults import FaultPlan, Point

MAX_PREEMPTIONS = 3  # of one request, first come first served, while it stays on its worker


_ARRIVAL = attrgetter("arrival")


class Watched(Protocol):
    """What the checks need of their world."""

    faults: FaultPlan
    live: dict[RequestId, Client]
    watcher: "PlanWatcher"
    stale: list[StepResult]  # results whose epoch was over when they were sent

    def now(self) -> float:
        """Seconds on the virtual clock."""


class CheckedCore(EngineCore):
    """Raises AssertionError, PlanViolation or InvariantBroken from the step that breaks a promise."""

    def __init__(self, world: Watched, is_first_come: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._is_first_come = is_first_come
        self.trace = hashlib.blake2b(digest_size=16)  # of all decisions and all that was delivered
        self.num_plans: Counter[WorkerId] = Counter()
        self._world = world
        self._finished_rows: dict[WorkerId, set[Row]] = {}  # rows whose end the core was told
        self._changed_in: dict[tuple[WorkerId, Row], int] = {}  # the last plan that released or gave out the row

    # -- what happens -------------------------------------------------------------------------------------------

    def step(self, results: Iterable[tuple[WorkerId, StepResult]] = (), now_s: float = 0.0) -> StepOutput:
        taken = tuple(results)
        for worker_id, result in taken:
            is_stale = any(result is stale for stale in self._world.stale)
            assert not is_stale, f"{worker_id}: result {result.seq} of an earlier epoch came to the engine"
            self._note_ends(worker_id, result)
        output = super().step(taken, now_s)
        for worker_id, result in taken:
            self._world.watcher.answered(worker_id, result.seq)
        for worker_id, plan in output.plans:
            self._check_plan(worker_id, plan)
        for delivery in output.deliveries:
            client = self._world.live.get(delivery.request_id)
            assert client is not None, f"{delivery.request_id} has output, and has ended or is unknown"
            if delivery.finish is not None:
                del self._world.live[delivery.request_id]
                client.ended_at = self._world.now()
            finish = 0 if delivery.finish is None else delivery.finish.value
            self._note(f"{delivery.request_id} {delivery.token_ids} {finish} {type(delivery.error).__name__}")
        for lane in self._lanes.values():
            self._check_lane(lane)
        return output

    def _note_ends(self, worker_id: WorkerId, result: StepResult) -> None:
        """Remember which rows have ended, of a result that the core will take; a row may have a new request by now."""
        lane = self._lanes.get(worker_id)
        if lane is None or not lane.in_flight or lane.in_flight[0].seq != result.seq:
            return
        for row, finish in zip(result.rows, result.finishes, strict=False):
            if finish is not None and self._changed_in.get((worker_id, row), 0) <= result.seq:
                self._finished_rows.setdefault(worker_id, set()).add(row)

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        if request_id in self._ledger.live:
            event = "deadline" if reason is FinishReason.DEADLINE else "abort"
            self._world.faults.note_pair(self.state_of(request_id), event)
        super().cancel(request_id, reason)
        named = [each for each, client in self._world.live.items() if request_id in (each, client.group)]
        left = [each for each in named if each in self._ledger.live]
        assert not left, f"{left} go on, and {request_id} was cancelled"

    def expire_homeless(self, now_s: float) -> None:
        before = dict(self._ledger.live)
        super().expire_homeless(now_s)
        for request_id in before.keys() - self._ledger.live.keys():
            lanes = self._lanes_of(before[request_id].generation)
            assert not lanes, f"{request_id} was given up, and {lanes[0].worker_id} is there"

    def _detach(self, lane: Lane, error: ServingError) -> None:
        is_loss = lane.scheduler is not None
        if is_loss:
            self._note_loss(lane, error)
        super()._detach(lane, error)
        self._finished_rows.pop(lane.worker_id, None)
        self._changed_in = {key: seq for key, seq in self._changed_in.items() if key[0] != lane.worker_id}

    def _note_loss(self, lane: Lane, error: ServingError) -> None:
        self._note(f"{lane.worker_id} lost: {type(error).__name__}")
        blamed = () if isinstance(error, WorkerLeaving | WorkerTaken) else self._world.watcher.computing(lane.worker_id)
        for request_id, live in self._ledger.live.items():
            if live.lane is lane or live.lane is None:
                self._world.faults.note_pair(self.state_of(request_id), "crash")
            if live.lane is lane:
                client = self._world.live[request_id]
                client.may_fail = client.may_fail or isinstance(error, PluginFailed)
                client.num_recoveries += 1
                client.num_preemptions = 0
                client.is_preempted = False
                client.num_deaths += client in blamed

    # -- what is checked ----------------------------------------------------------------------------------------

    def state_of(self, request_id: RequestId) -> str:
        """Where a live request is, in one word of `faults.STATES`."""
        live = self._ledger.live[request_id]
        if live.is_suspect:
            return "suspect"
        if live.lane is None or not isinstance(live.lane.scheduler, BatchingScheduler):
            return "homeless"
        sequence = live.lane.scheduler._sequences[request_id]
        if sequence.state is State.RUNNING:
            return "prefilling" if sequence.num_planned < sequence.num_prompt_tokens else "decoding"
        return "preempted" if self._world.live[request_id].is_preempted else "queued"

    def stalled(self) -> list[WorkerId]:
        """Workers that have something to do, may do it, and wait for nothing."""
        return [
            worker_id
            for worker_id, lane in self._lanes.items()
            if lane.scheduler is not None
            and self._may_step(lane)
            and not lane.in_flight
            and (lane.scheduler.has_work() or (lane.probe is None and self._waits_for(lane)))
        ]

    def check_idle(self) -> None:
        """Nothing is at hand: nothing may be held. Raises: AssertionError."""
        assert not self._ledger.live and not self._world.live, f"{sorted(self._ledger.live)} are left"
        assert not len(self._recovery), "somebody waits for a worker"
        quota = self._ledger.quota
        assert not quota._tenants, f"tenants {quota._tenants} have requests"
        assert (quota.num_waiting, quota.num_waiting_tokens) == (0, 0), "the queue is not empty"
        for worker_id, lane in self._lanes.items():
            load = lane.load()
            is_owed = Point.RESULT_SILENT in self._world.faults.fired  # nobody misses a result that is nobody's
            assert is_owed or not lane.in_flight, f"{worker_id} has plans in flight"
            assert not lane.live and lane.probe is None, f"{worker_id} has requests"
            assert (load.num_running, load.num_waiting) == (0, 0), f"{worker_id} has {load}"
            assert load.num_free_blocks == load.num_blocks, f"{worker_id} lost blocks: {load}"

    def _waits_for(self, lane: Lane) -> bool:
        ward = self._recovery._wards.get(lane.generation)
        return ward is not None and bool(ward.homeless or ward.suspects)

    def _check_plan(self, worker_id: WorkerId, plan: StepPlan) -> None:
        self.num_plans[worker_id] += 1
        intakes = (self.intake, self._lanes[worker_id].facts.intake)
        assert Intake.PAUSED not in intakes, f"{worker_id} has a plan while it is paused"
        admitted = [(each.row, each.request_id, each.block_ids, each.num_cached_tokens) for each in plan.admitted]
        chunks = [(each.row, each.num_tokens, each.new_blocks) for each in plan.chunks]
        self._note(f"{worker_id} {plan.seq} {plan.released_rows} {len(plan.block_copies)} {admitted} {chunks}")
        for admission in plan.admitted:
            self._check_admission(worker_id, admission)
        finished = self._finished_rows.setdefault(worker_id, set())
        finished.difference_update(plan.released_rows)
        for row in (*plan.released_rows, *(admission.row for admission in plan.admitted)):
            self._changed_in[worker_id, row] = plan.seq
        named = finished.intersection(chunk.row for chunk in plan.chunks)
        assert not named, f"{worker_id}: plan {plan.seq} names rows {sorted(named)}, which have ended"

    def _check_admission(self, worker_id: WorkerId, admission: Admission) -> None:
        """Nobody who came earlier waits where first come is first served, and what was cached is told once."""
        client = self._world.live.get(admission.request_id)
        if client is None:
            return  # it ended in this very step
        if client.num_cached_tokens is None:
            client.num_cached_tokens = min(admission.num_cached_tokens, admission.num_prompt_tokens)
        scheduler = self._lanes[worker_id].scheduler
        if self._is_first_come and isinstance(scheduler, BatchingScheduler):
            held = {each.request_id for group in scheduler._siblings._held.values() for each in group}
            waiting = {each.request_id for each in scheduler._sequences.values() if each.state is State.WAITING} - held
            if admission.request_id not in waiting:  # else the plan behind this one took its row again
                first = min((self._world.live[request_id].arrival for request_id in waiting), default=client.arrival)
                assert first >= client.arrival, f"{client.request_id} starts, and somebody who came before it waits"

    def _check_lane(self, lane: Lane) -> None:
        suspects = [request_id for request_id, live in lane.live.items() if live.is_suspect]
        assert len(suspects) <= 1, f"{lane.worker_id} tries {suspects} at once"
        scheduler = lane.scheduler
        if isinstance(scheduler, BatchingScheduler):
            scheduler.kv.check()
            load = scheduler.load()
            assert load.num_running + load.num_waiting == len(lane.live), f"{lane.worker_id}: {load}"
            assert load.num_running or load.num_free_blocks == load.num_blocks, f"{lane.worker_id} lost blocks: {load}"
            assert load.num_waiting_tokens >= 0 or load.num_waiting, f"{lane.worker_id}: {load}"

    def _note(self, text: str) -> None:
        self.trace.update(f"{self._world.now():.6f} {text}\n".encode())


class PlanWatcher:
    """Tells clients which moment their requests are at. Called by simulated workers, around each plan."""

    def __init__(self, world: Watched, is_first_come: bool) -> None:
        self._world = world
        self._is_first_come = is_first_come
        self._on_row: dict[tuple[WorkerId, Row], Client] = {}
        self._in_flight: dict[WorkerId, dict[int, list[Client]]] = {}  # by seq: plans that workers have seen

    def forget(self, worker_id: WorkerId) -> None:
        """The worker has forgotten its rows."""
        self._in_flight.pop(worker_id, None)
        for key in [key for key in self._on_row if key[0] == worker_id]:
            del self._on_row[key]

    def answered(self, worker_id: WorkerId, seq: int) -> None:
        """The engine has the result of a plan."""
        self._in_flight.get(worker_id, {}).pop(seq, None)

    def computing(self, worker_id: WorkerId) -> list[Client]:
        """Whose plans the worker has, and has not answered."""
        return [client for clients in self._in_flight.get(worker_id, {}).values() for client in clients]

    def before(self, worker_id: WorkerId, plan: StepPlan, decoding: Collection[Row]) -> None:
        """A plan is about to be computed: note who loses its row, and who gets one."""
        live = self._world.live
        held = [each for (worker, _), each in self._on_row.items() if worker == worker_id]
        oldest = min((each for each in held if live.get(each.request_id) is each), key=_ARRIVAL, default=None)
        for row in plan.released_rows:
            client = self._on_row.pop((worker_id, row), None)
            if client is not None and live.get(client.request_id) is client:
                self._world.faults.note_pair("decoding" if row in decoding else "prefilling", "preempt")
                client.is_preempted = True
                client.num_preemptions += 1
                if self._is_first_come:
                    assert client is not oldest, f"{client.request_id} came first, and is preempted"
                    assert client.num_preemptions <= MAX_PREEMPTIONS, f"{client.request_id} is preempted again"
        for admission in plan.admitted:
            client = self._world.live.get(admission.request_id)
            if client is None:
                continue  # its worker is lost already: the request ended with the scheduler, right behind this plan
            self._on_row[worker_id, admission.row] = client
            client.is_preempted = False
            client.num_admissions += 1
            client.reach(Moment.ADMITTED)
        clients = [client for chunk in plan.chunks if (client := self._on_row.get((worker_id, chunk.row)))]
        self._in_flight.setdefault(worker_id, {})[plan.seq] = clients

    def after(self, worker_id: WorkerId, plan: StepPlan, result: StepResult) -> None:
        """A plan was computed."""
        finishes = dict(zip(result.rows, result.finishes, strict=True))
        for chunk in plan.chunks:
            client = self._on_row.get((worker_id, chunk.row))
            if client is None:
                continue
            if chunk.row not in finishes:
                client.reach(Moment.PREFILL)
            elif finishes[chunk.row] is not None:
                client.reach(Moment.FINISHING)
            else:
                client.reach(Moment.DECODE)
        for failure in result.failures:
            self._on_row[worker_id, failure.row].may_fail = True
