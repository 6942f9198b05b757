"""A worker that lives on the virtual clock: its process, which may die, and the handles that speak to it.

Computes with the checking FakeWorker of `tests/fakes.py`; whose worker it is and which results are stale is decided
by the product's own Ownership and ResultOrder.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Protocol

from control_plane.workers.result_order import ResultOrder
from gpu_worker.ownership import Ownership
from plugins.errors import PlanOutOfOrder, ServingError, WorkerAbsent, WorkerLeaving, WorkerLost, WorkerOwned
from plugins.types import (
    FinishReason,
    RequestId,
    Row,
    StepPlan,
    StepResult,
    TokenizerBundle,
    WorkerId,
    WorkerInfo,
)
from tests.fakes import FakeWorker
from tests.simulation.faults import FaultPlan, Point
from tests.simulation.virtual_loop import VirtualLoop

LEASE_S = 0.5
LATENCY_S = 0.0003
GAP_S = 1e-7  # between two messages: timers of the same instant may run in any order
TIMEOUT_S = 1.0  # of every call that a handle makes
MAX_RESTART_S = 0.25


class Observer(Protocol):
    """Who is told what happens on workers."""

    def on_taken(self, worker: "SimulatedWorker") -> None:
        """The worker has a new owner's stream, and has forgotten its rows."""

    def before_plan(self, worker: "SimulatedWorker", plan: StepPlan) -> None:
        """A plan was sent, and will be computed if it arrives."""

    def after_plan(self, worker: "SimulatedWorker", plan: StepPlan, result: StepResult) -> None:
        """A plan was computed; its result is not under way yet."""

    def on_stale(self, result: StepResult) -> None:
        """A result is sent whose epoch is over."""

    def num_live(self) -> int:
        """Requests at hand."""


