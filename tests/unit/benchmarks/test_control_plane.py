"""The simulated worker behind the real protocol, the clients that count, and the bars."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from benchmarks.control_plane import Level, misses
from benchmarks.fake_worker import FakeWorkerServicer, Pace, fake_worker_info
from benchmarks.open_streams import Count, OpenStreams, short_requests
from control_plane.workers.grpc_handle import GrpcWorkerHandle
from gpu_worker.loading.dummy_loader import byte_tokenizer
from plugins.types import Chunk, Row, StepPlan
from protos.inference.v1 import inference_pb2
from protos.worker.v1 import worker_pb2_grpc
from tests.unit.benchmarks.test_fake_rows import admission

MIB = 1024 * 1024


async def test_the_simulated_worker_speaks_the_real_protocol() -> None:
    server = grpc.aio.server()
    info = fake_worker_info("fake", port=1, rows=4, vocab_size=1_000, tokenizer=byte_tokenizer())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(FakeWorkerServicer(info, byte_tokenizer(), Pace()), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    handle = GrpcWorkerHandle(f"127.0.0.1:{port}", "owner", MIB, timeout_s=10)

    described, tokenizer, opened = await handle.describe(), await handle.tokenizer(), await handle.open()
    handle.submit(StepPlan(seq=1, admitted=(admission(2, 5, 5, max_tokens=2),), chunks=(Chunk(Row(2), 5),)))
    result = await anext(handle.results())
    await handle.close()
    await server.stop(None)

    assert described == opened == info
    assert tokenizer == byte_tokenizer()
    assert (result.seq, result.rows, result.counts) == (1, (2,), (1,))
    assert all(256 <= token_id < 1_000 for token_id in result.token_ids)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110  # the counts are plain numbers, and tell nobody
            await asyncio.sleep(0.01)


async def generate_endlessly(
    request: inference_pb2.GenerateRequest,
    context: "grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]",
) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """Answer a request for one token with it, and any other with two tokens at a time for ever."""
    if request.sampling.max_tokens == 1:
        yield inference_pb2.GenerateResponse(token_ids=[5])
        return
    while True:
        yield inference_pb2.GenerateResponse(token_ids=[5, 6])
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def endless_server() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(
        generate_endlessly,
        request_deserializer=inference_pb2.GenerateRequest.FromString,
        response_serializer=inference_pb2.GenerateResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("dihedral.inference.v1.InferenceService", {"Generate": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def test_streams_are_open_and_counted_until_the_context_ends() -> None:
    async with endless_server() as channel:
        async with OpenStreams([channel], ["a", "b", "c"]) as streams:
            at_first = streams.count.num_messages
            await until(lambda: streams.count.num_messages >= at_first + 30)
        at_last = streams.count.num_messages
        await asyncio.sleep(0.02)

    assert at_first >= 3
    assert streams.count.num_messages == at_last
    assert streams.count.num_tokens == 2 * at_last


async def test_short_requests_follow_one_another_until_the_context_ends() -> None:
    count = Count()

    async with endless_server() as channel, short_requests([channel], ["a"], 2, count):
        await until(lambda: count.num_requests >= 10)

    assert count.num_messages >= 10
    assert count.num_tokens == count.num_messages


async def test_a_request_that_fails_meanwhile_is_told() -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        async with (
            grpc.aio.insecure_channel("127.0.0.1:1") as nobody,
            short_requests([nobody], ["a"], 1, Count()),
        ):
            await asyncio.sleep(0.2)


def test_rows_leave_room_where_several_workers_share_the_streams() -> None:
    assert Level(series="streams", num_streams=300, num_workers=1).rows == 300
    assert Level(series="workers", num_streams=64, num_workers=4).rows == 32


def run(num_streams: int, us_per_message: float, ms_per_request: float) -> dict[str, object]:
    return {
        "series": "streams",
        "num_streams": num_streams,
        "num_workers": 1,
        "us_per_message": us_per_message,
        "ms_per_request": ms_per_request,
    }


def test_bars_are_for_each_level_and_for_the_growth_of_a_series() -> None:
    assert misses([run(100, 40.0, 0.9), run(1_000, 48.0, 0.7)]) == []
    assert misses([run(100, 61.0, 0.9), run(1_000, 62.0, 1.3)]) == [
        "100 streams on 1 workers: 61.0 us per message, above 60",
        "1000 streams on 1 workers: 62.0 us per message, above 60",
        "1000 streams on 1 workers: 1.30 ms per request, above 1.2",
        "streams: ms_per_request grows to 1.44 of the first level's, above 1.2",
    ]
