"""A client that does not read loses its call, and holds nothing but its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.api.reader_watch import ReaderWatch
from plugins.errors import ReaderTooSlow
from plugins.types import FinishReason
from protos.inference.v1 import inference_pb2_grpc
from protos.inference.v1.inference_pb2 import GenerateRequest, GenerateResponse
from protos.status import from_rpc_error
from tests.unit.control_plane.api.running import Running, running
from tests.unit.control_plane.text.byte_level import merged

Call: TypeAlias = "grpc.aio.UnaryStreamCall[Any, Any]"

HELLO = merged("hello")
MUCH = (HELLO,) * 20_000  # a message of 140 kB; the transport takes one or two for a client that does not read
SHORT = AdmissionConfig(max_unread_s=0.2)
FIXED_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))  # else it grows to many megabytes


@contextlib.asynccontextmanager
async def stuck(run: Running) -> AsyncIterator[Call]:
    """A call of the name "stuck" whose client has not taken what is there, so that a response waits to be written."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{run.port}", options=FIXED_WINDOW) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            GenerateRequest(text="hello", request_id="stuck")
        )
        await run.engine.submitted.wait()
        for _ in range(8):
            run.engine.put("stuck", MUCH)
            await asyncio.sleep(0.001)
        run.engine.submitted.clear()
        yield call


async def test_a_stuck_reader_is_ended_after_the_limit_and_its_request_is_cancelled() -> None:
    async with running(admission=SHORT) as run, stuck(run):
        await run.engine.cancel_seen.wait()

        assert run.engine.cancelled == ["stuck"]
        assert await run.metrics.outcomes() == ["resource_exhausted"]


async def test_a_stuck_reader_that_reads_on_finds_out_why_it_was_ended() -> None:
    async with running(admission=SHORT) as run, stuck(run) as call:
        await run.engine.cancel_seen.wait()

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while True:
                await call.read()

        assert isinstance(from_rpc_error(raised.value), ReaderTooSlow)
        assert raised.value.details() == "nobody read the output for 0.2 s (admission.max_unread_s); read faster"


async def test_a_stuck_reader_delays_nobody_else() -> None:
    async with running() as run, stuck(run):
        other = run.inference.Generate(GenerateRequest(text="hello", request_id="other"))
        await run.engine.submitted.wait()
        run.engine.put("other", (HELLO,), FinishReason.LENGTH)

        assert [response.text async for response in other] == ["hello"]


async def test_a_slow_reader_that_reads_within_the_limit_keeps_its_call() -> None:
    async with running(admission=AdmissionConfig(max_unread_s=0.5)) as run:
        call = run.inference.Generate(GenerateRequest(text="hello", request_id="slow"))
        await run.engine.submitted.wait()
        for _ in range(4):
            run.engine.put("slow", (HELLO,))
            await asyncio.sleep(0.2)
            await call.read()
        run.engine.put("slow", (), FinishReason.LENGTH)

        last = await call.read()

        assert isinstance(last, GenerateResponse)
        assert last.usage.output_tokens == 4
        assert run.engine.cancelled == []


class StuckTransport:
    """A context whose writes never return."""

    async def send_initial_metadata(self, metadata: object) -> None:
        return None

    async def write(self, response: object) -> None:
        await asyncio.Event().wait()


async def test_a_task_whose_last_message_is_not_taken_ends_too() -> None:
    """gRPC sends the status from the call's own task, after the handler is through."""

    async def call() -> None:
        async with ReaderWatch(StuckTransport(), max_unread_s=0.05):  # type: ignore[arg-type]  # never written to
            pass
        await asyncio.Event().wait()  # the status, behind what was not read

    task = asyncio.create_task(call())

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_task_that_cannot_even_send_why_it_ends_ends_a_second_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.api.reader_watch.LAST_WORDS_S", 0.05)
    seen: list[Exception] = []

    async def call() -> None:
        try:
            async with ReaderWatch(StuckTransport(), max_unread_s=0.05) as watch:  # type: ignore[arg-type]  # only writes
                await watch.write("much")
        except ReaderTooSlow as error:
            seen.append(error)
            await asyncio.Event().wait()  # as `abort` does behind what was not read

    task = asyncio.create_task(call())

    with pytest.raises(asyncio.CancelledError):
        await task
    assert [str(error) for error in seen] == ["nobody read the output for 0.05 s (admission.max_unread_s); read faster"]


async def test_a_call_that_is_over_leaves_no_timer_behind() -> None:
    async def call() -> None:
        async with ReaderWatch(StuckTransport(), max_unread_s=0.01):  # type: ignore[arg-type]  # never written to
            pass

    task = asyncio.create_task(call())
    await task
    await asyncio.sleep(0.05)

    assert not task.cancelled()
