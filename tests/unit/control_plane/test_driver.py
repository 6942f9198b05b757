"""The asyncio driver: streams, deadlines, drains and lost workers, over a fake worker handle."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from control_plane.engine.core import EngineCore
from control_plane.engine.driver import EngineDriver
from control_plane.engine.streams import Output, OutputStream
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.fcfs import FCFSScheduler
from plugins.errors import DuplicateRequest, InvariantBroken, NotServing, WorkerLost
from plugins.metrics import KV_USAGE, RUNNING, WORKER_LINK, Metric, Metrics, NoMetrics
from plugins.types import FinishReason, RequestId, StepPlan, TokenId
from tests.fakes import FakeWorker, FakeWorkerHandle, expected_output, request


class StuckHandle(FakeWorkerHandle):
    """A worker that takes plans and answers none."""

    def submit(self, plan: StepPlan) -> None:
        self.worker.execute(plan)


class Gauges(NoMetrics):
    """Remembers what each gauge was set to last."""

    def __init__(self) -> None:
        self.values: dict[Metric, float] = {}

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        self.values[metric] = value


def make_driver(metrics: Metrics | None = None) -> EngineDriver:
    core = EngineCore(lambda worker: FCFSScheduler(SchedulerConfig(), worker), max_waiting=8)
    return EngineDriver(core, metrics or NoMetrics(), clock=lambda: 0.0)


@asynccontextmanager
async def serving(driver: EngineDriver, handle: FakeWorkerHandle) -> AsyncIterator[asyncio.Task[None]]:
    running = asyncio.create_task(driver.run(handle, await handle.open()))
    await asyncio.sleep(0)  # lets the task attach the worker
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.wait((running,))


async def read_all(stream: OutputStream) -> tuple[list[TokenId], Output]:
    token_ids: list[TokenId] = []
    while True:
        output = await stream.next()
        token_ids += output.token_ids
        if output.finish is not None:
            return token_ids, output


async def test_a_request_streams_its_tokens_to_the_end() -> None:
    driver = make_driver()
    async with serving(driver, FakeWorkerHandle(FakeWorker())):
        stream = driver.submit(request("a", prompt=(3, 4), max_tokens=3), deadline_s=None)

        token_ids, last = await read_all(stream)

    assert tuple(token_ids) == expected_output((3, 4), 3)
    assert (last.finish, last.error) == (FinishReason.LENGTH, None)


async def test_a_reader_that_is_late_finds_everything_in_one_piece() -> None:
    driver = make_driver()
    async with serving(driver, FakeWorkerHandle(FakeWorker())):
        stream = driver.submit(request("a", prompt=(3, 4), max_tokens=5), deadline_s=None)
        await driver.drain(grace_s=60.0)

        output = await stream.next()

    assert output == Output(expected_output((3, 4), 5), FinishReason.LENGTH, None)


async def test_a_deadline_ends_a_request_whose_worker_does_not_answer() -> None:
    driver = make_driver()
    async with serving(driver, StuckHandle(FakeWorker())):
        stream = driver.submit(request("a"), deadline_s=0.0)

        _, last = await read_all(stream)

    assert last.finish is FinishReason.DEADLINE


async def test_cancelling_ends_the_stream_and_unknown_ids_are_ignored() -> None:
    driver = make_driver()
    async with serving(driver, StuckHandle(FakeWorker())):
        stream = driver.submit(request("a"), deadline_s=60.0)

        driver.cancel(RequestId("a"))
        driver.cancel(RequestId("nobody"))
        _, last = await read_all(stream)

    assert last.finish is FinishReason.CANCELLED


async def test_a_name_is_taken_until_the_end_of_its_request_was_told() -> None:
    """Case B051, with a cancel just before the second use."""
    driver = make_driver()
    async with serving(driver, FakeWorkerHandle(FakeWorker())):
        first = driver.submit(request("a"), deadline_s=None)
        driver.cancel(RequestId("a"))

        with pytest.raises(DuplicateRequest):
            driver.submit(request("a"), deadline_s=None)
        _, cancelled = await read_all(first)
        _, completed = await read_all(driver.submit(request("a"), deadline_s=None))

    assert (cancelled.finish, completed.finish) == (FinishReason.CANCELLED, FinishReason.LENGTH)


async def test_a_lost_worker_raises_and_losing_it_ends_the_streams() -> None:
    driver = make_driver()
    handle = StuckHandle(FakeWorker())
    async with serving(driver, handle) as running:
        stream = driver.submit(request("a"), deadline_s=None)
        handle.crash(WorkerLost("it was killed"))

        with pytest.raises(WorkerLost, match="it was killed"):
            await running
        driver.lose(WorkerLost("it was killed"))
        _, last = await read_all(stream)

    assert last.finish is FinishReason.FAILED
    assert isinstance(last.error, WorkerLost)
    with pytest.raises(NotServing):
        driver.submit(request("b"), deadline_s=None)


async def test_a_lost_worker_uses_no_blocks_and_runs_nothing() -> None:
    gauges = Gauges()
    driver = make_driver(gauges)
    handle = StuckHandle(FakeWorker())
    async with serving(driver, handle) as running:
        driver.submit(request("a"), deadline_s=None)
        handle.crash(WorkerLost("it was killed"))
        await asyncio.wait((running,))
        before = [gauges.values[gauge] for gauge in (RUNNING, WORKER_LINK)]
        used_before = gauges.values[KV_USAGE]

        driver.lose(WorkerLost("it was killed"))

    assert (before, used_before > 0) == ([1, 1], True)
    assert [gauges.values[gauge] for gauge in (RUNNING, WORKER_LINK, KV_USAGE)] == [0, 0, 0]


async def test_results_that_simply_end_are_a_lost_worker_too() -> None:
    driver = make_driver()
    handle = FakeWorkerHandle(FakeWorker())
    async with serving(driver, handle) as running:
        await handle.close()

        with pytest.raises(WorkerLost, match="its results ended"):
            await running


async def test_a_drain_waits_for_those_at_hand_and_refuses_newcomers() -> None:
    driver = make_driver()
    async with serving(driver, FakeWorkerHandle(FakeWorker())):
        stream = driver.submit(request("a"), deadline_s=None)

        is_done = await driver.drain(grace_s=60.0)

        assert is_done
        assert stream.is_ended
        with pytest.raises(NotServing, match="draining"):
            driver.submit(request("b"), deadline_s=None)


async def test_a_drain_gives_up_after_its_grace() -> None:
    driver = make_driver()
    async with serving(driver, StuckHandle(FakeWorker())):
        driver.submit(request("a"), deadline_s=None)

        assert not await driver.drain(grace_s=0.0)


async def test_output_after_the_end_is_a_broken_invariant() -> None:
    stream = OutputStream()
    stream.put((), FinishReason.LENGTH, None)

    with pytest.raises(InvariantBroken, match=r"output after the end \(LENGTH\)"):
        stream.put((TokenId(3),), None, None)


async def test_an_error_that_is_no_lost_worker_comes_out_as_it_was() -> None:
    driver = make_driver()
    handle = FakeWorkerHandle(FakeWorker())
    async with serving(driver, handle) as running:
        handle.crash(RuntimeError("a bug"))

        with pytest.raises(RuntimeError, match="a bug"):
            await running
