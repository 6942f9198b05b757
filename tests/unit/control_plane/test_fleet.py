"""The fleet: addresses come, go and come back, generations open, and readiness follows; on virtual time."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping

import pytest

from control_plane.engine.facts import Intake
from control_plane.engine.generations import Generations
from control_plane.engine.served import ServedModels
from control_plane.workers.config import WorkersConfig
from control_plane.workers.fleet import WorkerFleet
from plugins.errors import NotServing, WorkerLeaving, WorkerLost
from plugins.types import WorkerId, WorkerInfo
from tests.unit.control_plane.fake_driver import FakeDriver, Handle, described, on_virtual_time

A, B, C = WorkerId("10.0.0.1:1"), WorkerId("10.0.0.2:1"), WorkerId("10.0.0.3:1")
OLD, NEW = described(weights_version="aa"), described(weights_version="bb")


class Cell:
    """A fleet, what is found at each address, and a record of what it said."""

    def __init__(self, workers: Mapping[WorkerId, WorkerInfo], drain_s: float = 30.0) -> None:
        self.workers = dict(workers)
        self.handles: dict[WorkerId, list[Handle]] = {}
        self.frozen: set[WorkerId] = set()
        self.found: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self.said: list[tuple[str, ...]] = []  # the models that a request would be taken for
        self.driver = FakeDriver()
        self.models = ServedModels(lambda worker_id: self.driver.facts(worker_id).intake)
        self.generations = Generations()
        self.fleet = WorkerFleet(
            WorkersConfig(drain_s=drain_s),
            self,
            self._make_handle,
            self.driver,
            self.models,
            self.generations,
            on_change=self.said.append,
            jitter=lambda: 0.5,
        )

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        while True:
            yield await self.found.get()

    def _make_handle(self, address: str) -> Handle:
        worker_id = WorkerId(address)
        handle = Handle(self.workers[worker_id])
        handle.is_frozen = worker_id in self.frozen
        self.handles.setdefault(worker_id, []).append(handle)
        return handle

    def move(self, to: Intake, *worker_ids: WorkerId) -> None:
        """What an operator does."""
        self.driver.move_intake(to, worker_ids)
        self.fleet.note_intake()

    async def find(self, *addresses: WorkerId) -> None:
        """Let these be the addresses, and the fleet act upon it."""
        self.found.put_nowait(frozenset(addresses))
        await asyncio.sleep(0.001)

    def stop(self, worker_id: WorkerId) -> None:
        """Let a worker be gone, and nobody answer at its address any more."""
        self.frozen.add(worker_id)
        self.crash(worker_id, WorkerLost("it was killed"))

    def crash(self, worker_id: WorkerId, error: Exception) -> None:
        self.handles[worker_id][-1].crash(error)

    async def __aenter__(self) -> "Cell":
        self.task = asyncio.create_task(self.fleet.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"left behind: {others}"


@on_virtual_time
async def test_every_address_is_described_and_served() -> None:
    async with Cell({A: OLD, B: OLD}) as cell:
        await cell.find(B, A)

        views = cell.fleet.views()
        assert [view.worker_id for view in views] == [A, B]
        assert [view.info for view in views] == [OLD, OLD]
        assert views[0].generation == views[1].generation == cell.models.get("m").generation
        assert cell.driver.serving.keys() == {A, B}
        assert cell.said[-1] == ("m",)


@on_virtual_time
async def test_replicas_share_one_tokenizer_that_is_fetched_once() -> None:
    workers = {WorkerId(f"10.0.0.{number}:1"): OLD for number in range(64)}
    async with Cell(workers) as cell:
        await cell.find(*workers)

        assert len(cell.driver.serving) == 64
        assert sum(handle.num_fetched for handles in cell.handles.values() for handle in handles) == 1


@on_virtual_time
async def test_a_model_is_open_while_it_has_a_live_worker_whatever_befalls_the_others() -> None:
    async with Cell({A: OLD, B: OLD, C: described("n")}) as cell:
        await cell.find(A, B, C)
        both = cell.said[-1]
        cell.stop(A)
        await asyncio.sleep(0.001)
        one_of_two = cell.said[-1]
        cell.stop(C)
        await asyncio.sleep(0.001)
        without_n = cell.said[-1]

        assert both == ("m", "n")
        assert one_of_two == ("m", "n")
        assert without_n == ("m",)


@on_virtual_time
async def test_a_worker_that_differs_opens_a_generation_and_takes_the_new_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        async with Cell({A: OLD, B: NEW, C: OLD}) as cell:
            await cell.find(A)
            await cell.find(A, B)
            await cell.find(A, B, C)

            old, new, third = cell.fleet.views()
            assert cell.models.get("m").worker == NEW
            assert (new.is_newest, new.differences) == (True, ())
            assert (old.is_newest, old.differences) == (False, ("weights_version: aa -> bb",))
            assert third.generation == old.generation

    opened = [vars(record) for record in caplog.records if record.msg == "generation_opened"]
    assert [record["differences"] for record in opened] == [[], ["weights_version: aa -> bb"]]
    assert (opened[1]["before"], opened[1]["worker_id"]) == (old.generation, B)


@on_virtual_time
async def test_while_the_newest_generation_is_away_the_one_before_takes_new_requests() -> None:
    async with Cell({A: OLD, B: NEW}) as cell:
        await cell.find(A)
        await cell.find(A, B)
        cell.stop(B)
        await asyncio.sleep(0.001)

        assert cell.models.get("m").worker == OLD
        assert cell.fleet.views()[0].is_newest


@on_virtual_time
async def test_a_model_whose_workers_are_all_paused_or_drained_is_not_open_until_one_of_them_is() -> None:
    async with Cell({A: OLD, B: OLD}) as cell:
        await cell.find(A, B)
        cell.move(Intake.PAUSED, A)
        one_is_open = cell.said[-1]
        cell.move(Intake.DRAINING, B)
        nobody_is = cell.said[-1]
        cell.move(Intake.OPEN, A)

        assert [one_is_open, nobody_is, cell.said[-1]] == [("m",), (), ("m",)]


@on_virtual_time
async def test_new_requests_go_to_the_generation_before_while_the_newest_drains() -> None:
    async with Cell({A: OLD, B: NEW}) as cell:
        await cell.find(A)
        await cell.find(A, B)
        cell.move(Intake.DRAINING, B)
        drained = (cell.models.get("m").worker, [view.is_newest for view in cell.fleet.views()], cell.said[-1])
        cell.move(Intake.OPEN, B)

        assert drained == (OLD, [True, False], ("m",))
        assert cell.models.get("m").worker == NEW


@on_virtual_time
async def test_a_worker_that_comes_back_with_other_weights_joins_the_other_generation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        async with Cell({A: OLD}) as cell:
            await cell.find(A)
            cell.workers[A] = NEW
            cell.crash(A, WorkerLeaving("it got SIGTERM"))
            await asyncio.sleep(1)

            assert cell.driver.serving[A] == (NEW, cell.generations.newest("m"))

    opened = [vars(record)["differences"] for record in caplog.records if record.msg == "generation_opened"]
    assert opened == [[], ["weights_version: aa -> bb"]]


@on_virtual_time
async def test_a_worker_whose_address_is_gone_finishes_what_it_has_and_is_removed() -> None:
    async with Cell({A: OLD, B: OLD}) as cell:
        await cell.find(A, B)
        done = cell.driver.busy[A] = asyncio.Event()
        await cell.find(B)
        view = cell.fleet.views()[0]
        intake = cell.driver.facts(A).intake
        await asyncio.sleep(10)
        still_there = A in cell.driver.serving
        done.set()
        await asyncio.sleep(0.001)

        assert (view.worker_id, view.is_leaving, intake, still_there) == (A, True, Intake.DRAINING, True)
        assert [view.worker_id for view in cell.fleet.views()] == [B]
        assert cell.driver.removed == [A]
        assert cell.handles[A][0].is_closed
        assert cell.generations.generation(A) is None


@on_virtual_time
async def test_what_a_leaving_worker_has_not_finished_in_time_recovers_elsewhere() -> None:
    async with Cell({A: OLD}, drain_s=30.0) as cell:
        await cell.find(A)
        cell.driver.busy[A] = asyncio.Event()
        await cell.find()
        await asyncio.sleep(29)
        before = list(cell.driver.losses)
        await asyncio.sleep(1.1)

        assert before == []
        assert [(worker_id, type(error)) for worker_id, error in cell.driver.losses] == [(A, WorkerLeaving)]
        assert cell.driver.removed == [A]


@on_virtual_time
async def test_a_cell_without_workers_is_not_ready_and_says_so() -> None:
    async with Cell({A: OLD}) as cell:
        await cell.find(A)
        await cell.find()

        with pytest.raises(NotServing, match="workers.address leads to no worker now"):
            cell.models.get("m")
        assert cell.said[-1] == ()


@on_virtual_time
async def test_a_worker_that_is_found_again_while_it_leaves_goes_on_as_if_nothing_had_been() -> None:
    async with Cell({A: OLD}) as cell:
        await cell.find(A)
        cell.driver.busy[A] = asyncio.Event()
        await cell.find()
        await cell.find(A)
        await asyncio.sleep(60)

        assert cell.driver.removed == []
        assert cell.driver.facts(A).intake is Intake.OPEN
        assert len(cell.handles[A]) == 1
        assert cell.said[-1] == ("m",)
        assert not cell.fleet.views()[0].is_leaving


@on_virtual_time
async def test_requests_of_a_paused_worker_whose_address_is_gone_stand_still_and_then_recover_elsewhere() -> None:
    async with Cell({A: OLD, B: OLD}, drain_s=30.0) as cell:
        await cell.find(A, B)
        cell.driver.busy[A] = asyncio.Event()
        cell.driver.move_intake(Intake.PAUSED, (A,))
        await cell.find(B)
        await asyncio.sleep(29)
        stands_still = not cell.driver.facts(A).permit_step
        await asyncio.sleep(1.1)

        assert stands_still
        assert [(worker_id, type(error)) for worker_id, error in cell.driver.losses] == [(A, WorkerLeaving)]


@on_virtual_time
async def test_a_worker_that_is_found_again_after_its_removal_is_served_anew() -> None:
    async with Cell({A: OLD}) as cell:
        await cell.find(A)
        await cell.find()
        await cell.find(A)

        assert cell.driver.removed == [A]
        assert cell.driver.serving.keys() == {A}
        assert len(cell.handles[A]) == 2


@on_virtual_time
async def test_a_worker_that_is_found_again_while_it_is_being_removed_comes_anew() -> None:
    async with Cell({A: OLD}) as cell:
        await cell.find(A)
        closing = asyncio.Event()
        close = cell.handles[A][0].close

        async def close_slowly() -> None:
            await closing.wait()
            await close()

        cell.handles[A][0].close = close_slowly  # type: ignore[method-assign]  # this one worker hangs on
        await cell.find()
        await cell.find(A)
        closing.set()
        await asyncio.sleep(0.001)

        assert cell.driver.removed == [A]
        assert cell.driver.serving.keys() == {A}


@on_virtual_time
async def test_a_bug_in_one_supervisor_or_in_looking_for_workers_ends_the_fleet() -> None:
    async with Cell({A: OLD, B: OLD}) as cell:
        await cell.find(A, B)
        cell.crash(B, RuntimeError("a bug"))

        with pytest.raises(RuntimeError, match="a bug"):
            await cell.task
        assert cell.driver.serving == {}
        assert cell.handles[A][0].is_closed
    async with Cell({}) as cell:
        await cell.find(A)

        with pytest.raises(KeyError):
            await cell.task
