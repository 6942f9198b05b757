"""The worker supervisor: connects, notices a loss, connects again; over fake handles."""

import asyncio
import hashlib
from dataclasses import replace

import pytest

from control_plane.engine.core import EngineCore
from control_plane.engine.driver import EngineDriver
from control_plane.engine.facts import Link
from control_plane.engine.served import ServedModels
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.fcfs import FCFSScheduler
from control_plane.workers.supervisor import WorkerSupervisor
from plugins.errors import NotServing, UnknownModel, WorkerLost, WorkerOwned, WorkerTaken
from plugins.metrics import NoMetrics
from plugins.types import FinishReason, WorkerId, WorkerInfo
from tests.fakes import FakeWorker, FakeWorkerHandle, request, worker_info
from tests.unit.control_plane.text.byte_level import bundle


class RefusingHandle(FakeWorkerHandle):
    """A worker that another control plane owns."""

    async def open(self) -> WorkerInfo:
        raise WorkerOwned("another", 3.0)


class World:
    """A supervisor over a list of handles, and a record of what it said."""

    def __init__(self, *handles: FakeWorkerHandle) -> None:
        self.waiting = list(handles)
        self.changes: asyncio.Queue[bool] = asyncio.Queue()
        self.models = ServedModels()
        core = EngineCore(lambda worker: FCFSScheduler(SchedulerConfig(), worker), max_waiting=8)
        self.driver = EngineDriver(core, NoMetrics(), clock=lambda: 0.0)
        self.supervisor = WorkerSupervisor(
            WorkerId("here"), self._next_handle, self.driver, self.models, self.changes.put_nowait
        )

    def _next_handle(self) -> FakeWorkerHandle:
        return self.waiting.pop(0)

    async def __aenter__(self) -> "World":
        self.task = asyncio.create_task(self.supervisor.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))


def handle(name: str = "fake", sha256: str | None = None) -> FakeWorkerHandle:
    tokenizer = bundle()
    info = worker_info(name=name)
    info = replace(info, tokenizer_sha256=sha256 or hashlib.sha256(tokenizer.tokenizer_json).hexdigest())
    return FakeWorkerHandle(FakeWorker(info), tokenizer)


async def test_a_connected_worker_is_served_under_its_models_name() -> None:
    async with World(handle("m")) as world:
        is_up = await world.changes.get()

        model = world.models.get("m")

    assert is_up
    assert model.text.decode(model.text.encode("hello")) == "hello"
    assert world.supervisor.view.detail == ""


async def test_a_lost_worker_ends_its_streams_and_the_next_one_takes_over() -> None:
    first, second = handle(), handle()
    async with World(first, second) as world:
        await world.changes.get()
        stream = world.driver.submit(request("a", max_tokens=200), deadline_s=None)
        first.crash(WorkerLost("it was killed"))

        said = [await world.changes.get(), await world.changes.get()]
        last = await stream.next()
        again = world.driver.submit(request("a", max_tokens=1), deadline_s=None)
        output = await again.next()

    assert said == [False, True]
    assert (last.finish, str(last.error)) == (FinishReason.FAILED, "the worker went away: it was killed")
    assert output.finish is FinishReason.LENGTH
    assert first.is_closed


async def test_between_two_workers_requests_are_refused_and_no_model_is_served() -> None:
    first, second = handle(), RefusingHandle(FakeWorker(), bundle())
    async with World(first, second, handle()) as world:
        await world.changes.get()
        first.crash(WorkerLost("it was killed"))
        await world.changes.get()

        with pytest.raises(NotServing, match="no worker is connected"):
            world.driver.submit(request("b"), deadline_s=None)
        with pytest.raises(NotServing, match="no model is served now: the worker went away: it was killed"):
            world.models.get("fake")
        link_between = world.driver.facts.link
        back = await world.changes.get()

    assert link_between in (Link.LOST, Link.CONNECTING)
    assert back
    assert second.is_closed


async def test_a_worker_that_is_not_the_one_whose_tokenizer_came_is_not_served() -> None:
    first = handle("m", sha256="of another tokenizer")
    async with World(first, handle("n")) as world:
        await world.changes.get()

        served = [model.worker.model.name for model in world.models.all()]

    assert served == ["n"]
    assert first.is_closed


async def test_cancelling_while_it_connects_ends_it_and_closes_the_handle() -> None:
    class SilentHandle(FakeWorkerHandle):
        async def open(self) -> WorkerInfo:
            opening.set()
            await asyncio.Event().wait()
            return self.worker.info

    opening = asyncio.Event()
    silent = SilentHandle(FakeWorker(), bundle())
    async with World(silent) as world:
        await opening.wait()

    assert world.task.cancelled()
    assert silent.is_closed


async def test_a_worker_that_a_namesake_took_over_is_left_to_it() -> None:
    first = handle()
    async with World(first, handle()) as world:
        await world.changes.get()
        stream = world.driver.submit(request("a", max_tokens=200), deadline_s=None)
        first.crash(WorkerTaken("us"))

        is_up = await world.changes.get()
        last = await stream.next()
        detail = world.supervisor.view.detail
        await first.closed.wait()
        link = world.driver.facts.link

    assert not is_up
    assert isinstance(last.error, WorkerLost)
    assert "another control plane that calls itself 'us' took the worker over" in detail
    assert link is Link.FAILED
    assert len(world.waiting) == 1


async def test_what_is_no_loss_of_a_worker_stops_the_supervisor() -> None:
    first = handle()
    async with World(first) as world:
        await world.changes.get()
        first.crash(RuntimeError("a bug"))

        with pytest.raises(RuntimeError, match="a bug"):
            await world.task

    assert first.is_closed


async def test_a_model_is_found_by_name_or_as_the_only_one() -> None:
    async with World(handle("m")) as world:
        await world.changes.get()
        served = world.models.get("")
        world.models.add(replace(served, worker=worker_info(name="n")))

        with pytest.raises(UnknownModel, match="model 'x' is not served here; served: m, n"):
            world.models.get("x")
        with pytest.raises(UnknownModel, match="model '' is not served here"):
            world.models.get("")

    assert served.worker.model.name == "m"
