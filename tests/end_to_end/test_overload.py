"""More than a server can take, and callers that fail or leave: everybody is answered, and nothing stays behind."""

import asyncio
import random
from collections import Counter

import grpc
import pytest

from plugins.errors import Code
from protos.status import from_rpc_error
from tests.end_to_end.cells import serving
from tests.end_to_end.clients import Client, ask, outcomes


async def test_a_client_that_leaves_gives_its_row_and_its_blocks_back() -> None:
    """Case B040: a caller is gone, and its work goes on."""
    async with serving() as (server, client):
        started = asyncio.Event()
        stream = asyncio.create_task(client.answer(ask([5, 6, 7], 2000), started.set))
        await started.wait()

        stream.cancel()
        [worker] = await client.idle_workers()
        counted = await asyncio.to_thread(outcomes, server.metrics_url)

    assert worker.num_free_blocks == worker.num_blocks
    assert counted == {"cancelled": 1}


async def test_requests_that_fail_in_every_way_leave_no_block_behind() -> None:
    """Case B045: failed requests push the use of blocks up, bit by bit."""
    draw = random.Random(45)
    async with serving("--worker.num-blocks=200", "--worker.max-sequences=8") as (_, client):
        free: list[int] = []
        codes: Counter[grpc.StatusCode] = Counter()
        for _ in range(4):
            gate = asyncio.Semaphore(16)
            codes += Counter(await asyncio.gather(*(fail(client, number, draw, gate) for number in range(100))))
            [worker] = await client.idle_workers()
            free.append(worker.num_free_blocks)

    assert free == [200] * 4
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] == 200
    assert codes[grpc.StatusCode.DEADLINE_EXCEEDED] == codes[grpc.StatusCode.CANCELLED] == 100


async def fail(client: Client, number: int, draw: random.Random, gate: asyncio.Semaphore) -> grpc.StatusCode:
    """Fail in one of four ways; returns how."""
    prompt = [draw.randrange(3, 256) for _ in range(draw.randint(1, 300))]
    after_s = draw.uniform(0.01, 0.1)
    async with gate:
        match number % 4:
            case 0:
                return await client.code(ask([5] * 3000, 10))
            case 1:
                return await client.code(ask(prompt, 0))
            case 2:
                return await client.code(ask(prompt, 1500), timeout_s=after_s)
            case _:
                call = client.inference.Generate(ask(prompt, 1500))
                asyncio.get_running_loop().call_later(after_s, call.cancel)
                return await call.code()


async def test_every_call_of_a_burst_is_answered_or_refused() -> None:
    """Case B052: answers are lost when the queue overflows."""
    async with serving("--max-waiting=32", "--worker.max-sequences=8") as (_, client):
        codes = Counter(await asyncio.gather(*(client.code(ask([5, number % 250], 200)) for number in range(512))))
        [worker] = await client.idle_workers()

    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert codes.total() == 512
    assert codes[grpc.StatusCode.OK] >= 32  # so many may wait, even if all come before the first step
    assert worker.num_free_blocks == worker.num_blocks


async def test_a_refusal_tells_when_to_try_again() -> None:
    async with serving("--max-waiting=1", "--worker.max-sequences=1") as (_, client):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.gather(*(client.answer(ask([5, 6, number], 500)) for number in range(3)))

    error = from_rpc_error(caught.value)
    assert (error.code, error.reason, error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", 1.0)
    assert dict(caught.value.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1000"


@pytest.mark.parametrize(
    ("words", "timeout_s", "reason"),
    [
        (("--admission.max-queue-s=0.2",), None, "QUEUED_TOO_LONG"),
        ((), 0.2, "DEADLINE_EXCEEDED"),
    ],
)
async def test_a_queued_stream_never_ends_as_if_it_were_complete(
    words: tuple[str, ...], timeout_s: float | None, reason: str
) -> None:
    """Case B053: a stream that waited is ended as if it were complete."""
    async with serving("--worker.max-sequences=1", *words) as (_, client):
        started = asyncio.Event()
        ahead = asyncio.create_task(client.answer(ask([5, 6, 7], 2000), started.set))
        await started.wait()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.answer(ask([8], 5), timeout_s=timeout_s)
        answer = await ahead

    assert from_rpc_error(caught.value).reason == reason
    assert (len(answer.token_ids), answer.finish) == (2000, "FINISH_REASON_LENGTH")