class SimulatedWorker:
    """One address, and the process behind it. `start` begins another process; each has an incarnation of its own."""

    def __init__(
        self,
        worker_id: WorkerId,
        info: WorkerInfo,
        bundle: TokenizerBundle,
        loop: VirtualLoop,
        faults: FaultPlan,
        observer: Observer,
        knows: FakeWorker,
        deadly: set[RequestId],
        draw: random.Random,
    ) -> None:
        self.worker_id = worker_id
        self.info = info
        self.bundle = bundle
        self.loop = loop
        self.faults = faults
        self.is_up = False
        self.is_owned_by_another = False
        self.thawed = asyncio.Event()  # clear while the process is frozen
        self.thawed.set()
        self._deadly = deadly  # requests that kill whoever computes them
        self._observer = observer
        self._knows = knows  # where requests end, and which salts they have: one truth for all workers
        self._draw = draw
        self._step_s = draw.choice((0.002, 0.005, 0.02))
        self._num_starts = 0
        self._num_freezes = 0
        self._stream: SimulatedHandle | None = None
        self._held: list[Callable[[], None]] = []  # what a frozen process would have sent
        self._stale: tuple[int, StepResult] | None = None  # a result that its epoch did not wait for
        self._busy_until = 0.0
        self.start()

    # -- the process --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a new process. One that runs is left alone."""
        if self.is_up:
            return
        self._num_starts += 1
        self.info = replace(self.info, incarnation=f"{self.worker_id}/{self._num_starts}")
        self.ownership = Ownership(LEASE_S, self.loop.time)
        knows = self._knows
        self.fake = FakeWorker(self.info, knows.eos_after, knows.salts, knows.siblings, waits=self._waits)
        self.is_up = True
        self._is_dying = False
        self._busy_until = 0.0
        self._stale = None

    def crash(self, error: ServingError | None = None) -> None:
        """End the process at once: its stream breaks, and nothing it had not sent is ever seen."""
        if not self.is_up:
            return
        self.is_up = False
        self._held.clear()
        self.thawed.set()
        self.break_stream(error or WorkerLost("the simulated worker was killed"))
        self.loop.call_later(self._draw.uniform(0.02, MAX_RESTART_S), self.start)

    def leave(self) -> None:
        """Stop on purpose, as a terminated process does."""
        self.crash(WorkerLeaving("it was told to stop"))

    def upgrade(self, weights_version: str) -> None:
        """Restart with other weights."""
        self.info = replace(self.info, weights_version=weights_version)
        if self.is_up:
            self.leave()

    def freeze(self, noticed_within_s: float) -> None:
        """Stand still: nothing is answered until `thaw`. Whoever uses the worker has so long to notice."""
        if self.is_up:
            self.thawed.clear()
            self._num_freezes += 1
            args = (self._stream, self._num_freezes, self.loop.stalled_s)
            self.loop.call_later(noticed_within_s, self._check_that_it_was_noticed, *args)

    def _check_that_it_was_noticed(self, stream: "SimulatedHandle | None", num_freezes: int, stalled_s: float) -> None:
        is_still_frozen = not self.thawed.is_set() and self._num_freezes == num_freezes
        if is_still_frozen and stream is not None and self.loop.stalled_s == stalled_s:
            assert self._stream is not stream, f"nobody noticed that {self.worker_id} is frozen"

    def thaw(self) -> None:
        """Go on where it stood: what would have been sent meanwhile is sent now."""
        self.thawed.set()
        held, self._held = self._held, []
        for send in held:
            send()

    def break_stream(self, error: ServingError) -> None:
        """The connection is gone, the process stays."""
        if self._stream is not None:
            self._stream.fail(error)
            self._stream = None

    def forbid_older_hits(self) -> None:
        """The prefix cache was reset: no plan from now on may hit what was computed up to now."""
        if self.thawed.is_set():
            self.fake.forbid_older_hits()
        else:
            self._held.append(self.fake.forbid_older_hits)  # behind the plans that were sent before

    # -- what handles ask ---------------------------------------------------------------------------------------

    async def answer(self) -> None:
        """Wait as long as an answer takes. Raises: WorkerAbsent, WorkerLost: there is none."""
        await asyncio.sleep(LATENCY_S)
        if self.faults.draws(Point.CONNECT_FAILS):
            self.faults.note(Point.CONNECT_FAILS, self._observer.num_live())
            raise WorkerAbsent(f"{self.worker_id} was not reached")
        if not self.is_up:
            raise WorkerAbsent(f"nothing answers at {self.worker_id}")
        incarnation = self.info.incarnation
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self.thawed.wait()
        except TimeoutError:
            raise WorkerLost(f"{self.worker_id} did not answer within {TIMEOUT_S:g} s") from None
        if not self.is_up or self.info.incarnation != incarnation:
            raise WorkerLost(f"{self.worker_id} died before it answered")

    def take(self, handle: "SimulatedHandle", owner_id: str) -> int:
        """Give the worker to a handle; return the epoch. Raises: WorkerOwned."""
        if self.faults.draws(Point.OWNED):
            self.faults.note(Point.OWNED, self._observer.num_live())
            raise WorkerOwned("another control plane", LEASE_S)
        epoch = self.ownership.take(owner_id)
        self.break_stream(WorkerLost("its owner opened another stream"))
        self.fake.open()
        self._observer.on_taken(self)
        self._stream = handle
        self._busy_until = self.loop.time()
        return epoch

    def release(self, handle: "SimulatedHandle", epoch: int) -> None:
        """A handle closes its stream."""
        self.ownership.release(epoch)
        if self._stream is handle:
            self._stream = None

    def accept(self, handle: "SimulatedHandle", epoch: int, plan: StepPlan) -> None:
        """Take a plan over a handle's stream; its result comes over the same one, in its time."""
        if self._stream in (handle, None):
            self._observer.before_plan(self, plan)
            self._compute(handle, epoch, plan)

    def _compute(self, handle: "SimulatedHandle", epoch: int, plan: StepPlan) -> None:
        if not self.is_up or self._is_dying or self._stream is not handle:
            return  # lost on the way
        if not self.thawed.is_set():
            self._held.append(lambda: self._compute(handle, epoch, plan))
            return
        try:
            self.ownership.accept_plan(epoch, epoch, plan.seq)
        except PlanOutOfOrder as error:
            self.break_stream(error)
            return
        if any(admission.request_id in self._deadly for admission in plan.admitted):
            self._die_soon(Point.QUERY_OF_DEATH)
        elif self.faults.draws(Point.CRASH_BEFORE):
            self._die_soon(Point.CRASH_BEFORE)
            return
        if plan.chunks and self.faults.draws(Point.ROW_FAILS):
            self._fail_a_row(plan)
        result = self.fake.execute(plan)
        self.fake.failing.clear()
        self._observer.after_plan(self, plan, result)
        self._busy_until = max(self.loop.time(), self._busy_until) + self._step_s * (1 + plan.num_tokens / 64)
        self.loop.call_at(self._busy_until, self._finish, handle, epoch, self.info.incarnation, result)

    def _fail_a_row(self, plan: StepPlan) -> None:
        row = self._draw.choice(plan.chunks).row
        held = self.fake.rows.get(row)
        if held is not None and not held.is_finished and row not in plan.released_rows:
            self.fake.failing.add(held.admission.request_id)
            self.faults.note(Point.ROW_FAILS, self._observer.num_live())

    def _waits(self, request_id: RequestId) -> bool:
        has_to = self.faults.draws(Point.ROW_WAITS)
        if has_to:
            self.faults.note(Point.ROW_WAITS, self._observer.num_live())
        return has_to

    def _die_soon(self, point: Point) -> None:
        self._is_dying = True
        incarnation = self.info.incarnation

        def die() -> None:
            if self.is_up and self.info.incarnation == incarnation:
                self.faults.note(point, self._observer.num_live())
                self.crash()

        self.loop.call_later(self._draw.choice((0.0, self._step_s / 2)), die)

    # -- results on their way -----------------------------------------------------------------------------------

    def _finish(self, handle: "SimulatedHandle", epoch: int, incarnation: str, result: StepResult) -> None:
        """A step is computed; here it may go wrong."""
        if not self.is_up or self.info.incarnation != incarnation:
            return
        if not self.thawed.is_set():
            self._held.append(lambda: self._finish(handle, epoch, incarnation, result))
            return
        if epoch != self.ownership.epoch:
            self._stale = (epoch, result)
            return
        self.ownership.note_answer(epoch)
        self._send(handle, epoch, result)

    def _send(self, handle: "SimulatedHandle", epoch: int, result: StepResult) -> None:
        num_live = self._observer.num_live()
        for point in _ON_RESULT:
            if self.faults.draws(point):
                self.faults.note(point, num_live)
                break
        else:
            point = None
        if point is Point.CRASH_AFTER:
            self.crash()
        elif point is Point.RESULT_LOST:
            self._stale = (epoch, result)
            self.break_stream(WorkerLost("the stream broke"))
        elif point is Point.RESULT_DELAYED:
            handle.receive(epoch, result, self._draw.uniform(0.01, 0.4))
        elif point is Point.RESULT_DUPLICATED:
            handle.receive(epoch, result)
            handle.receive(epoch, result)
        elif point is None:
            if self._stale is not None and self._stale[0] < epoch and handle.is_guarded:
                self.faults.note(Point.RESULT_LATE, num_live)
                self._observer.on_stale(self._stale[1])
                handle.receive(*self._stale)
                self._stale = None
            handle.receive(epoch, result)
        elif point is not Point.RESULT_SILENT:
            handle.receive(epoch, _spoiled(point, result, self.info.max_sequences))


