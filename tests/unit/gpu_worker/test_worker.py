"""The device thread as seen from the event loop: order, run-ahead, errors, ends."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest
import torch

from gpu_worker.worker import Worker
from plugins.errors import PlanOutOfOrder
from plugins.metrics import (
    WORKER_QUEUE,
    WORKER_ROW_FAILURES,
    WORKER_ROWS,
    WORKER_STEP,
    WORKER_TOKENS,
    Metric,
    NoMetrics,
)
from plugins.types import Row, RowFailure, StepPlan, StepResult, TokenId, TokenizerBundle
from tests.fakes import worker_info

BUNDLE = TokenizerBundle(tokenizer_json=b"{}", chat_template="", bos_token="", eos_token="", add_bos=False)


class FakePending:
    """A launched plan that is ready when the test says so."""

    num_prompt_tokens = 3

    def __init__(self, runner: "FakeRunner", plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def is_ready(self) -> bool:
        return self._runner.is_ready

    def result(self) -> StepResult:
        self._runner.events.append(f"result {self._plan.seq}")
        return StepResult(
            seq=self._plan.seq,
            rows=(Row(0),),
            counts=(1,),
            token_ids=(TokenId(7),),
            finishes=(None,),
            failures=self._runner.failures,
        )


class FakeRunner:
    """Notes what happens to it, and runs `on_launch` inside each launch."""

    num_rows = 2

    def __init__(self, is_ready: bool = True) -> None:
        self.is_ready = is_ready
        self.events: list[str] = []
        self.failures: tuple[RowFailure, ...] = ()
        self.closed_in = ""  # which thread
        self.on_launch: Callable[[StepPlan], None] = lambda plan: None
        self.on_reset: Callable[[], None] = lambda: None

    def reset(self) -> None:
        self.events.append("reset")
        self.on_reset()

    def close(self) -> None:
        self.closed_in = threading.current_thread().name

    def launch(self, plan: StepPlan) -> FakePending:
        self.events.append(f"launch {plan.seq}")
        self.on_launch(plan)
        return FakePending(self, plan)


class CountingMetrics(NoMetrics):
    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.observed: list[str] = []

    def count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        key = " ".join((metric.name, *labels))
        self.values[key] = self.values.get(key, 0) + amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        self.values[metric.name] = value

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        self.observed.append(metric.name)


class Ticks:
    """A clock that moves by one with each look."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns


@asynccontextmanager
async def worker_over(runner: FakeRunner, metrics: NoMetrics | None = None, threads: int = 1) -> AsyncIterator[Worker]:
    worker = Worker(runner, worker_info(), BUNDLE, threads, metrics or NoMetrics(), Ticks())
    yield worker
    await worker.close()


async def take(worker: Worker, num_results: int) -> list[StepResult]:
    results: list[StepResult] = []
    async with aclosing(worker.results()) as stream:
        while len(results) < num_results:
            results.append(await anext(stream))
    return results


def submit(worker: Worker, seqs: Sequence[int]) -> None:
    for seq in seqs:
        worker.submit(StepPlan(seq=seq))


async def test_describing_a_worker_needs_no_open() -> None:
    async with worker_over(FakeRunner()) as worker:
        assert await worker.describe() == worker_info()
        assert await worker.tokenizer() == BUNDLE


async def test_results_come_in_the_order_of_the_plans() -> None:
    async with worker_over(FakeRunner()) as worker:
        await worker.open()
        submit(worker, [1, 2, 3])

        results = await take(worker, 3)

    assert [result.seq for result in results] == [1, 2, 3]


async def test_a_result_that_is_ready_is_read_before_the_next_launch() -> None:
    runner = FakeRunner(is_ready=True)
    async with worker_over(runner) as worker:
        await worker.open()
        submit(worker, [1, 2])
        await take(worker, 2)

    assert runner.events == ["reset", "launch 1", "result 1", "launch 2", "result 2"]


