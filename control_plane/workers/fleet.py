"""All workers of one control plane: as addresses come and go, so do the supervisors that keep them connected.

Decides who is a worker and which generation is the newest; one worker's link is the business of its supervisor.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from control_plane.engine.generations import Generations
from control_plane.engine.served import ServedModel, ServedModels
from control_plane.text.model import TextModel
from control_plane.workers.config import WorkersConfig
from control_plane.workers.discovery import Discovery
from control_plane.workers.handle import WorkerHandle
from control_plane.workers.supervisor import Driver, WorkerSupervisor, WorkerView
from control_plane.workers.text_models import ReadTokenizer, TextModels, read_in_thread
from plugins.errors import WorkerLeaving
from plugins.types import WorkerId, WorkerInfo

logger = logging.getLogger(__name__)

OnChange = Callable[[tuple[str, ...]], object]  # the models that a request would be taken for


@dataclass(slots=True)
class _Member:
    """A known address."""

    supervisor: WorkerSupervisor
    task: asyncio.Task[None]  # the supervisor's
    retiring: asyncio.Task[None] | None = None  # while its address is gone and its requests run on
    is_ending: bool = False  # its requests have had their time: it will be removed, whatever is found meanwhile


class WorkerFleet:
    """The workers of one control plane. Its tasks and its methods belong to the control plane's loop.

    Invariant: each address that was told last has a member, or one that is ending and then comes anew.
    """

    def __init__(
        self,
        config: WorkersConfig,
        discovery: Discovery,
        make_handle: Callable[[str], WorkerHandle],
        driver: Driver,
        models: ServedModels,
        generations: Generations,
        on_change: OnChange,
        read_tokenizer: ReadTokenizer = read_in_thread,
        jitter: Callable[[], float] = random.random,
        logits_processors: tuple[str, ...] = (),
    ) -> None:
        """`jitter` draws from [0, 1), so that workers that were lost together are not asked for together.

        `logits_processors` are the places of those that requests were checked for: workers must have the same.
        """
        self._config = config
        self._discovery = discovery
        self._make_handle = make_handle
        self._driver = driver
        self._models = models
        self._generations = generations
        self._on_change = on_change
        self._texts = TextModels(read_tokenizer)
        self._jitter = jitter
        self._logits_processors = logits_processors
        self._members: dict[WorkerId, _Member] = {}
        self._wanted: frozenset[str] = frozenset()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()

    async def run(self) -> None:
        """Look for workers and serve them. Returns never; raises only what is a bug, also a supervisor's."""
        try:
            self._start(self._follow(), "worker discovery")
            raise await self._failures.get()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def views(self) -> tuple[WorkerView, ...]:
        """Return every known worker as it was last seen, sorted by address."""
        return tuple(self._complete(member.supervisor.view) for _, member in sorted(self._members.items(), key=_by_id))

    def note_intake(self) -> None:
        """An operator has opened, paused or drained workers: others may get the new requests, or nobody."""
        self._models.note_intake()
        self._tell()

    # -- addresses come and go ----------------------------------------------------------------------------------

    async def _follow(self) -> None:
        async for addresses in self._discovery.watch():
            self._reconcile(addresses)

    def _reconcile(self, addresses: frozenset[str]) -> None:
        self._wanted = addresses
        if not addresses:
            self._models.absence = "workers.address leads to no worker now"
        for worker_id, member in sorted(self._members.items(), key=_by_id):
            if worker_id not in addresses and member.retiring is None:
                logger.info("worker_leaving", extra={"worker_id": worker_id, "drain_s": self._config.drain_s})
                member.supervisor.leave()
                member.retiring = self._start(self._retire(worker_id, member), f"retiring {worker_id}")
            elif worker_id in addresses and member.retiring is not None and not member.is_ending:
                logger.info("worker_back", extra={"worker_id": worker_id})
                member.retiring.cancel()
                member.retiring = None
                member.supervisor.stay()
        for address in sorted(addresses - self._members.keys()):
            self._add(WorkerId(address))

    def _add(self, worker_id: WorkerId) -> None:
        logger.info("worker_found", extra={"worker_id": worker_id})
        self._driver.connect(worker_id)  # from here on the engine knows it
        supervisor = WorkerSupervisor(
            worker_id,
            lambda: self._make_handle(worker_id),
            self._driver,
            self._models,
            self._texts,
            self._join,
            self._config.heartbeat_s,
            self._jitter,
            self._tell,
            self._logits_processors,
        )
        self._members[worker_id] = _Member(supervisor, self._start(supervisor.run(), f"supervisor of {worker_id}"))

    async def _retire(self, worker_id: WorkerId, member: _Member) -> None:
        """Let its requests run on for a while, then forget it; what is left recovers elsewhere."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                await self._driver.worker_idle(worker_id)
        member.is_ending = True
        member.task.cancel()
        await asyncio.wait((member.task,))
        self._driver.lose(worker_id, WorkerLeaving("its address is no longer among those of workers.address"))
        self._driver.remove(worker_id)
        self._models.forget(worker_id)
        self._generations.leave(worker_id)
        del self._members[worker_id]
        logger.info("worker_removed", extra={"worker_id": worker_id})
        self._tell()
        if worker_id in self._wanted:
            self._add(worker_id)

    # -- generations --------------------------------------------------------------------------------------------

    def _join(self, worker_id: WorkerId, info: WorkerInfo, text: TextModel) -> ServedModel:
        before = self._generations.newest(info.model.name)
        last = 0 if before is None else self._generations.ordinal(before)
        differences = () if before is None else self._generations.changes(before, info)
        generation = self._generations.join(worker_id, info)
        ordinal = self._generations.ordinal(generation)
        if ordinal > last:
            logger.info(
                "generation_opened",
                extra={
                    "generation": generation,
                    "model": info.model.name,
                    "worker_id": worker_id,
                    "before": before,
                    "differences": list(differences),
                },
            )
        return ServedModel(info, text, generation, ordinal)

    def _complete(self, view: WorkerView) -> WorkerView:
        """Add what the worker's generation is among those of its model."""
        if view.info is None:
            return view
        name = view.info.model.name
        serving = {model.worker.model.name: model.generation for model in self._models.all()}
        newest = serving.get(name) or self._generations.newest(name)
        if newest is None or view.generation is None or newest == view.generation:
            return view
        return replace(view, is_newest=False, differences=self._generations.differences(view.generation, newest))

    # -- tasks --------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        self._on_change(self._models.open_names())

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.put_nowait(error)


def _by_id(item: tuple[WorkerId, _Member]) -> WorkerId:
    return item[0]
