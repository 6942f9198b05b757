"""The handle under a worker that misbehaves: whatever comes or does not come ends in the error that says why."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.grammar_text import grammar_text
from control_plane.workers.config import WorkersConfig
from control_plane.workers.grpc_handle import GrpcWorkerHandle
from plugins.errors import (
    InvalidConfig,
    InvariantBroken,
    PlanOutOfOrder,
    ServingError,
    WorkerAbsent,
    WorkerLeaving,
    WorkerLost,
    WorkerOwned,
    WorkerTaken,
    WrongProtocol,
)
from plugins.types import (
    Admission,
    BlockId,
    Chunk,
    RequestId,
    Row,
    SamplingParams,
    StepPlan,
    StepResult,
    StructuredOutput,
    TokenId,
)
from protos.channel import MIB, bind, internal_server_options
from protos.codec import encode_plan, encode_result
from protos.codec_info import encode_worker_info
from protos.interceptor import ErrorInterceptor
from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.fakes import worker_info

Requests = AsyncIterator[worker_pb2.RunRequest]
Responses = AsyncIterator[worker_pb2.RunResponse]

EPOCH = 3
READY = worker_pb2.RunResponse(
    ready=worker_pb2.Ready(protocol_version=2, epoch=EPOCH, lease_s=5.0, worker=encode_worker_info(worker_info()))
)


class ScriptedServicer(worker_pb2_grpc.WorkerServiceServicer):
    """A worker whose step stream is written out in the test."""

    def __init__(self, script: Callable[[Requests], Responses]) -> None:
        self._script = script

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(worker=worker_pb2.WorkerInfo(num_blocks=1))

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        yield worker_pb2.GetTokenizerResponse(header=worker_pb2.TokenizerHeader(num_bytes=9), data=b"half")

    async def Run(self, request_iterator: Requests, context: "grpc.aio.ServicerContext[Any, Any]") -> Responses:
        async for response in self._script(request_iterator):
            yield response


@asynccontextmanager
async def connected(
    script: Callable[[Requests], Responses], timeout_s: float = 30.0
) -> AsyncIterator[GrpcWorkerHandle]:
    server = grpc.aio.server(options=internal_server_options(), interceptors=[ErrorInterceptor()])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(ScriptedServicer(script), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    handle = GrpcWorkerHandle(f"127.0.0.1:{port}", "me", 1_000_000, timeout_s)
    try:
        yield handle
    finally:
        await handle.close()
        await server.stop(None)


async def silent(requests: Requests) -> Responses:
    await asyncio.Event().wait()
    yield READY


def saying(*responses: worker_pb2.RunResponse | ServingError) -> Callable[[Requests], Responses]:
    """Answer Hello with Ready, then say this, whatever is asked; an error ends the stream, else it stays open."""

    async def script(requests: Requests) -> Responses:
        await anext(requests)
        yield READY
        for response in responses:
            if isinstance(response, ServingError):
                raise response
            yield response
        await asyncio.Event().wait()

    return script


def result(seq: int, epoch: int = EPOCH) -> worker_pb2.RunResponse:
    return worker_pb2.RunResponse(result=encode_result(StepResult(seq=seq), epoch))


async def error_of(awaitable: Awaitable[object]) -> ServingError:
    with pytest.raises(ServingError) as failed:
        await awaitable
    return failed.value


async def test_a_worker_that_is_absent_is_lost_and_the_message_tells_where_it_was_looked_for() -> None:
    handle = GrpcWorkerHandle("127.0.0.1:1", "me", 1_000_000, timeout_s=30.0)

    errors = [await error_of(call) for call in (handle.describe(), handle.tokenizer(), handle.open())]
    await handle.close()

    assert [type(error) for error in errors] == [WorkerAbsent] * 3
    assert "nothing answers at 127.0.0.1:1; start a worker there, or set workers.address" in str(errors[2])


async def test_a_worker_that_does_not_answer_hello_is_lost() -> None:
    async with connected(silent, timeout_s=0.05) as handle:
        error = await error_of(handle.open())

    assert isinstance(error, WorkerLost)
    assert "did not answer within 0.05 s" in str(error)


async def test_a_worker_without_sizes_or_with_half_a_tokenizer_is_lost() -> None:
    async with connected(silent) as handle:
        described, tokenized = await error_of(handle.describe()), await error_of(handle.tokenizer())

    assert (type(described), type(tokenized)) == (WorkerLost, WorkerLost)
    assert "it describes itself with 0 for block_size" in str(described)
    assert "its tokenizer came with 4 of 9 bytes" in str(tokenized)


@pytest.mark.parametrize(
    "error", [WorkerOwned("other", 5.0), WrongProtocol(2, 1), PlanOutOfOrder("replaced"), WorkerLeaving("SIGTERM")]
)
async def test_what_a_worker_says_on_purpose_arrives_as_it_was_said(error: ServingError) -> None:
    async def refuse(requests: Requests) -> Responses:
        await anext(requests)
        raise error
        yield READY

    async with connected(refuse) as handle:
        arrived = await error_of(handle.open())

    assert (type(arrived), str(arrived)) == (type(error), str(error))


async def test_a_worker_of_another_protocol_version_is_refused_here_too() -> None:
    async def newer(requests: Requests) -> Responses:
        await anext(requests)
        yield worker_pb2.RunResponse(ready=worker_pb2.Ready(protocol_version=3))

    async with connected(newer) as handle:
        error = await error_of(handle.open())

    assert str(error) == "the peer speaks step protocol 3, this process 2; run the same release on both"


async def test_late_results_of_an_older_epoch_are_discarded() -> None:
    async with connected(saying(result(8, epoch=EPOCH - 1), result(1), result(9, epoch=1), result(2))) as handle:
        await handle.open()
        results = handle.results()

        assert [(await anext(results)).seq, (await anext(results)).seq] == [1, 2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (result(3), "result 3 of epoch 3 came after result 1 of epoch 3"),
        (result(1), "result 1 of epoch 3 came after result 1 of epoch 3"),
        (result(2, epoch=4), "result 2 of epoch 4 came after result 1 of epoch 3"),
        (
            worker_pb2.RunResponse(result=worker_pb2.StepResult(epoch=3, seq=2, rows_i32=b"a")),
            "malformed result 2: rows_i32 has 1 bytes, which is no number of int32",
        ),
    ],
)
async def test_results_out_of_order_or_malformed_end_the_results(wrong: worker_pb2.RunResponse, message: str) -> None:
    async with connected(saying(result(1), wrong)) as handle:
        await handle.open()
        results = handle.results()
        first = await anext(results)
        error = await error_of(anext(results))

    assert first == StepResult(seq=1)
    assert (type(error), str(error)) == (PlanOutOfOrder, message)


async def test_a_stream_that_the_worker_ends_is_a_lost_worker() -> None:
    async def leave(requests: Requests) -> Responses:
        await anext(requests)
        yield READY

    async with connected(leave) as handle:
        await handle.open()
        error = await error_of(anext(handle.results()))

    assert isinstance(error, WorkerLost)
    assert str(error).endswith("ended the step stream")


async def test_a_worker_that_leaves_says_so_after_its_last_result() -> None:
    async with connected(saying(result(1), WorkerLeaving("it was asked to stop"))) as handle:
        await handle.open()
        results = handle.results()
        last = await anext(results)
        error = await error_of(anext(results))

    assert last.seq == 1
    assert (type(error), str(error)) == (WorkerLeaving, "the worker is leaving: it was asked to stop")


@pytest.mark.parametrize("error", [WorkerLeaving("it was asked to stop"), WorkerTaken("me")])
async def test_a_goodbye_counts_whatever_becomes_of_the_stream(error: WorkerLeaving | WorkerTaken) -> None:
    """A write that meets the end of the stream makes gRPC forget its status; a message it does not forget."""
    said = worker_pb2.RunResponse(goodbye=worker_pb2.Goodbye(reason=error.reason, message=str(error)))
    async with connected(saying(result(1), said)) as handle:
        await handle.open()
        results = handle.results()
        await anext(results)
        told = await error_of(anext(results))

    assert (type(told), str(told)) == (type(error), str(error))


async def test_a_worker_that_leaves_instead_of_being_ready_says_so_too() -> None:
    async def leave(requests: Requests) -> Responses:
        await anext(requests)
        yield worker_pb2.RunResponse(goodbye=worker_pb2.Goodbye(reason=WorkerLeaving.reason, message="it stops"))
        await asyncio.Event().wait()

    async with connected(leave) as handle:
        error = await error_of(handle.open())

    assert (type(error), str(error)) == (WorkerLeaving, "it stops")


async def test_a_goodbye_for_another_reason_is_a_lost_worker() -> None:
    said = worker_pb2.RunResponse(goodbye=worker_pb2.Goodbye(reason="BORED", message="enough"))
    async with connected(saying(said)) as handle:
        await handle.open()
        error = await error_of(anext(handle.results()))

    assert type(error) is WorkerLost


async def test_a_worker_that_fails_is_lost_and_asking_again_gives_the_same_answer() -> None:
    async with connected(saying(InvariantBroken("row 3"))) as handle:
        await handle.open()
        first, second = await error_of(anext(handle.results())), await error_of(anext(handle.results()))

    assert isinstance(first, WorkerLost)
    assert second is first


async def test_who_stops_waiting_for_a_result_does_not_break_the_stream() -> None:
    async def answer_when_asked(requests: Requests) -> Responses:
        await anext(requests)
        yield READY
        async for request in requests:
            yield result(request.plan.seq)

    async with connected(answer_when_asked) as handle:
        await handle.open()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(handle.results()), timeout=0.001)
        handle.submit(StepPlan(seq=1, chunks=(Chunk(Row(0), 1),)))

        assert await anext(handle.results()) == StepResult(seq=1)


async def test_plans_carry_the_epoch_of_ready_and_arrive_in_order() -> None:
    arrived: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    async def note(requests: Requests) -> Responses:
        await anext(requests)
        yield READY
        async for request in requests:
            arrived.put_nowait((request.plan.seq, request.plan.epoch))

    async with connected(note) as handle:
        await handle.open()
        for seq in (1, 2, 3):
            handle.submit(StepPlan(seq=seq))

        assert [await arrived.get() for _ in range(3)] == [(1, 3), (2, 3), (3, 3)]


def test_a_plan_that_admits_256_requests_of_the_largest_kind_is_no_larger_than_a_message_may_be() -> None:
    texts = ("!" * 1020,) * (AdmissionConfig().max_grammar_bytes // 1024)  # each "!" becomes seven letters of a grammar
    sampling = SamplingParams(
        extra_args={"numbers": [0] * 32_000},  # 64 KiB of JSON
        stop=("\U0001f600" * 256,) * 16,
        structured_output=StructuredOutput(choice=texts),
        grammar=grammar_text("choice", json.dumps(texts)),
    )
    admission = Admission(
        row=Row(0),
        request_id=RequestId("a"),
        token_ids=(TokenId(1),) * 131_072,
        num_prompt_tokens=131_072,
        sampling=sampling,
        block_ids=(BlockId(0),) * 8192,
        num_cached_tokens=131_071,
    )

    num_bytes = encode_plan(StepPlan(seq=1, admitted=(admission,)), EPOCH).ByteSize()

    assert 256 * num_bytes < WorkersConfig().max_message_mib * MIB


async def test_submitting_before_opening_is_a_bug() -> None:
    async with connected(silent) as handle:
        with pytest.raises(InvariantBroken, match="plan 1 was submitted before the worker was opened"):
            handle.submit(StepPlan(seq=1))


async def test_a_closed_handle_has_no_more_results_however_often_it_is_asked() -> None:
    async with connected(saying()) as handle:
        await handle.open()
        await handle.close()
        await handle.close()

        assert [item async for item in handle.results()] == []
        assert [item async for item in handle.results()] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("address", "nowhere"),
        ("owner_id", ""),
        ("max_message_mib", 0),
        ("max_message_mib", 513),
        ("connect_timeout_s", 0.0),
        ("connect_timeout_s", float("nan")),
        ("refresh_s", 0.0),
        ("heartbeat_s", 0.0),
        ("step_timeout_s", -1.0),
        ("drain_s", -1.0),
        ("recovery_timeout_s", float("nan")),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=f"workers.{key} must"):
        WorkersConfig(**{key: value})  # type: ignore[arg-type]  # one name or the other
