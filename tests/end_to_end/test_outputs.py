"""Several outputs, stops, log-probabilities and prompts over gRPC, from a real worker with a tiny model."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from plugins.noise import child_seed
from protos.common.v1 import common_pb2
from protos.inference.v1.inference_pb2 import (
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    TokenIds,
    TokenizeRequest,
)
from protos.inference.v1.inference_pb2_grpc import InferenceServiceStub
from tests.end_to_end.cells import serving
from tests.end_to_end.clients import Client, outcomes

if TYPE_CHECKING:
    from protos.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub  # there is no such class

MODEL = ("--load-format=dummy", "--dtype=float32", "--max-model-len=1024", "--worker.kv-cache-gib=0.05")
TINY = (*MODEL, "--worker.threads=1")
PROMPT = [7, 20, 33, 90, 120]
MAX_GROWTH_KIB = 200 * 1024


def asked(prompt: Sequence[int] = PROMPT, *, echo: bool = False, **sampling: Any) -> GenerateRequest:
    parameters = common_pb2.SamplingParams(**{"ignore_eos": True, "max_tokens": 16, "seed": 9} | sampling)
    return GenerateRequest(tokens=TokenIds(ids=prompt), sampling=parameters, echo=echo)


async def responses(client: Client, request: GenerateRequest) -> list[GenerateResponse]:
    return [response async for response in client.inference.Generate(request)]


def tokens_of(answer: Sequence[GenerateResponse], index: int = 0) -> list[int]:
    return [token_id for response in answer if response.index == index for token_id in response.token_ids]


def text_of(answer: Sequence[GenerateResponse], index: int = 0) -> str:
    return "".join(response.text for response in answer if response.index == index)


def peak_kib(pid: int) -> int:
    """The most memory that a process ever held."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1])


@asynccontextmanager
async def ordinary_channel(address: str) -> "AsyncIterator[InferenceServiceAsyncStub]":
    """A channel as gRPC makes it: it takes no message above 4 MiB."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield InferenceServiceStub(channel)


async def test_n_outputs_are_those_of_n_requests_and_end_together_with_their_call() -> None:
    """Case B046: four outputs that end at different times, and four whose caller goes away."""
    async with serving(model=TINY) as (server, client):
        alone = [await responses(client, asked(seed=child_seed(9, index))) for index in range(4)]
        together = await responses(client, asked(n=4))

        assert [tokens_of(together, index) for index in range(4)] == [tokens_of(answer) for answer in alone]
        assert [text_of(together, index) for index in range(4)] == [text_of(answer) for answer in alone]
        assert [bool(response.request_id) for response in together] == [True] + [False] * (len(together) - 1)
        assert (together[-1].usage.prompt_tokens, together[-1].usage.output_tokens) == (5, 64)

        stop = tokens_of(alone[1])[2]  # of one output; the others have it elsewhere or never
        uneven = await responses(client, asked(n=4, stop_token_ids=[stop]))
        assert tokens_of(uneven, 1) == tokens_of(alone[1])[:3]
        assert sorted(response.index for response in uneven if response.finish_reason) == [0, 1, 2, 3]
        assert [response.HasField("usage") for response in uneven] == [False] * (len(uneven) - 1) + [True]

        call = client.inference.Generate(asked(n=4, max_tokens=900))
        for _ in range(10):
            await call.read()
        call.cancel()
        await client.holds(num_running=0, num_waiting=0)

        (worker,) = await client.idle_workers()
        assert worker.num_free_blocks == worker.num_blocks
        assert (await asyncio.to_thread(outcomes, server.metrics_url))["cancelled"] == 1


async def test_text_ends_before_a_stop_string_and_messages_have_the_tokens_that_were_asked_for() -> None:
    """Case B032: no part of a stop string is sent, with the tokens of a real model."""
    async with serving(model=TINY) as (_, client):
        letters = await client.inference.Tokenize(TokenizeRequest(text="abcdefghijklmnopqrstuvwxyz"))
        fields: dict[str, Any] = {"allowed_token_ids": letters.token_ids, "max_tokens": 60}
        whole = await responses(client, asked(**fields))
        text = text_of(whole)
        stop = text[29:33]

        cut = await responses(client, asked(**fields, stop=[stop]))
        kept = await responses(client, asked(**fields, stop=[stop], include_stop_str_in_output=True))
        paced = await responses(client, asked(**fields, stop=["never"], stream_interval=25))

        assert len(text) == 60
        assert text_of(cut) == text[: text.index(stop)]
        assert text_of(kept) == text[: text.index(stop) + 4]
        assert tokens_of(cut) == tokens_of(whole)[: text.index(stop) + 4]
        assert (cut[-1].stop_string, cut[-1].usage.output_tokens) == (stop, text.index(stop) + 4)
        assert text_of(paced) == text
        assert all(len(response.token_ids) >= 25 for response in paced[:-1])

        (worker,) = await client.idle_workers()
        assert worker.num_running == 0


async def test_a_prompt_is_told_with_its_text_and_its_log_probabilities() -> None:
    async with serving("--scheduler.max-step-tokens=64", model=TINY) as (_, client):
        prompt = [token_id % 200 + 3 for token_id in range(150)]
        decoded = await client.inference.Detokenize(DetokenizeRequest(token_ids=prompt))

        chunked, again = [
            await responses(client, asked(prompt, echo=True, prompt_logprobs=2, logprobs=2)) for _ in range(2)
        ]

        parts = [response.prompt for response in chunked if response.HasField("prompt")]
        places = [place for part in parts for place in part.logprobs]
        assert [token_id for part in parts for token_id in part.token_ids] == prompt
        assert "".join(part.text for part in parts) == decoded.text
        assert [place.token_ids[0] for place in places] == prompt[1:]
        assert places == [place for response in again for place in response.prompt.logprobs]
        told = [place for response in chunked for place in response.logprobs]
        assert [place.token_ids[0] for place in told] == tokens_of(chunked)
        assert all(place.token_ids[place.ranks[0]] == place.token_ids[0] for place in told if place.ranks[0] <= 2)


async def test_the_most_that_may_be_told_comes_in_small_messages_and_little_memory() -> None:
    """Case B021: 500 tokens of prompt and 400 of output with the most log-probabilities that may be asked for."""
    prompt = [token_id % 200 + 3 for token_id in range(500)]
    async with serving(model=TINY) as (server, client):
        await responses(client, asked(prompt, max_tokens=400))
        pids = (server.process.pid, server.worker_pid())
        before = [peak_kib(pid) for pid in pids]

        async with ordinary_channel(server.address) as inference:
            request = asked(prompt, max_tokens=400, prompt_logprobs=20, logprobs=20, stream_interval=400)
            answer = [response async for response in inference.Generate(request)]

        growth = sum(peak_kib(pid) for pid in pids) - sum(before)
        assert sum(len(response.prompt.logprobs) for response in answer) == 499
        assert sum(len(response.logprobs) for response in answer) == 400
        assert max(len(response.logprobs) for response in answer) == 256
        assert max(response.ByteSize() for response in answer) < 200_000
        assert growth < MAX_GROWTH_KIB
