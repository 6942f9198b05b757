"""Keeps the worker connected: describes it, takes it, serves it, and starts over when it goes away.

Owns the link to one worker; what its requests do meanwhile is the engine's business.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from control_plane.engine.driver import EngineDriver
from control_plane.engine.served import ServedModel, ServedModels
from control_plane.text.model import TextModel
from control_plane.workers.handle import WorkerHandle
from plugins.errors import PlanOutOfOrder, ServingError, WorkerLost, WorkerOwned, WorkerTaken, WrongProtocol
from plugins.types import WorkerId, WorkerInfo

logger = logging.getLogger(__name__)

# What a worker's absence, restart or other owner looks like; anything else is a bug and stops the process.
_GONE = (WorkerLost, WorkerOwned, WorkerTaken, WrongProtocol, PlanOutOfOrder)
_MAX_BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The worker as the supervisor last saw it."""

    worker_id: WorkerId
    info: WorkerInfo | None  # None until it was described
    detail: str  # why it is not connected; empty while it is


class WorkerSupervisor:
    """One worker's connection, over and over. Runs as one task of the control plane's loop.

    `on_change` is called with True when the worker can serve and with False when it no longer can.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        make_handle: Callable[[], WorkerHandle],
        driver: EngineDriver,
        models: ServedModels,
        on_change: Callable[[bool], None],
    ) -> None:
        self._worker_id = worker_id
        self._make_handle = make_handle
        self._driver = driver
        self._models = models
        self._on_change = on_change
        self._view = WorkerView(worker_id, None, "not connected yet")

    @property
    def view(self) -> WorkerView:
        """The worker as it was last seen."""
        return self._view

    async def run(self) -> None:
        """Connect, serve, and again. Returns never; raises only what is a bug.

        A worker that another control plane of our own name took over is left to it: taking it back would only make
        both lose it in turn.
        """
        while True:
            handle, info = await self._connect()
            self._on_change(True)
            try:
                await self._driver.run(handle, info)
            except _GONE as error:
                self._note_loss(info, error)
                is_taken = isinstance(error, WorkerTaken)
            finally:
                await handle.close()
            if is_taken:
                self._driver.give_up()
                await asyncio.Event().wait()

    def _note_loss(self, info: WorkerInfo, error: ServingError) -> None:
        level = logging.ERROR if isinstance(error, WorkerTaken) else logging.WARNING
        logger.log(level, "worker_lost", extra={"worker_id": self._worker_id, "why": str(error)})
        self._see(info, str(error))
        self._models.remove(info.model.name)
        self._on_change(False)
        self._driver.lose(error if isinstance(error, WorkerLost) else WorkerLost(str(error)))

    def _see(self, info: WorkerInfo | None, detail: str) -> None:
        self._view = WorkerView(self._worker_id, info, detail)
        self._models.absence = detail

    async def _connect(self) -> tuple[WorkerHandle, WorkerInfo]:
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(_GONE),
            wait=wait_random_exponential(multiplier=0.05, max=_MAX_BACKOFF_S),
            before_sleep=self._note_failure,
        )
        async for attempt in attempts:
            with attempt:
                return await self._try_to_connect()
        raise WorkerLost("connecting was given up")

    async def _try_to_connect(self) -> tuple[WorkerHandle, WorkerInfo]:
        self._driver.connect()
        handle = self._make_handle()
        try:
            bundle = await handle.tokenizer()
            text = await asyncio.to_thread(TextModel.from_bundle, bundle)
            info = await handle.open()
            if hashlib.sha256(bundle.tokenizer_json).hexdigest() != info.tokenizer_sha256:
                raise WorkerLost("it was replaced by one with another tokenizer while it was connected")
        except BaseException as error:
            await handle.close()
            if isinstance(error, ServingError):
                self._driver.lose(error)
            raise
        self._models.add(ServedModel(info, text))
        self._see(info, "")
        logger.info(
            "worker_ready",
            extra={
                "worker_id": self._worker_id,
                "model": info.model.name,
                "num_blocks": info.num_blocks,
                "block_size": info.block_size,
                "load_s": round(info.load_s, 1),
            },
        )
        return handle, info

    def _note_failure(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        detail = str(error)
        # A worker that is still starting is asked often: say each reason once, and call it no trouble yet.
        if detail != self._view.detail:
            level = logging.INFO if self._view.info is None else logging.WARNING
            logger.log(level, "worker_unreachable", extra={"worker_id": self._worker_id, "why": detail})
            self._see(self._view.info, detail)