async def test_while_a_result_is_not_ready_the_next_plan_is_launched_behind_it() -> None:
    runner = FakeRunner(is_ready=False)
    both_submitted = threading.Event()
    runner.on_launch = lambda plan: None if both_submitted.wait(10) else pytest.fail("never submitted")
    async with worker_over(runner) as worker:
        await worker.open()
        submit(worker, [1, 2])
        both_submitted.set()
        await take(worker, 2)

    assert runner.events == ["reset", "launch 1", "launch 2", "result 1", "result 2"]


async def test_a_gap_in_seq_ends_the_results() -> None:
    runner = FakeRunner()
    async with worker_over(runner) as worker:
        await worker.open()
        submit(worker, [1, 3, 4])

        await take(worker, 1)
        with pytest.raises(PlanOutOfOrder, match="plan 3 came, expected 2"):
            await take(worker, 1)

    assert "launch 3" not in runner.events
    assert "launch 4" not in runner.events


async def test_an_unexpected_error_reaches_the_reader_and_a_new_owner_starts_afresh() -> None:
    runner = FakeRunner()

    def fail_once(plan: StepPlan) -> None:
        runner.on_launch = lambda plan: None
        raise MemoryError("no room for the scores")

    runner.on_launch = fail_once
    async with worker_over(runner) as worker:
        await worker.open()
        submit(worker, [1, 2])
        with pytest.raises(MemoryError, match="no room for the scores"):
            await take(worker, 1)

        await worker.open()
        submit(worker, [1])
        results = await take(worker, 1)

    assert [result.seq for result in results] == [1]
    assert runner.events == ["reset", "launch 1", "reset", "launch 1", "result 1"]


async def test_what_goes_wrong_while_it_is_opened_reaches_who_opens_and_the_next_may_try_again() -> None:
    runner = FakeRunner()

    def fail_once() -> None:
        runner.on_reset = lambda: None
        raise MemoryError("no room for the rows")

    runner.on_reset = fail_once
    async with worker_over(runner) as worker:
        with pytest.raises(MemoryError, match="no room for the rows"):
            await worker.open()
        submit(worker, [1])

        await worker.open()
        submit(worker, [1])
        results = await take(worker, 1)

    assert [result.seq for result in results] == [1]
    assert runner.events == ["reset", "reset", "launch 1", "result 1"]


def test_an_owner_whose_loop_has_ended_leaves_the_worker_to_the_next() -> None:
    runner = FakeRunner()
    is_launched, is_left = threading.Event(), threading.Event()
    worker = Worker(runner, worker_info(), BUNDLE, 1, NoMetrics())

    def wait_until_left(plan: StepPlan) -> None:
        is_launched.set()
        if not is_left.wait(10):
            pytest.fail("never left")

    async def leave_while_it_computes() -> None:
        await worker.open()
        submit(worker, [1])
        await asyncio.to_thread(is_launched.wait, 10)
        opening = asyncio.ensure_future(worker.open())
        await asyncio.sleep(0)  # the command of `open` is in the queue now
        opening.cancel()

    async def use() -> list[StepResult]:
        await worker.open()
        submit(worker, [1])
        results = await take(worker, 1)
        await worker.close()
        return results

    runner.on_launch = wait_until_left
    asyncio.run(leave_while_it_computes())
    is_left.set()
    results = asyncio.run(use())

    assert [result.seq for result in results] == [1]
    assert runner.events == ["reset", "launch 1", "result 1", "reset", "reset", "launch 1", "result 1"]


async def test_opening_again_ends_the_results_of_the_owner_before() -> None:
    async with worker_over(FakeRunner()) as worker:
        await worker.open()
        first = worker.results()
        submit(worker, [1])
        before = [await anext(first)]

        await worker.open()
        submit(worker, [1])
        after = await take(worker, 1)

        assert [result async for result in first] == []
    assert [result.seq for result in before + after] == [1, 1]


