"""Keeps one worker connected: describes it, takes it, serves it, watches its heart, and starts over when it goes away.

Owns the link to one address; what requests do meanwhile is the engine's business, which addresses there are is the
fleet's.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from control_plane.engine.facts import Facts, Intake, Link
from control_plane.engine.served import ServedModel, ServedModels
from control_plane.text.model import TextModel
from control_plane.workers.handle import WorkerHandle
from control_plane.workers.text_models import TextModels
from plugins.errors import (
    InvariantBroken,
    ModelFileBroken,
    PlanOutOfOrder,
    PluginFailed,
    ServingError,
    WorkerLost,
    WorkerMismatch,
    WorkerOwned,
    WorkerTaken,
    WrongProtocol,
)
from plugins.types import GenerationId, WorkerId, WorkerInfo

logger = logging.getLogger(__name__)

# What a worker's absence, restart, other owner or failing plug-in looks like; anything else is a bug and stops the
# process. PluginFailed: the worker's scheduler raised, and connecting again gives it a new one.
_GONE: Final = (
    WorkerLost,
    WorkerOwned,
    WorkerTaken,
    WrongProtocol,
    WorkerMismatch,
    PlanOutOfOrder,
    PluginFailed,
    ModelFileBroken,
)
_REMEDY: Final = "restart the control plane, or take its address out of workers.address and put it back"
_FIRST_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 1.0

Join = Callable[[WorkerId, WorkerInfo, TextModel], ServedModel]  # puts a worker into its generation


class Driver(Protocol):
    """What the engine does for those who look after its workers. Losing a worker that is lost is nothing."""

    def connect(self, worker_id: WorkerId) -> None: ...

    def lose(self, worker_id: WorkerId, error: ServingError) -> None: ...

    def give_up(self, worker_id: WorkerId) -> None: ...

    def remove(self, worker_id: WorkerId) -> None: ...

    async def serve(
        self, worker_id: WorkerId, handle: WorkerHandle, info: WorkerInfo, generation: GenerationId
    ) -> None:
        """Serve an opened worker. Returns never; the error tells why it was lost."""

    async def worker_idle(self, worker_id: WorkerId) -> None: ...

    def facts(self, worker_id: WorkerId) -> Facts: ...

    def move_intake(self, to: Intake, worker_ids: tuple[WorkerId, ...] = ()) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as it was last seen."""

    worker_id: WorkerId  # its address
    info: WorkerInfo | None  # None until it was described
    detail: str  # why it is not connected; empty while it is
    generation: GenerationId | None = None  # None until it was connected
    is_newest: bool = True  # new requests for its model go to its generation, if it takes any; else it finishes
    differences: tuple[str, ...] = ()  # in what its generation differs from the newest one of its model
    is_leaving: bool = False  # its address is not among the workers' any more