_ON_RESULT = (
    Point.CRASH_AFTER,
    Point.RESULT_LOST,
    Point.RESULT_SILENT,
    Point.RESULT_DELAYED,
    Point.RESULT_DUPLICATED,
    Point.RESULT_FOREIGN_ROW,
    Point.RESULT_WRONG_SEQ,
    Point.RESULT_GARBAGE,
    Point.RESULT_TOKEN_MISSING,
)


def _spoiled(point: Point, result: StepResult, max_sequences: int) -> StepResult:
    """What a worker with a broken memory might answer."""
    if point is Point.RESULT_WRONG_SEQ:
        return replace(result, seq=result.seq + 1)
    if point is Point.RESULT_FOREIGN_ROW:
        return replace(
            result,
            rows=(*result.rows, Row(max_sequences)),
            counts=(*result.counts, 0),
            finishes=(*result.finishes, FinishReason.LENGTH),
        )
    if point is Point.RESULT_TOKEN_MISSING and result.rows and result.counts[-1] == 1:
        return replace(
            result,
            rows=result.rows[:-1],
            counts=result.counts[:-1],
            token_ids=result.token_ids[:-1],
            finishes=result.finishes[:-1],
        )
    return replace(result, counts=(*result.counts, 7))


class SimulatedHandle:
    """A WorkerHandle over a simulated worker. Unguarded, it hands on whatever comes, as one in process would."""

    def __init__(self, worker: SimulatedWorker, owner_id: str, is_guarded: bool) -> None:
        self.is_guarded = is_guarded
        self._worker = worker
        self._owner_id = owner_id
        self._epoch = 0
        self._order = ResultOrder(0)
        self._is_closed = False
        self._arrives_at = 0.0  # results do not overtake one another
        self._queue: asyncio.Queue[StepResult | Exception | None] = asyncio.Queue()

    async def describe(self) -> WorkerInfo:
        """One connection carries this and the stream: no answer, and no lack of one, overtakes what was sent before."""
        try:
            await self._worker.answer()
        finally:
            await asyncio.sleep(max(0.0, self._arrives_at + GAP_S - self._worker.loop.time()))
        return self._worker.info

    async def tokenizer(self) -> TokenizerBundle:
        await self._worker.answer()
        return self._worker.bundle

    async def open(self) -> WorkerInfo:
        await self._worker.answer()
        self._epoch = self._worker.take(self, self._owner_id)
        self._order = ResultOrder(self._epoch)
        return self._worker.info

    def submit(self, plan: StepPlan) -> None:
        self._worker.accept(self, self._epoch, plan)

    async def results(self) -> AsyncIterator[StepResult]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._queue.put_nowait(None)
            if self._epoch:
                self._worker.release(self, self._epoch)

    def receive(self, epoch: int, result: StepResult, delay_s: float = LATENCY_S) -> None:
        """A result is under way to this handle."""
        loop = self._worker.loop
        self._arrives_at = max(self._arrives_at + GAP_S, loop.time() + delay_s)
        loop.call_at(self._arrives_at, self._take, epoch, result)

    def fail(self, error: ServingError) -> None:
        """The stream ends with this error, behind the results that are under way."""
        loop = self._worker.loop
        self._arrives_at = max(self._arrives_at + GAP_S, loop.time() + LATENCY_S)
        loop.call_at(self._arrives_at, self._queue.put_nowait, error)

    def _take(self, epoch: int, result: StepResult) -> None:
        try:
            if not self.is_guarded or self._order.accepts(epoch, result):
                self._queue.put_nowait(result)
        except PlanOutOfOrder as error:
            self._queue.put_nowait(error)
