"""A logits processor that goes wrong in the middle of an output, in real processes: that request ends, and no other."""

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from plugins.errors import Code
from protos.inference.v1.inference_pb2 import GenerateRequest
from protos.status import from_rpc_error
from tests.architecture.sources import ROOT
from tests.end_to_end.cells import serving
from tests.end_to_end.clients import Client, ask

PROMPT = [1, 2, 3]


@pytest.fixture(autouse=True)
def plugged_in() -> Iterator[None]:
    """The processes of these tests find the processor beside this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests/contract"))
        yield


def asking(max_tokens: int = 8, **extra_args: Any) -> GenerateRequest:
    request = ask(PROMPT, max_tokens)
    request.sampling.extra_args.update(extra_args)
    return request


async def read(client: Client, request: GenerateRequest) -> tuple[list[int], tuple[int, str, str] | None]:
    """The tokens that come, and code, reason and message of the error behind them."""
    token_ids: list[int] = []
    try:
        async for response in client.inference.Generate(request):
            token_ids += response.token_ids
    except grpc.aio.AioRpcError as caught:
        error = from_rpc_error(caught)
        return token_ids, (error.code, error.reason, str(error))
    return token_ids, None


async def test_what_it_raises_at_any_token_ends_that_request_with_the_tokens_before_it() -> None:
    """B083: at token 0 and at token 3."""
    failure = (
        Code.INTERNAL,
        "PLUGIN_FAILED",
        "logits processor tardy (tardy:Tardy) failed in apply: LookupError: no such table",
    )
    async with serving("--plugins.logits-processors=tardy:Tardy") as (_, client):
        golden, _ = await read(client, asking())
        neighbour = asyncio.create_task(read(client, asking(400)))

        found = [await read(client, asking(at=at)) for at in (0, 3)]
        told, error = await neighbour
        [worker] = await client.idle_workers()

    assert found == [([], failure), (golden[:3], failure)]
    assert (len(told), told[:8], error) == (400, golden, None)
    assert worker.num_free_blocks == worker.num_blocks


@pytest.mark.long
async def test_one_that_sleeps_is_bounded_by_the_time_of_a_step_and_its_neighbour_gets_all_its_tokens() -> None:
    """B083: the worker counts as lost twice, both times with this request, which is not tried again then."""
    words = ("--plugins.logits-processors=tardy:Tardy", "--workers.step-timeout-s=1")
    async with serving(*words) as (_, client):
        golden, _ = await read(client, asking(400))
        neighbour = asyncio.create_task(read(client, asking(400)))

        slept, error = await read(client, asking(at=3, sleep_s=4))
        told, _ = await neighbour
        again, _ = await read(client, asking(400))

    assert slept == golden[:3]
    assert error is not None
    assert error[:2] == (Code.INTERNAL, "QUERY_OF_DEATH")
    assert told == again == golden
