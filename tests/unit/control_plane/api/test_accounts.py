"""Priority, tenant, salt and names of requests, as clients give them."""

import asyncio

import grpc
import pytest

from control_plane.admission.config import AdmissionConfig
from plugins.errors import InvalidRequest, QueuedTooLong
from plugins.types import FinishReason, RequestId
from protos.inference.v1.inference_pb2 import CancelRequest, GenerateRequest, GenerateResponse
from protos.status import from_rpc_error
from tests.unit.control_plane.api.running import Running, running
from tests.unit.control_plane.text.byte_level import merged

HELLO, PARIS = merged("hello"), merged(" Paris")
Metadata = tuple[tuple[str, str | bytes], ...]


async def generate(run: Running, metadata: Metadata = (), **fields: str | int) -> list[GenerateResponse]:
    run.engine.answer = [([HELLO], FinishReason.LENGTH, None)]
    request = GenerateRequest(text="hello", **fields)  # type: ignore[arg-type]  # names of fields of those types
    return [response async for response in run.inference.Generate(request, metadata=metadata)]


async def start(run: Running, name: str) -> "asyncio.Task[list[str]]":
    """A request of this name that is admitted and has no output yet; the texts it gets."""

    async def read() -> list[str]:
        call = run.inference.Generate(GenerateRequest(text="hello", request_id=name))
        return [response.text async for response in call]

    run.engine.answer = ()
    run.engine.submitted.clear()
    task = asyncio.create_task(read())
    await run.engine.submitted.wait()
    return task


async def code_of(task: "asyncio.Task[list[str]]") -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await task
    return raised.value.code()


async def test_the_engine_gets_priority_salt_and_the_generation_that_admission_looked_at() -> None:
    async with running() as run:
        await generate(run, priority=-5, cache_salt="pinch")

        request = run.engine.requests[RequestId("drawn")]
        assert (request.priority, request.cache_salt, request.tenant) == (-5, "pinch", "")
        assert run.engine.generations == ["small-1"]


@pytest.mark.parametrize(
    ("key", "metadata", "tenant"),
    [
        ("dihedral-tenant", (("dihedral-tenant", "red"), ("other", "blue")), "red"),
        ("x-team", (("dihedral-tenant", "red"), ("x-team", "blue")), "blue"),
        ("x-team", (("x-team", "a"), ("x-team", "b")), "a,b"),
        ("x-team-bin", (("x-team-bin", b"red"),), "red"),
    ],
)
async def test_the_tenant_is_what_the_configured_metadata_key_says(key: str, metadata: Metadata, tenant: str) -> None:
    async with running(admission=AdmissionConfig(tenant_key=key)) as run:
        await generate(run, metadata)

        assert run.engine.requests[RequestId("drawn")].tenant == tenant


async def test_a_wrong_tenant_is_refused_under_the_name_of_its_key() -> None:
    async with running() as run:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(run, (("dihedral-tenant", "t" * 129),))

        error = from_rpc_error(raised.value)
        assert isinstance(error, InvalidRequest)
        assert [(each.field, each.reason) for each in error.violations] == [("metadata.dihedral-tenant", "TOO_LONG")]


async def test_the_usage_tells_how_much_of_the_prompt_needed_no_computing() -> None:
    async with running() as run:
        run.engine.num_cached_tokens = 48

        (response,) = await generate(run)

        assert response.usage.cached_tokens == 48


async def test_a_second_request_of_a_name_in_use_is_refused_and_the_first_goes_on() -> None:
    """Case B051: at the same instant, and later while the first is alive."""
    async with running() as run:
        first = await start(run, "a")
        twins = [
            asyncio.create_task(read_one(run.inference.Generate(GenerateRequest(text="hello", request_id="a"))))
            for _ in range(2)
        ]
        refused = [await code_of(twin) for twin in twins]
        run.engine.put("a", (PARIS,), FinishReason.LENGTH)

        assert refused == [grpc.StatusCode.ALREADY_EXISTS] * 2
        assert await first == [" Paris"]
        assert run.engine.cancelled == []


async def read_one(call: "grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]") -> list[str]:
    return [response.text async for response in call]


async def test_a_name_may_be_used_again_once_its_request_has_ended() -> None:
    """Case B051: after the first finished, and after the first was cancelled."""
    async with running() as run:
        (finished,) = await generate(run, request_id="a")
        (again,) = await generate(run, request_id="a")
        cancelled = await start(run, "a")
        await run.inference.Cancel(CancelRequest(request_ids=["a"]))
        code = await code_of(cancelled)
        (last,) = await generate(run, request_id="a")

        assert [finished.text, again.text, last.text] == ["hello"] * 3
        assert code is grpc.StatusCode.CANCELLED


async def test_cancelling_finished_unknown_empty_and_partial_names_hits_nobody() -> None:
    """Case B043: a cancel races the end of its request."""
    async with running() as run:
        await generate(run, request_id="done")
        live = await start(run, "abcdef")

        for _ in range(2):
            await run.inference.Cancel(CancelRequest(request_ids=["done", "nobody", "", "abc", "abcdefg", "ABCDEF"]))
        run.engine.put("abcdef", (PARIS,), FinishReason.LENGTH)

        assert await live == [" Paris"]
        assert await run.metrics.outcomes(2) == ["length", "length"]


async def test_a_cancel_beside_the_last_token_leaves_one_end() -> None:
    """Case B043: before and after the end is recorded."""
    async with running() as run:
        before, after = await start(run, "before"), await start(run, "after")

        run.engine.put("after", (PARIS,), FinishReason.LENGTH)
        await run.inference.Cancel(CancelRequest(request_ids=["before", "after"]))

        assert await code_of(before) is grpc.StatusCode.CANCELLED
        assert await after == [" Paris"]
        assert sorted(await run.metrics.outcomes(2)) == ["cancelled", "length"]


async def test_what_the_engine_calls_a_further_output_is_no_name_that_a_caller_can_cancel() -> None:
    async with running() as run:
        await run.inference.Cancel(CancelRequest(request_ids=["a·1", "b"]))

        assert run.engine.cancelled == ["b"]


async def test_a_thousand_names_may_be_cancelled_at_once_and_no_more() -> None:
    async with running() as run:
        await run.inference.Cancel(CancelRequest(request_ids=["a"] * 1000))

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await run.inference.Cancel(CancelRequest(request_ids=["b"] * 1001))

        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert raised.value.details() == (
            "request_ids: has 1001 ids; at most 1000 are allowed, send the others in further calls"
        )
        assert set(run.engine.cancelled) == {"a"}


async def test_a_request_that_waited_too_long_ends_with_a_status_and_a_time_to_retry() -> None:
    """Case B053: never OK without a finish_reason."""
    async with running() as run:
        queued = await start(run, "queued")
        run.engine.put("queued", (), FinishReason.FAILED, QueuedTooLong(1.0, 2.5))

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await queued

        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(raised.value)
        assert isinstance(error, QueuedTooLong)
        assert error.retry_after_s == 2.5
        assert ("grpc-retry-pushback-ms", "2500") in tuple(raised.value.trailing_metadata() or ())
