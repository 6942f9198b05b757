"""Runs the engine core on an asyncio loop: plans to the worker, results to the core, deliveries to the readers.

Adds clocks, timers and streams around `EngineCore.step`; decides nothing about requests.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from control_plane.engine.core import EngineCore
from control_plane.engine.facts import Facts, Intake
from control_plane.engine.streams import OutputStream
from control_plane.workers.handle import WorkerHandle
from plugins.errors import InvariantBroken, ServingError, WorkerLost
from plugins.metrics import (
    KV_BLOCK_SIZE,
    KV_BLOCKS,
    KV_USAGE,
    PREEMPTIONS,
    RUNNING,
    STEP_ROUND_TRIP,
    STEP_TOKENS,
    WAITING,
    WORKER_LINK,
    Metrics,
)
from plugins.scheduler import SchedulerLoad
from plugins.types import FinishReason, Request, RequestId, StepResult, TokenId, WorkerInfo


@dataclass(slots=True)
class _Reader:
    """Who waits for a request's output, and the timer of its deadline."""

    stream: OutputStream
    timer: asyncio.TimerHandle | None


class EngineDriver:
    """One engine core on one event loop. Every method is called from that loop.

    `run` serves one worker until it goes away; requests may be submitted meanwhile, and are refused between workers.
    """

    def __init__(self, core: EngineCore, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock  # seconds, monotonic
        self._readers: dict[RequestId, _Reader] = {}
        self._results: list[StepResult] = []
        self._sent_at: deque[float] = deque()  # when each plan in flight went out
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_preemptions = 0

    # -- for the API --------------------------------------------------------------------------------------------

    def submit(self, request: Request, deadline_s: float | None) -> OutputStream:
        """Start a request; its output ends with DEADLINE after so many seconds.

        Raises: NotServing, DuplicateRequest, QueueFull.
        """
        self._core.submit(request)
        timer = None
        if deadline_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(max(0.0, deadline_s), self._expire, request.request_id)
        stream = OutputStream()
        self._readers[request.request_id] = _Reader(stream, timer)
        self._idle.clear()
        self._wake.set()
        return stream

    def cancel(self, request_id: RequestId) -> None:
        """End a request early. Unknown and ended ones are ignored."""
        self._core.cancel(request_id)
        self._wake.set()

    def load(self) -> SchedulerLoad:
        """Tell how busy the engine is."""
        return self._core.load()

    @property
    def facts(self) -> Facts:
        """The four facts of the worker, to read."""
        return self._core.facts

    async def drain(self, grace_s: float) -> bool:
        """Take no new requests, and wait for those at hand. Returns False if some are left after the grace."""
        self._core.facts.move_intake(Intake.DRAINING)
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            return False
        return True

    # -- for the supervisor -------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Note that a worker is about to be connected."""
        self._core.connect()

    def lose(self, error: ServingError) -> None:
        """Note that the worker cannot be reached: all its requests end with this error."""
        self._core.detach(error)
        self._metrics.set(WORKER_LINK, 0)
        self._deliver_without_worker()

    def give_up(self) -> None:
        """Note that the worker, which is lost, will not be connected again."""
        self._core.give_up()

    async def run(self, handle: WorkerHandle, worker: WorkerInfo) -> None:
        """Serve an opened worker until its results end. Returns never; the error tells why.

        Raises: WorkerLost, PlanOutOfOrder: the worker went away, and `lose` is due; anything else is a bug.
        """
        self._core.attach(worker)
        self._results.clear()
        self._sent_at.clear()
        self._num_preemptions = 0
        self._metrics.set(WORKER_LINK, 1)
        self._metrics.set(KV_BLOCKS, worker.num_blocks)
        self._metrics.set(KV_BLOCK_SIZE, worker.block_size)
        reading = asyncio.create_task(self._read(handle), name="engine-results")
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._turn(handle)
                if reading.done():
                    reading.result()
                    raise WorkerLost("its results ended")
        finally:
            reading.cancel()
            await asyncio.wait((reading,))

    async def _read(self, handle: WorkerHandle) -> None:
        try:
            async for result in handle.results():
                self._results.append(result)
                self._wake.set()
        finally:
            self._wake.set()

    # -- one turn -----------------------------------------------------------------------------------------------

    def _turn(self, handle: WorkerHandle) -> None:
        results, self._results = self._results, []
        now = self._clock()
        for _ in results[: len(self._sent_at)]:
            self._metrics.observe(STEP_ROUND_TRIP, now - self._sent_at.popleft())
        output = self._core.step(results)
        for plan in output.plans:
            handle.submit(plan)
            self._sent_at.append(now)
            self._metrics.observe(STEP_TOKENS, plan.num_tokens)
        for delivery in output.deliveries:
            self._put(delivery.request_id, delivery.token_ids, delivery.finish, delivery.error)
        self._report()

    def _deliver_without_worker(self) -> None:
        for delivery in self._core.step().deliveries:
            self._put(delivery.request_id, delivery.token_ids, delivery.finish, delivery.error)
        self._report()

    def _put(
        self,
        request_id: RequestId,
        token_ids: tuple[TokenId, ...],
        finish: FinishReason | None,
        error: ServingError | None,
    ) -> None:
        reader = self._readers.get(request_id)
        if reader is None:
            raise InvariantBroken(f"request {request_id!r} has output and no reader")
        reader.stream.put(token_ids, finish, error)
        if finish is not None:
            if reader.timer is not None:
                reader.timer.cancel()
            del self._readers[request_id]
            if not self._readers:
                self._idle.set()

    def _expire(self, request_id: RequestId) -> None:
        self._core.cancel(request_id, FinishReason.DEADLINE)
        self._wake.set()

    def _report(self) -> None:
        load = self._core.load()
        self._metrics.set(RUNNING, load.num_running)
        self._metrics.set(WAITING, load.num_waiting)
        self._metrics.set(KV_USAGE, 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0)
        if load.num_preemptions > self._num_preemptions:
            self._metrics.count(PREEMPTIONS, load.num_preemptions - self._num_preemptions)
            self._num_preemptions = load.num_preemptions