class WorkerSupervisor:
    """One worker's connection, over and over. Runs as one task of the control plane's loop.

    `on_change` is called when the worker can serve and when it no longer can.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        make_handle: Callable[[], WorkerHandle],
        driver: Driver,
        models: ServedModels,
        texts: TextModels,
        join: Join,
        heartbeat_s: float,
        jitter: Callable[[], float],
        on_change: Callable[[], object],
        logits_processors: tuple[str, ...] = (),
    ) -> None:
        """A worker whose logits processors are not these, in this order, is not worked with."""
        self._worker_id = worker_id
        self._make_handle = make_handle
        self._driver = driver
        self._models = models
        self._texts = texts
        self._join = join
        self._heartbeat_s = heartbeat_s
        self._jitter = jitter  # draws from [0, 1)
        self._on_change = on_change
        self._logits_processors = logits_processors
        self._served: ServedModel | None = None  # while it is connected
        self._before_leaving: Intake | None = None  # while it leaves
        self._complaint = ""  # what was logged last
        self._view = WorkerView(worker_id, None, "not connected yet")

    @property
    def view(self) -> WorkerView:
        """The worker as it was last seen."""
        return self._view

    async def run(self) -> None:
        """Connect, serve, and again. Returns never; raises only what is a bug.

        A worker that another control plane of our own name took over is left to it: taking it back would only make
        both lose it in turn. So is one whose link the engine has given up.
        """
        while True:
            handle, served = await self._connect()
            try:
                await self._serve(handle, served)
            except _GONE as error:
                self._note_loss(served.worker, error)
                is_taken = isinstance(error, WorkerTaken)
            finally:
                await handle.close()
            if is_taken:
                self._driver.give_up(self._worker_id)
            if self._driver.facts(self._worker_id).link is Link.FAILED:
                self._see(detail=f"{self._view.detail}; given up: {_REMEDY}")
                logger.error("worker_given_up", extra={"worker_id": self._worker_id, "why": self._view.detail})
                await asyncio.Event().wait()

    def leave(self) -> None:
        """Send the worker no new requests: its address is gone. Those that it has run on while it answers.

        What an operator has paused stands still nevertheless.
        """
        self._before_leaving = self._driver.facts(self._worker_id).intake
        if self._before_leaving is Intake.OPEN:
            self._driver.move_intake(Intake.DRAINING, (self._worker_id,))
        self._models.remove(self._worker_id)
        self._see(is_leaving=True)
        self._on_change()

    def stay(self) -> None:
        """Take `leave` back: its address is there again."""
        is_drained = self._driver.facts(self._worker_id).intake is Intake.DRAINING
        if self._before_leaving is Intake.OPEN and is_drained:  # else an operator has decided, before or meanwhile
            self._driver.move_intake(Intake.OPEN, (self._worker_id,))
        self._before_leaving = None
        if self._served is not None:
            self._models.add(self._worker_id, self._served)
        self._see(is_leaving=False)
        self._on_change()

    # -- connecting ---------------------------------------------------------------------------------------------

    async def _connect(self) -> tuple[WorkerHandle, ServedModel]:
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(_GONE),
            wait=self._backoff_s,
            before_sleep=self._note_failure,
            sleep=asyncio.sleep,
        )
        async for attempt in attempts:
            with attempt:
                return await self._try_to_connect()
        raise InvariantBroken("connecting ended without a worker")

    def _backoff_s(self, state: RetryCallState) -> float:
        longest_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(state.attempt_number, 10))
        return self._jitter() * longest_s

    async def _try_to_connect(self) -> tuple[WorkerHandle, ServedModel]:
        self._driver.connect(self._worker_id)
        handle = self._make_handle()
        try:
            described = await handle.describe()
            if described.logits_processors != self._logits_processors:
                raise WorkerMismatch(described.logits_processors, self._logits_processors)
            text = await self._texts.of(described, handle)
            info = await handle.open()
            if info.incarnation != described.incarnation:
                raise WorkerLost("it was replaced by another process while it was connected")
            served = self._join(self._worker_id, info, text)
        except BaseException as error:
            await handle.close()
            if isinstance(error, _GONE):
                self._driver.lose(self._worker_id, error)
            raise
        self._see(info=info, detail="", generation=served.generation)
        self._complaint = ""
        logger.info(
            "worker_ready",
            extra={
                "worker_id": self._worker_id,
                "model": info.model.name,
                "generation": served.generation,
                "num_blocks": info.num_blocks,
                "block_size": info.block_size,
                "load_s": round(info.load_s, 1),
            },
        )
        return handle, served

    def _note_failure(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        self._see(detail=str(error))
        # A worker that is still starting is asked often: say each reason once, and call it no trouble yet.
        complaint = str(error)
        if isinstance(error, WorkerOwned):
            complaint, _, _ = complaint.partition(" (")  # how long the lease runs differs each time
        if complaint != self._complaint:
            self._complaint = complaint
            is_starting = self._view.info is None and not isinstance(error, WorkerMismatch)
            level = logging.INFO if is_starting else logging.WARNING
            logger.log(level, "worker_unreachable", extra={"worker_id": self._worker_id, "why": str(error)})

    # -- serving ------------------------------------------------------------------------------------------------

    async def _serve(self, handle: WorkerHandle, served: ServedModel) -> None:
        """Let the engine work with it while its heart beats. Returns never; raises why it is lost."""
        serving = asyncio.create_task(
            self._driver.serve(self._worker_id, handle, served.worker, served.generation),
            name=f"worker {self._worker_id}",
        )
        beating = asyncio.create_task(self._watch_heart(handle, served.worker), name=f"heart of {self._worker_id}")
        try:
            await asyncio.sleep(0)  # the engine attaches it before it first waits, and takes requests for it then
            if not serving.done():
                self._announce(served)
            await asyncio.wait((serving, beating), return_when=asyncio.FIRST_COMPLETED)
            ended = serving if serving.done() else beating  # the engine's reason says more
            ended.result()
        finally:
            for task in (serving, beating):
                task.cancel()
            await asyncio.gather(serving, beating, return_exceptions=True)
        raise InvariantBroken(f"serving worker {self._worker_id} ended without a reason")

    def _announce(self, served: ServedModel) -> None:
        self._served = served
        if self._before_leaving is None:
            self._models.add(self._worker_id, served)
        self._on_change()

    async def _watch_heart(self, handle: WorkerHandle, info: WorkerInfo) -> None:
        """Ask twice in a heartbeat whether it is still there, so that a freeze is noticed within 1.5 of them."""
        while True:
            await asyncio.sleep(self._heartbeat_s / 2)
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    described = await handle.describe()
            except TimeoutError:
                raise WorkerLost(f"it has not answered for {self._heartbeat_s:g} s (workers.heartbeat_s)") from None
            if described.incarnation != info.incarnation:
                raise WorkerLost("another process answers at its address")

    def _note_loss(self, info: WorkerInfo, error: ServingError) -> None:
        level = logging.ERROR if isinstance(error, (WorkerTaken, PluginFailed)) else logging.WARNING
        logger.log(level, "worker_lost", extra={"worker_id": self._worker_id, "why": str(error)})
        self._complaint = str(error)
        self._served = None
        self._models.remove(self._worker_id)
        self._see(info=info, detail=str(error))
        self._on_change()
        self._driver.lose(self._worker_id, error)

    def _see(self, **changes: object) -> None:
        self._view = replace(self._view, **changes)  # type: ignore[arg-type]  # of the view's own fields
        if self._view.detail:
            self._models.absence = self._view.detail
