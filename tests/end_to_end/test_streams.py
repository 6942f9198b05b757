"""Many streams at once over real processes: each ends once, nobody harms a neighbour, and every block comes back."""

import asyncio
import random
from dataclasses import dataclass

import grpc
import pytest

from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from tests.end_to_end.cells import serving
from tests.end_to_end.clients import Client, ask, scrape

MODEL = ("--load-format=dummy", "--worker.dtype=float32", "--worker.threads=1")  # of a length that small pools hold
SMALL_POOL = ("--worker.num-blocks=40", "--worker.max-sequences=16", "--worker.max-step-tokens=64")


@dataclass(frozen=True, slots=True)
class Ended:
    """How one stream ended, as its client saw it."""

    was_cancelled: bool
    num_finals: int
    num_tokens: int
    max_tokens: int


async def stream(client: Client, prompt: list[int], max_tokens: int, cancel_after: int | None) -> Ended:
    """Generate, and drop the call after so many responses."""
    call = client.inference.Generate(ask(prompt, max_tokens))
    num_responses = num_finals = num_tokens = 0
    async for response in call:
        num_responses += 1
        num_tokens += len(response.token_ids)
        num_finals += response.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
        if num_responses == cancel_after and not num_finals:
            call.cancel()
            return Ended(True, num_finals, num_tokens, max_tokens)
    return Ended(False, num_finals, num_tokens, max_tokens)


async def test_64_streams_of_which_a_third_is_cancelled_end_once_and_give_every_block_back() -> None:
    draw = random.Random(1)
    async with serving(*SMALL_POOL, model=MODEL) as (served, client):
        streams = [
            stream(
                client,
                prompt=[draw.randrange(256) for _ in range(draw.randint(1, 200))],
                max_tokens=draw.randint(1, 60),
                cancel_after=draw.randint(1, 20) if number % 3 == 0 else None,
            )
            for number in range(64)
        ]

        ends = await asyncio.gather(*streams)
        [worker] = await client.idle_workers()
        outcomes = await asyncio.to_thread(scrape, served.metrics_url, "dihedral_requests", "outcome")
        preemptions = await asyncio.to_thread(scrape, served.metrics_url, "dihedral_preemptions", "")

    completed = [end for end in ends if not end.was_cancelled]
    assert len(ends) - len(completed) >= 10, "too few streams were cut while they ran"
    assert [end.num_finals for end in completed] == [1] * len(completed)
    assert [end.num_tokens for end in completed] == [end.max_tokens for end in completed]
    assert [end.num_finals for end in ends if end.was_cancelled] == [0] * (64 - len(completed))
    assert sum(outcomes.values()) == 64
    assert set(outcomes) <= {"length", "cancelled"}
    assert sum(preemptions.values()) > 0, "the pool was not tight enough to show anything"
    assert worker.num_free_blocks == worker.num_blocks == 40


async def test_bad_requests_are_told_why_and_a_neighbour_answers_as_if_alone() -> None:
    async with serving("--worker.num-blocks=32", model=MODEL) as (_, client):
        alone = await client.answer(ask([1, 2, 3], 60))
        neighbour = asyncio.create_task(client.answer(ask([1, 2, 3], 60)))

        codes = {}
        for name, request in bad_requests().items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in client.inference.Generate(request):
                    pass
            codes[name] = (caught.value.code(), caught.value.details() or "")
        beside = await neighbour
        [worker] = await client.idle_workers()

    refused = grpc.StatusCode.INVALID_ARGUMENT
    expected = {
        "empty prompt": (refused, "text"),
        "no input": (refused, "input"),
        "prompt too long": (refused, "tokens.ids"),
        "token out of vocabulary": (refused, "tokens.ids"),
        "no tokens wanted": (refused, "sampling.max_tokens"),
        "unknown model": (grpc.StatusCode.NOT_FOUND, "served: dummy"),
        "50 MB": (grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    }
    assert {name: code for name, (code, _) in codes.items()} == {name: code for name, (code, _) in expected.items()}
    for name, (_, part) in expected.items():
        assert part in codes[name][1], f"{name}: {codes[name][1]}"
    assert beside == alone
    assert worker.num_free_blocks == worker.num_blocks


def bad_requests() -> dict[str, inference_pb2.GenerateRequest]:
    return {
        "empty prompt": inference_pb2.GenerateRequest(text=""),
        "no input": inference_pb2.GenerateRequest(),
        "prompt too long": ask([1] * 3000, 1),
        "token out of vocabulary": ask([1, 999_999], 4),
        "no tokens wanted": ask([1], 0),
        "unknown model": inference_pb2.GenerateRequest(model="nobody", text="hello"),
        "50 MB": inference_pb2.GenerateRequest(text="x" * 50_000_000),
    }
