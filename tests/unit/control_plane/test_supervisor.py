"""The worker supervisor: connects, notices a loss, connects again; over fake handles, on virtual time."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from control_plane.engine.facts import Intake, Link
from control_plane.engine.served import ServedModel, ServedModels
from control_plane.text.model import TextModel
from control_plane.workers.supervisor import WorkerSupervisor
from control_plane.workers.text_models import TextModels, read_in_thread
from plugins.errors import (
    NotServing,
    PlanOutOfOrder,
    PluginFailed,
    ServingError,
    WorkerAbsent,
    WorkerLeaving,
    WorkerLost,
    WorkerMismatch,
    WorkerOwned,
    WorkerTaken,
)
from plugins.types import GenerationId, TokenizerBundle, WorkerId, WorkerInfo
from tests.unit.control_plane.fake_driver import FakeDriver, Handle, described, on_virtual_time

HERE = WorkerId("10.0.0.1:50061")


class RefusingHandle(Handle):
    """A worker that cannot be opened."""

    def __init__(self, error: Exception) -> None:
        super().__init__(described())
        self._error = error

    async def open(self) -> WorkerInfo:
        raise self._error


class AbsentHandle(Handle):
    """Nobody is there."""

    def __init__(self) -> None:
        super().__init__(described())

    async def describe(self) -> WorkerInfo:
        raise WorkerAbsent("nothing answers")


class World:
    """A supervisor over a list of handles, the last of which stays, and a record of what it said."""

    def __init__(self, handles: Sequence[Handle], jitter: float = 1.0, survives: int | None = None) -> None:
        self.handles = list(handles)
        self.asked_at_s: list[float] = []
        self.changes: list[bool] = []  # whether a model was served at each
        self.models = ServedModels()
        self.driver = FakeDriver(survives)
        self.supervisor = WorkerSupervisor(
            HERE,
            self._next_handle,
            self.driver,
            self.models,
            TextModels(read_in_thread),
            join,
            heartbeat_s=5.0,
            jitter=lambda: jitter,
            on_change=lambda: self.changes.append(bool(self.models.all())),
        )

    def _next_handle(self) -> Handle:
        self.asked_at_s.append(asyncio.get_running_loop().time())
        return self.handles.pop(0) if len(self.handles) > 1 else self.handles[0]

    async def __aenter__(self) -> "World":
        self.task = asyncio.create_task(self.supervisor.run())
        await asyncio.sleep(0.001)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))


def join(worker_id: WorkerId, info: WorkerInfo, text: TextModel) -> ServedModel:
    return ServedModel(info, text, GenerationId(f"m-{info.weights_version}"))


@on_virtual_time
async def test_a_connected_worker_is_served_under_its_models_name() -> None:
    async with World([Handle(described(weights_version="aa"))]) as world:
        model = world.models.get("m")

        assert model.text.decode(model.text.encode("hello")) == "hello"
        assert world.driver.serving[HERE] == (model.worker, "m-aa")
        assert world.changes == [True]
        assert (world.supervisor.view.detail, world.supervisor.view.generation) == ("", "m-aa")


@pytest.mark.parametrize(
    "error", [WorkerLost("it was killed"), PlanOutOfOrder("garbage"), PluginFailed("boo"), WorkerLeaving("SIGTERM")]
)
@on_virtual_time
async def test_a_worker_that_goes_away_is_lost_for_the_reason_it_went_and_the_next_one_takes_over(
    error: ServingError,
) -> None:
    first, second = Handle(described()), Handle(described(weights_version="bb"))
    async with World([first, second]) as world:
        first.crash(error)
        await asyncio.sleep(0.001)

        assert world.driver.losses == [(HERE, error)]
        assert world.changes == [True, False, True]
        assert world.models.get("m").generation == "m-bb"
        assert first.is_closed


@on_virtual_time
async def test_a_worker_with_other_logits_processors_is_refused_until_one_has_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = Handle(replace(described(), logits_processors=("pkg:A", "pkg:B")))
    async with World([other, Handle(described())]) as world:
        with pytest.raises(
            NotServing, match="the worker has the logits processors pkg:A, pkg:B, this control plane <none"
        ):
            world.models.get("m")
        (refused,) = [record for record in caplog.records if record.message == "worker_unreachable"]
        assert refused.levelno == logging.WARNING

        await asyncio.sleep(1.0)

        assert world.models.get("m").worker.logits_processors == ()
        assert [type(error) for _, error in world.driver.losses] == [WorkerMismatch]


@on_virtual_time
async def test_between_two_workers_no_model_is_served_and_it_is_told_why() -> None:
    first = Handle(described())
    async with World([first, AbsentHandle()]) as world:
        first.crash(WorkerLost("it was killed"))
        await asyncio.sleep(0.001)

        with pytest.raises(NotServing, match="no model is served now: nothing answers"):
            world.models.get("m")
        assert world.driver.facts(HERE).link is Link.LOST
        assert world.supervisor.view.info == first.worker.info


@on_virtual_time
async def test_it_asks_again_after_twice_as_long_each_time_up_to_a_second() -> None:
    async with World([AbsentHandle()]) as world:
        await asyncio.sleep(4)

    waits = [round(later - sooner, 3) for sooner, later in zip(world.asked_at_s, world.asked_at_s[1:], strict=False)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


@on_virtual_time
async def test_jitter_shortens_the_waits() -> None:
    async with World([AbsentHandle()], jitter=0.5) as world:
        await asyncio.sleep(0.6)

    assert [round(at_s, 3) for at_s in world.asked_at_s] == [0.0, 0.05, 0.15, 0.35]


@on_virtual_time
async def test_each_reason_is_logged_once_however_often_it_is_met(caplog: pytest.LogCaptureFixture) -> None:
    owned = [RefusingHandle(WorkerOwned("another", lease_left_s)) for lease_left_s in (3.0, 2.0, 1.0)]
    with caplog.at_level(logging.INFO):
        async with World([*owned, RefusingHandle(WorkerOwned("a third", 5.0)), AbsentHandle()]) as world:
            await asyncio.sleep(20)

    said = [(record.levelname, vars(record)["why"][:35]) for record in caplog.records]
    assert said == [
        ("INFO", "control plane 'another' owns this w"),
        ("INFO", "control plane 'a third' owns this w"),
        ("INFO", "nothing answers"),
    ]
    assert "nothing answers" in world.supervisor.view.detail


@on_virtual_time
async def test_a_worker_whose_heart_stops_is_lost_within_one_and_a_half_heartbeats() -> None:
    first = Handle(described())
    async with World([first, Handle(described())]) as world:
        await asyncio.sleep(60)
        calm = list(world.driver.losses)
        first.is_frozen = True
        await asyncio.sleep(7.5)

        assert calm == []
        assert [str(error) for _, error in world.driver.losses] == [
            "the worker went away: it has not answered for 5 s (workers.heartbeat_s)"
        ]
        assert world.changes == [True, False, True]
        assert first.is_closed


@on_virtual_time
async def test_a_heart_that_beats_in_another_process_is_a_lost_worker() -> None:
    first = Handle(described())
    async with World([first, Handle(described(incarnation="two"))]) as world:
        first.worker.info = described(incarnation="two")
        await asyncio.sleep(2.6)

        assert [str(error) for _, error in world.driver.losses] == [
            "the worker went away: another process answers at its address"
        ]
        assert world.models.get("m").worker.incarnation == "two"


@on_virtual_time
async def test_a_worker_that_hands_over_another_tokenizer_than_it_says_is_not_served() -> None:
    first = Handle(replace(described("m"), tokenizer_sha256="of another"))
    async with World([first, Handle(described("n"))]) as world:
        await asyncio.sleep(1)

        assert [model.worker.model.name for model in world.models.all()] == ["n"]
        assert "it says of another" in str(world.driver.losses[0][1])
        assert first.is_closed


@on_virtual_time
async def test_a_worker_whose_tokenizer_cannot_be_read_is_not_served() -> None:
    class Illegible(Handle):
        async def tokenizer(self) -> TokenizerBundle:
            return replace(await super().tokenizer(), add_bos=True, bos_token="<unheard of>")

    async with World([Illegible(described("m")), Handle(described("n"))]) as world:
        await asyncio.sleep(1)

        assert [model.worker.model.name for model in world.models.all()] == ["n"]
        assert "which the tokenizer does not have" in str(world.driver.losses[0][1])


@on_virtual_time
async def test_a_worker_that_was_replaced_between_two_questions_is_asked_again() -> None:
    class Replaced(Handle):
        async def open(self) -> WorkerInfo:
            return described(incarnation="two")

    first = Replaced(described(incarnation="one"))
    async with World([first, Handle(described(incarnation="two"))]) as world:
        await asyncio.sleep(1)

        assert "replaced by another process" in str(world.driver.losses[0][1])
        assert world.models.get("m").worker.incarnation == "two"


@on_virtual_time
async def test_cancelling_while_it_connects_ends_it_and_closes_the_handle() -> None:
    silent = Handle(described())
    silent.is_frozen = True
    async with World([silent]) as world:
        pass

    assert world.task.cancelled()
    assert silent.is_closed


@on_virtual_time
async def test_a_worker_that_a_namesake_took_over_is_left_to_it() -> None:
    first = Handle(described())
    async with World([first, Handle(described())]) as world:
        first.crash(WorkerTaken("us"))
        await asyncio.sleep(60)

        assert world.driver.facts(HERE).link is Link.FAILED
        assert "another control plane that calls itself 'us' took the worker over" in world.supervisor.view.detail
        assert world.changes == [True, False]
        assert first.is_closed
        assert not world.task.done()


@on_virtual_time
async def test_a_worker_whose_link_the_engine_gave_up_is_not_connected_again() -> None:
    handles = [Handle(described()) for _ in range(3)]
    async with World(handles, survives=1) as world:
        handles[0].crash(PluginFailed("boo"))
        handles[1].crash(PluginFailed("boo"))
        await asyncio.sleep(60)

        assert [type(error) for _, error in world.driver.losses] == [PluginFailed, PluginFailed]
        assert world.driver.facts(HERE).link is Link.FAILED
        assert len(world.asked_at_s) == 2
        assert world.supervisor.view.detail == (
            "boo; given up: restart the control plane, or take its address out of workers.address and put it back"
        )


@on_virtual_time
async def test_what_is_no_loss_of_a_worker_stops_the_supervisor() -> None:
    first = Handle(described())
    async with World([first]) as world:
        first.crash(RuntimeError("a bug"))

        with pytest.raises(RuntimeError, match="a bug"):
            await world.task

    assert first.is_closed


@on_virtual_time
async def test_a_worker_that_leaves_gets_no_new_requests_and_keeps_those_it_has_until_it_stays_again() -> None:
    async with World([Handle(described())]) as world:
        world.supervisor.leave()
        left = (world.driver.facts(HERE).intake, world.models.all(), HERE in world.driver.serving)
        world.supervisor.stay()

        assert left == (Intake.DRAINING, (), True)
        assert world.driver.facts(HERE).intake is Intake.OPEN
        assert world.models.get("m").worker.model.name == "m"
        assert world.changes == [True, False, True]


@pytest.mark.parametrize("intake", [Intake.PAUSED, Intake.DRAINING])
@on_virtual_time
async def test_a_worker_that_an_operator_had_closed_is_closed_in_the_same_way_while_it_leaves_and_when_it_stays(
    intake: Intake,
) -> None:
    async with World([Handle(described())]) as world:
        world.driver.move_intake(intake, (HERE,))
        world.supervisor.leave()
        while_it_leaves = world.driver.facts(HERE).intake
        world.supervisor.stay()

        assert (while_it_leaves, world.driver.facts(HERE).intake) == (intake, intake)


@on_virtual_time
async def test_a_worker_that_an_operator_pauses_while_it_leaves_is_paused_when_it_stays() -> None:
    async with World([Handle(described())]) as world:
        world.supervisor.leave()
        for to in (Intake.OPEN, Intake.PAUSED):
            world.driver.move_intake(to, (HERE,))
        world.supervisor.stay()

        assert world.driver.facts(HERE).intake is Intake.PAUSED


@on_virtual_time
async def test_a_worker_that_comes_back_while_it_leaves_is_served_no_more() -> None:
    first = Handle(described())
    async with World([first, Handle(described())]) as world:
        world.supervisor.leave()
        first.crash(WorkerLost("it was killed"))
        await asyncio.sleep(1)

        assert HERE in world.driver.serving
        assert world.models.all() == ()