async def test_what_was_launched_for_the_owner_before_is_dropped() -> None:
    runner = FakeRunner(is_ready=False)
    is_opening = threading.Event()
    runner.on_launch = lambda plan: None if is_opening.wait(10) else pytest.fail("never opened again")
    async with worker_over(runner) as worker:
        await worker.open()
        submit(worker, [1])
        opening = asyncio.ensure_future(worker.open())
        await asyncio.sleep(0)  # the command of `open` is in the queue now
        is_opening.set()
        await opening
        submit(worker, [1])
        results = await take(worker, 1)

    assert [result.seq for result in results] == [1]
    assert runner.events == ["reset", "launch 1", "reset", "launch 1", "result 1"]


async def test_after_an_error_no_result_of_the_same_owner_follows() -> None:
    runner = FakeRunner(is_ready=False)
    both_submitted = threading.Event()

    def fail_second(plan: StepPlan) -> None:
        if not both_submitted.wait(10):
            pytest.fail("never submitted")
        if plan.seq == 2:
            raise MemoryError("no room")

    runner.on_launch = fail_second
    async with worker_over(runner) as worker:
        await worker.open()
        submit(worker, [1, 2])
        both_submitted.set()
        with pytest.raises(MemoryError, match="no room"):
            await take(worker, 1)

    assert runner.events == ["reset", "launch 1", "launch 2"]


async def test_closing_ends_the_results_and_may_be_done_twice() -> None:
    async with worker_over(FakeRunner()) as worker:
        await worker.open()
        submit(worker, [1])

        await worker.close()
        await worker.close()

        assert [result.seq async for result in worker.results()] == [1]


async def test_a_worker_that_was_never_opened_closes_its_runner_too() -> None:
    runner = FakeRunner()
    async with worker_over(runner) as worker:
        await worker.close()

    assert runner.closed_in == "device"


async def test_what_is_no_exception_reaches_the_reader_and_the_device_thread_lives_on() -> None:
    """A library's panic, or sys.exit in a stage: a thread that ended in silence would be waited for without end."""
    runner = FakeRunner()

    def leave(plan: StepPlan) -> None:
        raise SystemExit(3)

    runner.on_launch = leave
    async with worker_over(runner) as worker:
        await worker.open()
        submit(worker, [1])
        with pytest.raises(RuntimeError, match=r"a step met SystemExit\(3\)"):
            await take(worker, 1)

        runner.on_launch = lambda plan: None
        await worker.open()
        submit(worker, [1])
        results = await take(worker, 1)

    assert [result.seq for result in results] == [1]


async def test_the_computing_thread_gets_its_own_number_of_threads() -> None:
    runner = FakeRunner()
    seen: list[tuple[str, int]] = []
    runner.on_launch = lambda plan: seen.append((threading.current_thread().name, torch.get_num_threads()))
    async with worker_over(runner, threads=2) as worker:
        await worker.open()
        submit(worker, [1])
        await take(worker, 1)

    assert seen == [("device", 2)]


async def test_a_step_is_timed_and_counted() -> None:
    metrics = CountingMetrics()
    async with worker_over(FakeRunner(), metrics) as worker:
        await worker.open()
        submit(worker, [1])
        (result,) = await take(worker, 1)

    assert (result.queue_ns, result.compute_ns) == (1, 1)
    assert metrics.values == {f"{WORKER_TOKENS.name} prompt": 3, f"{WORKER_TOKENS.name} output": 1, WORKER_ROWS.name: 2}
    assert metrics.observed == [WORKER_STEP.name, WORKER_QUEUE.name]


async def test_rows_that_failed_are_counted_by_their_reason() -> None:
    """B092: a counter increments."""
    metrics = CountingMetrics()
    runner = FakeRunner()
    runner.failures = (
        RowFailure(Row(1), "LOGITS_NOT_FINITE", "."),
        RowFailure(Row(2), "PLUGIN_FAILED", "."),
        RowFailure(Row(3), "PLUGIN_FAILED", "."),
    )
    async with worker_over(runner, metrics) as worker:
        await worker.open()
        submit(worker, [1])
        await take(worker, 1)

    assert metrics.values[f"{WORKER_ROW_FAILURES.name} LOGITS_NOT_FINITE"] == 1
    assert metrics.values[f"{WORKER_ROW_FAILURES.name} PLUGIN_FAILED"] == 2
