"""Many streams at once over real processes: each ends once, nobody harms a neighbour, and every block comes back."""

import asyncio
import random
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.channel import MIB, channel_options
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.end_to_end.processes import FREE_PORTS, Dihedral, dihedral

TINY = ("--load-format=dummy", "--worker.dtype=float32", "--worker.threads=1")
SMALL_POOL = ("--worker.num-blocks=40", "--worker.max-sequences=16", "--worker.max-step-tokens=64")


@dataclass(frozen=True, slots=True)
class Ended:
    """How one stream ended, as its client saw it."""

    was_cancelled: bool
    num_finals: int
    num_tokens: int
    max_tokens: int


class Client:
    """A raw client of one server."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=channel_options(64 * MIB))
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    async def stream(self, prompt: list[int], max_tokens: int, cancel_after: int | None = None) -> Ended:
        """Generate, and drop the call after so many responses."""
        call = self.inference.Generate(generate(prompt, max_tokens))
        num_responses = num_finals = num_tokens = 0
        async for response in call:
            num_responses += 1
            num_tokens += len(response.token_ids)
            num_finals += response.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
            if num_responses == cancel_after and not num_finals:
                call.cancel()
                return Ended(True, num_finals, num_tokens, max_tokens)
        return Ended(False, num_finals, num_tokens, max_tokens)

    async def tokens(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Generate greedily, and return all token ids."""
        return [
            token_id
            async for response in self.inference.Generate(generate(prompt, max_tokens))
            for token_id in response.token_ids
        ]

    async def worker_when_idle(self) -> admin_pb2.Worker:
        """Wait until the server holds no request, and describe its worker."""
        async with asyncio.timeout(30):
            while True:
                info = await self.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
                if info.num_running == info.num_waiting == 0:
                    workers = await self.admin.ListWorkers(admin_pb2.ListWorkersRequest())
                    return workers.workers[0]
                await asyncio.sleep(0.02)


def generate(prompt: list[int], max_tokens: int) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=prompt), sampling=sampling)


@asynccontextmanager
async def serving(*words: str) -> AsyncIterator[tuple[Dihedral, Client]]:
    async with dihedral("serve", *TINY, *FREE_PORTS, *words) as served:
        await served.ready()
        client = Client(served.address)
        try:
            yield served, client
        finally:
            await client.channel.close()


def scrape(url: str, family_name: str) -> dict[str, float]:
    with urllib.request.urlopen(url) as page:
        text = page.read().decode()
    return {
        sample.labels.get("outcome", ""): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == family_name
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_64_streams_of_which_a_third_is_cancelled_end_once_and_give_every_block_back() -> None:
    draw = random.Random(1)
    async with serving(*SMALL_POOL) as (served, client):
        streams = [
            client.stream(
                prompt=[draw.randrange(256) for _ in range(draw.randint(1, 200))],
                max_tokens=draw.randint(1, 60),
                cancel_after=draw.randint(1, 20) if number % 3 == 0 else None,
            )
            for number in range(64)
        ]

        ends = await asyncio.gather(*streams)
        worker = await client.worker_when_idle()
        outcomes = scrape(served.metrics_url, "dihedral_requests")
        preemptions = scrape(served.metrics_url, "dihedral_preemptions")

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
    async with serving("--worker.num-blocks=32") as (_, client):
        alone = await client.tokens([1, 2, 3], 60)
        neighbour = asyncio.create_task(client.tokens([1, 2, 3], 60))

        codes = {}
        for name, request in bad_requests().items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in client.inference.Generate(request):
                    pass
            codes[name] = (caught.value.code(), caught.value.details() or "")
        beside = await neighbour
        worker = await client.worker_when_idle()

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
        "prompt too long": generate([1] * 3000, 1),
        "token out of vocabulary": generate([1, 999_999], 4),
        "no tokens wanted": generate([1], 0),
        "unknown model": inference_pb2.GenerateRequest(model="nobody", text="hello"),
        "50 MB": inference_pb2.GenerateRequest(text="x" * 50_000_000),
    }
