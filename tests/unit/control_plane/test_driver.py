"""The asyncio driver: streams, limits of time, drains and lost workers, over fake worker handles on virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.core import EngineCore
from control_plane.engine.driver import EngineDriver
from control_plane.engine.facts import Intake, Link
from control_plane.engine.kv_subscription import MAX_EVENTS
from control_plane.engine.router import RoundRobin
from control_plane.engine.streams import Output, OutputStream
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.errors import (
    DuplicateRequest,
    InvariantBroken,
    NotServing,
    QueuedTooLong,
    ReaderTooSlow,
    RecoveryTimedOut,
    ServingError,
    SubscriberTooSlow,
    TenantQuotaExceeded,
    WorkerLost,
)
from plugins.kv_events import BlocksCleared, BlocksStored
from plugins.metrics import (
    KV_USAGE,
    OUTPUT_TOKENS,
    PREEMPTIONS,
    PREFIX_HITS,
    RUNNING,
    WORKER_LINK,
    Metric,
    Metrics,
    NoMetrics,
)
from plugins.types import FinishReason, GenerationId, Request, RequestId, StepPlan, StepResult, TokenId, WorkerId
from tests.fakes import FakeWorker, FakeWorkerHandle, expected_output, request, worker_info
from tests.unit.control_plane.driving import StopsAt, outputs
from tests.unit.control_plane.fake_driver import on_virtual_time

A = RequestId("a")
W, V, G = WorkerId("w"), WorkerId("v"), GenerationId("g")


class StuckHandle(FakeWorkerHandle):
    """A worker that takes plans and answers none."""

    def submit(self, plan: StepPlan) -> None:
        self.worker.execute(plan)


class SlowHandle(FakeWorkerHandle):
    """A worker whose every step takes a second."""

    async def results(self) -> AsyncIterator[StepResult]:
        async for result in super().results():
            await asyncio.sleep(1)
            yield result


class Readings(NoMetrics):
    """Remembers what each gauge was set to last, and what counters came to."""

    def __init__(self) -> None:
        self.values: dict[Metric, float] = {}

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        self.values[metric] = value

    def count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        self.values[metric] = self.values.get(metric, 0) + amount


@asynccontextmanager
async def engine(
    *handles: FakeWorkerHandle, metrics: Metrics | None = None, limits: AdmissionConfig | None = None
) -> AsyncIterator[EngineDriver]:
    """A driver that turns, and serves these workers, the first one as W and the second as V."""
    limits = limits or AdmissionConfig(max_deadline_s=1e6)
    core = EngineCore(lambda worker: RunAheadScheduler(SchedulerConfig(), worker), limits, RoundRobin(), 30.0)
    clock = asyncio.get_running_loop().time
    driver = EngineDriver(core, metrics or NoMetrics(), clock, limits, step_timeout_s=120.0)
    tasks = [asyncio.create_task(driver.run())]
    for worker_id, handle in zip((W, V), handles, strict=False):
        driver.connect(worker_id)
        tasks.append(asyncio.create_task(supervise(driver, worker_id, handle)))
    await asyncio.sleep(0)  # lets the tasks attach the workers
    try:
        yield driver
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def supervise(driver: EngineDriver, worker_id: WorkerId, handle: FakeWorkerHandle) -> None:
    """Serve once, as a supervisor would."""
    try:
        await driver.serve(worker_id, handle, await handle.open(), G)
    except ServingError as error:
        driver.lose(worker_id, error)
        raise


def submit(
    driver: EngineDriver, request: Request, deadline_s: float | None = None, max_queue_s: float = 300.0
) -> OutputStream:
    """Start a request of one output."""
    (stream,) = driver.submit([request], G, deadline_s, max_queue_s)
    return stream


async def read_all(stream: OutputStream) -> tuple[list[TokenId], Output]:
    token_ids: list[TokenId] = []
    while True:
        output = await stream.next()
        token_ids += output.token_ids
        if output.finish is not None:
            return token_ids, output


@on_virtual_time
async def test_a_request_streams_its_tokens_to_the_end() -> None:
    async with engine(FakeWorkerHandle(FakeWorker())) as driver:
        stream = submit(driver, request("a", prompt=(3, 4), max_tokens=3))

        token_ids, last = await read_all(stream)

    assert tuple(token_ids) == expected_output((3, 4), 3)
    assert (last.finish, last.error) == (FinishReason.LENGTH, None)


@on_virtual_time
async def test_a_reader_that_is_late_finds_everything_in_one_piece() -> None:
    async with engine(FakeWorkerHandle(FakeWorker())) as driver:
        stream = submit(driver, request("a", prompt=(3, 4), max_tokens=5))
        await driver.drain(grace_s=60.0)

        output = await stream.next()

    assert output == Output(expected_output((3, 4), 5), FinishReason.LENGTH, None)


@on_virtual_time
async def test_a_prompt_that_was_computed_before_says_how_much_of_it_was_cached() -> None:
    readings = Readings()
    async with engine(FakeWorkerHandle(FakeWorker()), metrics=readings) as driver:
        await read_all(submit(driver, request("a", prompt=range(3, 12), max_tokens=1)))
        _, last = await read_all(submit(driver, request("b", prompt=range(3, 12), max_tokens=1)))
        await asyncio.sleep(1)

    assert last.num_cached_tokens == 8
    assert (readings.values[PREFIX_HITS], readings.values[OUTPUT_TOKENS]) == (8, 2)


@on_virtual_time
async def test_a_deadline_ends_a_request_whose_worker_does_not_answer() -> None:
    async with engine(StuckHandle(FakeWorker())) as driver:
        stream = submit(driver, request("a"), deadline_s=2.0)

        _, last = await read_all(stream)

        assert (last.finish, asyncio.get_running_loop().time()) == (FinishReason.DEADLINE, 2.0)


@on_virtual_time
async def test_who_waits_too_long_for_a_row_is_told_and_who_has_one_is_not() -> None:
    """Case B053: a queue that is left never looks like an empty success."""
    handle = StuckHandle(FakeWorker(worker_info(max_sequences=1)))
    async with engine(handle) as driver:
        running = submit(driver, request("a"), deadline_s=9.0, max_queue_s=5.0)
        waiting = submit(driver, request("b"), deadline_s=9.0, max_queue_s=5.0)

        _, told = await read_all(waiting)
        at_s = asyncio.get_running_loop().time()
        _, other = await read_all(running)

    assert (at_s, told.finish, type(told.error)) == (5.0, FinishReason.FAILED, QueuedTooLong)
    assert other.finish is FinishReason.DEADLINE


@on_virtual_time
async def test_a_reader_who_stops_reading_loses_its_own_request_alone() -> None:
    async with engine(SlowHandle(FakeWorker()), limits=AdmissionConfig(max_unread_s=4.0)) as driver:
        unread = submit(driver, request("a", max_tokens=60))
        other = submit(driver, request("b", max_tokens=20))

        _, read = await read_all(other)
        last = await unread.next()

    assert (last.finish, type(last.error)) == (FinishReason.FAILED, ReaderTooSlow)
    assert read.finish is FinishReason.LENGTH


@on_virtual_time
async def test_cancelling_ends_the_stream_and_unknown_ids_are_ignored() -> None:
    async with engine(StuckHandle(FakeWorker())) as driver:
        stream = submit(driver, request("a"), deadline_s=60.0)

        driver.cancel(A)
        driver.cancel(RequestId("nobody"))
        _, last = await read_all(stream)

    assert last.finish is FinishReason.CANCELLED


@on_virtual_time
async def test_a_name_is_taken_until_the_end_of_its_request_was_told() -> None:
    """Case B051, with a cancel just before the second use."""
    async with engine(FakeWorkerHandle(FakeWorker())) as driver:
        first = submit(driver, request("a"))
        driver.cancel(A)

        with pytest.raises(DuplicateRequest):
            submit(driver, request("a"))
        _, cancelled = await read_all(first)
        _, completed = await read_all(submit(driver, request("a")))

    assert (cancelled.finish, completed.finish) == (FinishReason.CANCELLED, FinishReason.LENGTH)


@on_virtual_time
async def test_a_request_whose_worker_dies_goes_on_at_the_other_one_with_no_token_twice() -> None:
    stuck = StuckHandle(FakeWorker())
    async with engine(stuck, FakeWorkerHandle(FakeWorker())) as driver:
        stream = submit(driver, request("a", prompt=(3, 4), max_tokens=5))
        await asyncio.sleep(0)
        stuck.crash(WorkerLost("it was killed"))

        token_ids, last = await read_all(stream)

    assert tuple(token_ids) == expected_output((3, 4), 5)
    assert last.finish is FinishReason.LENGTH


@on_virtual_time
async def test_without_another_worker_requests_wait_for_the_time_of_recovery() -> None:
    stuck = StuckHandle(FakeWorker())
    async with engine(stuck) as driver:
        stream = submit(driver, request("a"))
        await asyncio.sleep(1)
        stuck.crash(WorkerLost("it was killed"))

        _, last = await read_all(stream)
        at_s = asyncio.get_running_loop().time()

        assert 31 <= at_s <= 31.5
        assert isinstance(last.error, RecoveryTimedOut)
        with pytest.raises(NotServing):
            submit(driver, request("b"))


@on_virtual_time
async def test_a_lost_worker_uses_no_blocks_and_runs_nothing() -> None:
    readings = Readings()
    handle = StuckHandle(FakeWorker())
    async with engine(handle, metrics=readings) as driver:
        submit(driver, request("a"))
        await asyncio.sleep(1)
        before = [readings.values[gauge] for gauge in (RUNNING, WORKER_LINK)]
        used_before = readings.values[KV_USAGE]

        handle.crash(WorkerLost("it was killed"))
        await asyncio.sleep(1)

    assert (before, used_before > 0) == ([1, True], True)
    assert [readings.values[gauge] for gauge in (RUNNING, WORKER_LINK, KV_USAGE)] == [0, False, 0]
    assert PREEMPTIONS not in readings.values


@on_virtual_time
async def test_a_worker_that_owes_a_result_for_too_long_is_lost() -> None:
    async with engine(StuckHandle(FakeWorker())) as driver:
        submit(driver, request("a"))

        await asyncio.sleep(119)
        before = driver.facts(W).link
        await asyncio.sleep(2)

        assert (before, driver.facts(W).link) == (Link.LIVE, Link.LOST)


@on_virtual_time
async def test_results_that_simply_end_are_a_lost_worker_too() -> None:
    handle = FakeWorkerHandle(FakeWorker())
    async with engine() as driver:
        driver.connect(W)
        serving = asyncio.create_task(driver.serve(W, handle, await handle.open(), G))
        await asyncio.sleep(0)

        await handle.close()

        with pytest.raises(WorkerLost, match="its results ended"):
            await serving


@on_virtual_time
async def test_a_worker_is_idle_when_its_last_request_has_ended() -> None:
    async with engine(FakeWorkerHandle(FakeWorker())) as driver:
        stream = submit(driver, request("a"))
        idle = asyncio.create_task(driver.worker_idle(W))
        await asyncio.sleep(0)
        before = idle.done()

        await idle

        assert (before, stream.is_ended) == (False, True)


@on_virtual_time
async def test_a_drain_waits_for_those_at_hand_and_refuses_newcomers() -> None:
    async with engine(FakeWorkerHandle(FakeWorker())) as driver:
        stream = submit(driver, request("a"))

        is_done = await driver.drain(grace_s=60.0)

        assert is_done
        assert stream.is_ended
        with pytest.raises(NotServing, match="draining"):
            submit(driver, request("b"))
        with pytest.raises(NotServing, match="the server is stopping"):
            driver.move_intake(Intake.OPEN)


@on_virtual_time
async def test_a_drain_gives_up_after_its_grace() -> None:
    async with engine(StuckHandle(FakeWorker())) as driver:
        submit(driver, request("a"))

        assert not await driver.drain(grace_s=3.0)


@on_virtual_time
async def test_who_follows_cached_blocks_hears_of_them_from_then_on() -> None:
    async with engine(FakeWorkerHandle(FakeWorker())) as driver:
        await read_all(submit(driver, request("a", prompt=range(3, 8), max_tokens=1)))
        events = driver.kv_events()
        await read_all(submit(driver, request("b", prompt=range(30, 39), max_tokens=1)))
        driver.reset_prefix_cache()

        (_, stored), (worker_id, cleared) = await anext(events), await anext(events)
        events.close()

    assert isinstance(stored, BlocksStored)
    assert stored.token_ids == tuple(range(30, 38))
    assert (worker_id, cleared) == (W, BlocksCleared())


@on_virtual_time
async def test_who_does_not_keep_up_with_cached_blocks_is_told_to_begin_anew() -> None:
    async with engine() as driver:
        events = driver.kv_events()
        for _ in range(MAX_EVENTS + 1):
            events.put(W, BlocksCleared())

        with pytest.raises(SubscriberTooSlow, match="subscribe again"):
            await anext(events)


async def test_output_after_the_end_is_a_broken_invariant() -> None:
    stream = OutputStream()
    stream.put((), FinishReason.LENGTH, None, now_s=0.0)

    with pytest.raises(InvariantBroken, match=r"output after the end \(LENGTH\)"):
        stream.put((TokenId(3),), None, None, now_s=0.0)


@on_virtual_time
async def test_an_error_that_is_no_lost_worker_comes_out_as_it_was() -> None:
    handle = FakeWorkerHandle(FakeWorker())
    async with engine() as driver:
        driver.connect(W)
        serving = asyncio.create_task(driver.serve(W, handle, await handle.open(), G))
        await asyncio.sleep(0)
        handle.crash(RuntimeError("a bug"))

        with pytest.raises(RuntimeError, match="a bug"):
            await serving


@on_virtual_time
async def test_each_output_of_a_request_has_a_stream_and_the_first_name_cancels_them_all() -> None:
    """B046: some have ended by then, and keep the end that they had."""
    async with engine(SlowHandle(FakeWorker())) as driver:
        streams = driver.submit(outputs("a", 3, (3, 4), 50), G, None, 300.0, [StopsAt(2), None, None])
        token_ids, first = await read_all(streams[0])

        driver.cancel(A)
        others = [(await read_all(stream))[1] for stream in streams[1:]]

    assert (tuple(token_ids), first.finish) == (expected_output((3, 4), 2), FinishReason.STOP)
    assert [other.finish for other in others] == [FinishReason.CANCELLED] * 2


@on_virtual_time
async def test_outputs_that_are_refused_leave_no_reader_and_no_timer() -> None:
    async with engine(StuckHandle(FakeWorker()), limits=AdmissionConfig(max_tenant_requests=2)) as driver:
        with pytest.raises(TenantQuotaExceeded):
            driver.submit(outputs("a", 3), G, None, 300.0)

        assert await driver.drain(grace_s=1.0)


@on_virtual_time
async def test_the_patience_in_the_queue_is_over_once_the_first_output_has_a_row() -> None:
    handle = StuckHandle(FakeWorker(worker_info(max_sequences=1)))
    async with engine(handle) as driver:
        running, waiting = driver.submit(outputs("a", 2), G, deadline_s=9.0, max_queue_s=5.0)
        behind = driver.submit(outputs("b", 2), G, deadline_s=9.0, max_queue_s=5.0)

        ends = [(await read_all(stream))[1] for stream in behind]
        at_s = asyncio.get_running_loop().time()
        others = [(await read_all(stream))[1] for stream in (running, waiting)]

    assert (at_s, [type(end.error) for end in ends]) == (5.0, [QueuedTooLong] * 2)
    assert [other.finish for other in others] == [FinishReason.DEADLINE] * 2


@on_virtual_time
async def test_tokens_behind_a_stop_do_not_count() -> None:
    readings = Readings()
    async with engine(FakeWorkerHandle(FakeWorker()), metrics=readings) as driver:
        (stream,) = driver.submit([request("a", max_tokens=50)], G, None, 300.0, [StopsAt(3)])

        await read_all(stream)
        await asyncio.sleep(1)

    assert readings.values[OUTPUT_TOKENS] == 3
