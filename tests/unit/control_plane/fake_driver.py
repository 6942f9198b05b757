"""The engine as those who look after workers see it, and workers with a heart, for tests on virtual time.

The engine serves a worker until its results end, and notes what it is told.
"""

import asyncio
import functools
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, ParamSpec

from control_plane.engine.facts import Facts, Intake, Link
from control_plane.workers.handle import WorkerHandle
from plugins.errors import ServingError
from plugins.types import GenerationId, TokenizerBundle, WorkerId, WorkerInfo
from tests.fakes import FakeWorker, FakeWorkerHandle, worker_info
from tests.simulation.virtual_loop import VirtualLoop
from tests.unit.control_plane.text.byte_level import bundle

P = ParamSpec("P")


def on_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on a clock that jumps to the next timer: seconds cost nothing, and are exact."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


class Handle(FakeWorkerHandle):
    """A worker that counts who asks for its tokenizer, and whose heart can stop."""

    def __init__(self, info: WorkerInfo) -> None:
        super().__init__(FakeWorker(info), bundle())
        self.num_fetched = 0
        self.is_frozen = False

    async def describe(self) -> WorkerInfo:
        if self.is_frozen:
            await asyncio.Event().wait()
        return await super().describe()

    async def tokenizer(self) -> TokenizerBundle:
        self.num_fetched += 1
        return await super().tokenizer()


def described(name: str = "m", weights_version: str = "", incarnation: str = "one") -> WorkerInfo:
    """What a worker says that hands over the tests' tokenizer."""
    sha256 = hashlib.sha256(bundle().tokenizer_json).hexdigest()
    info = replace(worker_info(name=name), tokenizer_sha256=sha256, incarnation=incarnation)
    return replace(info, weights_version=weights_version)


class FakeDriver:
    """Fulfils the supervisor's Driver. `survives` is how many losses its links survive; None: any number."""

    def __init__(self, survives: int | None = None) -> None:
        self.survives = survives
        self.workers: dict[WorkerId, Facts] = {}
        self.serving: dict[WorkerId, tuple[WorkerInfo, GenerationId]] = {}
        self.losses: list[tuple[WorkerId, ServingError]] = []
        self.removed: list[WorkerId] = []
        self.busy: dict[WorkerId, asyncio.Event] = {}  # workers with requests, until the event is set

    def connect(self, worker_id: WorkerId) -> None:
        self.workers.setdefault(worker_id, Facts()).move_link(Link.CONNECTING)

    def lose(self, worker_id: WorkerId, error: ServingError) -> None:
        self.losses.append((worker_id, error))
        self.workers[worker_id].move_link(Link.LOST)
        if self.survives is not None:
            self.survives -= 1
            if self.survives < 0:
                self.workers[worker_id].move_link(Link.FAILED)

    def give_up(self, worker_id: WorkerId) -> None:
        self.workers[worker_id].move_link(Link.FAILED)

    def remove(self, worker_id: WorkerId) -> None:
        del self.workers[worker_id]
        self.removed.append(worker_id)

    async def serve(
        self, worker_id: WorkerId, handle: WorkerHandle, info: WorkerInfo, generation: GenerationId
    ) -> None:
        self.workers[worker_id].move_link(Link.LIVE)
        self.serving[worker_id] = (info, generation)
        try:
            async for _ in handle.results():
                pass
        finally:
            del self.serving[worker_id]

    async def worker_idle(self, worker_id: WorkerId) -> None:
        if worker_id in self.busy:
            await self.busy[worker_id].wait()

    def facts(self, worker_id: WorkerId) -> Facts:
        return self.workers[worker_id]

    def move_intake(self, to: Intake, worker_ids: tuple[WorkerId, ...] = ()) -> None:
        for worker_id in worker_ids:
            self.workers[worker_id].move_intake(to)
