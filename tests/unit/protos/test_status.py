"""Every error of ours crosses the wire as itself, with its details; a bug crosses it as nothing but INTERNAL."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status import rpc_status

from plugins.errors import (
    Code,
    DeadlineExceeded,
    DetokenizerFailed,
    DuplicateRequest,
    FieldViolation,
    InvalidConfig,
    InvalidRequest,
    InvariantBroken,
    ModelFileBroken,
    NotServing,
    PlanOutOfOrder,
    PluginFailed,
    QueueFull,
    RequestCancelled,
    ServingError,
    StepFailed,
    UnknownModel,
    WorkerLost,
    WorkerOwned,
    WrongProtocol,
)
from protos.channel import bind, channel_options, internal_server_options
from protos.interceptor import ErrorInterceptor
from protos.status import from_rpc_error, to_status

ERRORS = (
    InvalidRequest([FieldViolation("sampling.top_p", "OUT_OF_RANGE", "is 3; must be in (0, 1]")]),
    UnknownModel("a", ["b", "c"]),
    DuplicateRequest("a"),
    QueueFull(10, 10, 0.25),
    NotServing("draining"),
    WorkerLost("killed"),
    DeadlineExceeded("1 s passed"),
    RequestCancelled("by the caller"),
    WorkerOwned("other", 5.0),
    WrongProtocol(2, 1),
    PlanOutOfOrder("plan 3 came after plan 1"),
    PluginFailed("grammar: division by zero"),
    DetokenizerFailed(ValueError("invalid prefix")),
    InvalidConfig("worker.port is 99999"),
    ModelFileBroken("a.gguf: ends early"),
)


@asynccontextmanager
async def serving(
    handler: "grpc.RpcMethodHandler[Any, Any]", max_message_bytes: int = 1_000_000
) -> AsyncIterator[grpc.aio.Channel]:
    """A server with one method, /test.Test/Call, whose messages are bytes."""
    server = grpc.aio.server(options=internal_server_options(max_message_bytes), interceptors=[ErrorInterceptor()])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Test", {"Call": handler})])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            yield channel
    finally:
        await server.stop(None)


def unary(answer: Callable[[], bytes]) -> "grpc.RpcMethodHandler[Any, Any]":
    async def call(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return answer()

    return grpc.unary_unary_rpc_method_handler(call)


def raising(error: Exception) -> "grpc.RpcMethodHandler[Any, Any]":
    def answer() -> bytes:
        raise error

    return unary(answer)


def ask(
    channel: grpc.aio.Channel, request: bytes = b"", method: str = "/test.Test/Call"
) -> "grpc.aio.UnaryUnaryCall[bytes, bytes]":
    callable_: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    return callable_(request)


def listen(channel: grpc.aio.Channel) -> "grpc.aio.UnaryStreamCall[bytes, bytes]":
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/test.Test/Call")
    return method(b"")


async def error_of(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_arrives_with_its_class_code_reason_message_and_delay(error: ServingError) -> None:
    async with serving(raising(error)) as channel:
        arrived = from_rpc_error(await error_of(ask(channel)))

    assert type(arrived) is type(error)
    assert (arrived.code, arrived.reason, str(arrived)) == (error.code, error.reason, str(error))
    assert arrived.retry_after_s == error.retry_after_s


async def test_an_invalid_request_arrives_with_all_its_violations() -> None:
    violations = (
        FieldViolation("sampling.top_p", "OUT_OF_RANGE", "is 3; must be in (0, 1]"),
        FieldViolation("text", "EMPTY", "must not be empty"),
    )
    async with serving(raising(InvalidRequest(violations))) as channel:
        error = await error_of(ask(channel))

    arrived = from_rpc_error(error)
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the error has the methods that it calls
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(arrived, InvalidRequest)
    assert arrived.violations == violations
    assert status is not None
    info, bad_request = ErrorInfo(), BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "dihedral")
    assert status.details[1].Unpack(bad_request)
    assert [violation.field for violation in bad_request.field_violations] == ["sampling.top_p", "text"]


async def test_a_full_queue_tells_when_to_retry_to_people_and_to_grpc_clients() -> None:
    async with serving(raising(QueueFull(10, 10, 0.25))) as channel:
        error = await error_of(ask(channel))

    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the error has the methods that it calls
    retry = RetryInfo()
    assert status is not None
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 250
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "250"


async def test_a_failed_row_keeps_the_reason_that_no_class_has() -> None:
    async with serving(raising(StepFailed("BAD_LOGITS", "row 3: no finite logit"))) as channel:
        arrived = from_rpc_error(await error_of(ask(channel)))

    assert (arrived.code, arrived.reason, str(arrived)) == (Code.INTERNAL, "BAD_LOGITS", "row 3: no finite logit")


@pytest.mark.parametrize("reason", ["GRAMMAR_TOO_COMPLEX", "INVALID_GRAMMAR"])
async def test_a_row_that_failed_of_its_grammar_is_the_callers_fault(reason: str) -> None:
    async with serving(raising(StepFailed(reason, "the grammar leads nowhere"))) as channel:
        arrived = from_rpc_error(await error_of(ask(channel)))

    assert (arrived.code, arrived.reason) == (Code.INVALID_ARGUMENT, reason)


@pytest.mark.parametrize("error", [RuntimeError("secret of a tenant"), InvariantBroken("secret of a tenant")])
async def test_a_bug_is_logged_with_its_traceback_and_answered_without_it(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(raising(error)) as channel:
        answer = await error_of(ask(channel))

    logged = [record for record in caplog.records if record.message == "rpc_failed"]
    assert answer.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(answer.details())
    assert [record.__dict__["method"] for record in logged] == ["/test.Test/Call"]
    assert logged[0].exc_info is not None
    assert logged[0].exc_info[1] is error
    assert logged[0].levelno == logging.ERROR


async def test_a_stream_delivers_what_it_had_before_its_error() -> None:
    async def count(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"1"
        yield b"2"
        raise QueueFull(1, 1, 1.0)

    async with serving(grpc.unary_stream_rpc_method_handler(count)) as channel:
        call = listen(channel)
        received = [await call.read(), await call.read()]
        error = await error_of(call.read())

    assert received == [b"1", b"2"]
    assert type(from_rpc_error(error)) is QueueFull


async def test_streams_in_both_directions_and_plain_coroutines_are_translated_too() -> None:
    async def echo(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            if request == b"bad":
                raise PlanOutOfOrder("bad")
            yield request

    async def collect(requests: AsyncIterator[bytes], context: object) -> bytes:
        raise PlanOutOfOrder(str([request async for request in requests]))

    async with serving(grpc.stream_stream_rpc_method_handler(echo)) as channel:
        both: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/test.Test/Call")()
        await both.write(b"good")
        echoed = await both.read()
        await both.write(b"bad")
        both_error = from_rpc_error(await error_of(both.read()))
    async with serving(grpc.stream_unary_rpc_method_handler(collect)) as channel:
        collecting: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary("/test.Test/Call")
        collected = from_rpc_error(await error_of(collecting(iter([b"a"]))))

    assert (echoed, str(both_error), str(collected)) == (b"good", "bad", "[b'a']")


async def test_a_cancelled_stream_has_run_its_finally_before_the_server_has_stopped() -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    async def hang(request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            yield b"1"
            started.set()
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    async with serving(grpc.unary_stream_rpc_method_handler(hang)) as channel:
        call = listen(channel)
        await call.read()
        await started.wait()
        call.cancel()
        await cleaned.wait()

    assert cleaned.is_set()


async def test_an_abort_that_the_handler_made_itself_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def call(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")

    async with serving(grpc.unary_unary_rpc_method_handler(call)) as channel:
        error = await error_of(ask(channel))

    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "no such thing")
    assert "rpc_failed" not in caplog.text


async def test_a_method_that_does_not_exist_stays_unimplemented() -> None:
    async with serving(unary(lambda: b"")) as channel:
        error = await error_of(ask(channel, method="/test.Test/Other"))

    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert from_rpc_error(error).reason == "UNIMPLEMENTED"


async def test_a_message_above_the_limit_is_told_by_the_transport_and_harms_nobody() -> None:
    async with serving(unary(lambda: b"alive"), max_message_bytes=1000) as channel:
        too_large = from_rpc_error(await error_of(ask(channel, b"x" * 1001)))

        assert (too_large.code, too_large.reason) == (Code.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED")
        assert str(too_large) == "SERVER: Received message larger than max (1001 vs. 1000)"
        assert await ask(channel, b"small") == b"alive"


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, NotServing),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, RequestCancelled),
        (grpc.StatusCode.PERMISSION_DENIED, ServingError),
    ],
)
def test_a_status_that_is_not_ours_becomes_a_fitting_error(code: grpc.StatusCode, cls: type[ServingError]) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="from elsewhere")

    arrived = from_rpc_error(error)

    assert type(arrived) is cls
    assert str(arrived) == "from elsewhere"


def test_a_damaged_status_is_read_by_its_code() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, details="gone")

    assert (type(from_rpc_error(error)), str(from_rpc_error(error))) == (NotServing, "gone")


async def test_an_error_too_long_for_trailers_arrives_cut() -> None:
    violations = [FieldViolation(f"tokens.ids[{i}]", "OUT_OF_RANGE", "é" * 200) for i in range(100)]
    async with serving(raising(InvalidRequest(violations))) as channel:
        arrived = from_rpc_error(await error_of(ask(channel)))

    assert isinstance(arrived, InvalidRequest)
    assert str(arrived).endswith("...")
    assert arrived.violations == tuple(violations[:7])


def test_a_message_that_is_no_text_is_told_with_question_marks() -> None:
    assert to_status(InvalidConfig("no file \udcff.gguf")).message == "no file ?.gguf"
