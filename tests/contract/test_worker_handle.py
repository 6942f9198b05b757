"""One suite for both ways to speak to a worker: the worker itself, and gRPC over loopback to the same worker.

What only the wire can do is tested in `tests/unit/control_plane/test_grpc_handle.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from control_plane.workers.grpc_handle import GrpcWorkerHandle
from control_plane.workers.handle import WorkerHandle
from gpu_worker.config import WorkerConfig
from gpu_worker.factory import build_worker
from gpu_worker.server import WorkerServer
from plugins.errors import PlanOutOfOrder
from plugins.metrics import NoMetrics
from plugins.types import (
    Admission,
    BlockId,
    Chunk,
    FinishReason,
    RequestId,
    Row,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenId,
)

CONFIG = WorkerConfig(
    load_format="dummy", dtype="float32", threads=1, num_blocks=32, max_sequences=4, max_step_tokens=64, lease_s=0.0
)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)

Connect = Callable[[], WorkerHandle]  # a handle to the same worker; in process that is the worker itself


@asynccontextmanager
async def in_process() -> AsyncIterator[Connect]:
    worker = build_worker(CONFIG, NoMetrics(), lambda phase, done, total: None)
    try:
        yield lambda: worker
    finally:
        await worker.close()


@asynccontextmanager
async def over_grpc() -> AsyncIterator[Connect]:
    worker = build_worker(CONFIG, NoMetrics(), lambda phase, done, total: None)
    failures: list[Exception] = []
    server = WorkerServer("127.0.0.1", 0, CONFIG.lease_s, failures.append)
    port = await server.start()
    await server.begin(worker)
    handles: list[GrpcWorkerHandle] = []

    def connect() -> WorkerHandle:
        handles.append(GrpcWorkerHandle(f"127.0.0.1:{port}", "test", 1_000_000, timeout_s=30.0))
        return handles[-1]

    try:
        yield connect
    finally:
        for handle in handles:
            await handle.close()
        await server.stop()
        await worker.close()
    assert failures == []


WAYS = {"in process": in_process, "over gRPC": over_grpc}


@pytest.fixture(params=list(WAYS))
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    async with WAYS[request.param]() as connect:
        yield connect


async def test_a_worker_describes_itself_the_same_before_and_when_it_is_opened(connect: Connect) -> None:
    handle = connect()

    described = await handle.describe()

    assert described == await handle.open()
    assert (described.num_blocks, described.max_sequences, described.max_step_tokens) == (32, 4, 64)
    assert described.model.architecture == "LlamaForCausalLM"


async def test_a_worker_describes_itself_while_its_results_are_waited_for(connect: Connect) -> None:
    handle = connect()
    opened = await handle.open()
    waiting = asyncio.create_task(collect(handle.results()))

    described = await handle.describe()
    await handle.close()

    assert described == opened
    assert await waiting == []


async def test_the_tokenizer_arrives_whole(connect: Connect) -> None:
    handle = connect()

    bundle = await handle.tokenizer()

    assert bundle == await build_worker(CONFIG, NoMetrics(), lambda phase, done, total: None).tokenizer()


async def test_plans_are_answered_in_the_order_they_were_submitted(connect: Connect) -> None:
    handle = connect()
    await handle.open()

    results = await run(handle, [plan(1, admit=[5, 6, 7]), plan(2), plan(3), plan(4)])

    assert [(result.seq, result.rows, result.counts) for result in results] == [
        (1, (0,), (1,)),
        (2, (0,), (1,)),
        (3, (0,), (1,)),
        (4, (0,), (1,)),
    ]


async def test_a_row_that_has_finished_is_skipped_by_the_plan_behind_it(connect: Connect) -> None:
    handle = connect()
    await handle.open()
    sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0)

    results = await run(handle, [plan(1, admit=[5, 6, 7], sampling=sampling), plan(2)])

    assert (results[0].counts, results[0].finishes) == ((1,), (FinishReason.LENGTH,))
    assert (results[1].rows, results[1].counts, results[1].token_ids) == ((0,), (0,), ())


async def test_a_gap_between_plans_ends_the_results(connect: Connect) -> None:
    handle = connect()
    await handle.open()
    results = handle.results()
    handle.submit(plan(1, admit=[5, 6, 7]))
    handle.submit(plan(3))

    assert (await anext(results)).seq == 1
    with pytest.raises(PlanOutOfOrder):
        await anext(results)


async def test_opening_again_forgets_all_rows_and_counts_from_1(connect: Connect) -> None:
    first = connect()
    await first.open()
    before = await run(first, [plan(1, admit=[5, 6, 7]), plan(2)])

    second = connect()
    await second.open()
    after = await run(second, [plan(1, admit=[5, 6, 7]), plan(2)])

    assert [result.token_ids for result in after] == [result.token_ids for result in before]


async def test_closing_ends_the_results_for_whoever_waits_or_asks_later(connect: Connect) -> None:
    handle = connect()
    await handle.open()
    waiting = asyncio.create_task(collect(handle.results()))

    await handle.close()
    await handle.close()

    assert await waiting == []
    assert await collect(handle.results()) == []


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(max_tokens=8, temperature=0.75, top_k=50, top_p=0.9375, seed=7)]
)
async def test_both_ways_give_the_same_tokens(sampling: SamplingParams) -> None:
    plans = [plan(1, admit=[5, 6, 7], sampling=sampling), plan(2), plan(3), plan(4)]

    answers = []
    for way in WAYS.values():
        async with way() as connect:
            handle = connect()
            await handle.open()
            answers.append([(result.token_ids, result.finishes) for result in await run(handle, plans)])

    assert answers[0] == answers[1]
    assert sum(len(token_ids) for token_ids, _ in answers[0]) == 4


def plan(seq: int, admit: Sequence[int] = (), sampling: SamplingParams = GREEDY) -> StepPlan:
    """Row 0 takes one step; with `admit` it is admitted first, with these tokens."""
    if not admit:
        return StepPlan(seq=seq, chunks=(Chunk(Row(0), 1),))
    admission = Admission(
        row=Row(0),
        request_id=RequestId("a"),
        token_ids=tuple(map(TokenId, admit)),
        num_prompt_tokens=len(admit),
        sampling=sampling,
        block_ids=(),
        num_cached_tokens=0,
    )
    return StepPlan(seq=seq, admitted=(admission,), chunks=(Chunk(Row(0), len(admit), (BlockId(1),)),))


async def run(handle: WorkerHandle, plans: Sequence[StepPlan]) -> list[StepResult]:
    """Submit plans, at most two ahead of the results."""
    results: list[StepResult] = []
    answers = handle.results()
    for number, one in enumerate(plans):
        handle.submit(one)
        if number >= 1:
            results.append(await anext(answers))
    results.append(await anext(answers))
    return results


async def collect(results: AsyncIterator[StepResult]) -> list[StepResult]:
    return [result async for result in results]
