"""The closed loop against a small server, and the arithmetic of its figures."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from benchmarks.load import Answer, Client, closed_loop, num_requests_for, percentile_ms, summarise
from benchmarks.workloads import WORKLOADS, Workload
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from protos.inference.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server

SMALL = Workload("small", 2, 0, 3, 4, "for tests")


class TwoByTwo(InferenceServiceServicer):
    """Answers every prompt with as many tokens as asked for, two in each response; refuses the word `bad`."""

    def __init__(self) -> None:
        self.seen: list[inference_pb2.GenerateRequest] = []

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.seen.append(request)
        if "bad" in request.text:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "1024 requests are waiting")
        yield inference_pb2.GenerateResponse(request_id="r")
        for index in range(0, request.sampling.max_tokens, 2):
            yield inference_pb2.GenerateResponse(token_ids=[index, index + 1])
        num_prompt = len(request.text.split()) or len(request.tokens.ids)
        yield inference_pb2.GenerateResponse(
            finish_reason=common_pb2.FINISH_REASON_LENGTH,
            usage=inference_pb2.Usage(prompt_tokens=num_prompt, output_tokens=request.sampling.max_tokens),
        )

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(token_ids=[len(word) for word in request.text.split()])


class Ticks:
    """A clock that moves one second each time it is read."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += 1.0
        return self._now_s


@pytest.fixture
async def served() -> AsyncIterator[tuple[TwoByTwo, Client]]:
    servicer = TwoByTwo()  # type: ignore[abstract]  # nobody calls the other methods
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, Client(channel, Ticks())
    await server.stop(None)


async def test_an_answer_times_the_responses_that_carry_tokens(served: tuple[TwoByTwo, Client]) -> None:
    servicer, client = served

    answer = await client.generate("one two three", 4)

    assert answer == Answer(1.0, (2.0, 3.0), num_prompt_tokens=3, num_output_tokens=4)
    sampling = servicer.seen[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (4, 0.0, True)


async def test_token_prompts_are_sent_as_tokens(served: tuple[TwoByTwo, Client]) -> None:
    servicer, client = served

    answer = await client.generate([5, 6], 2)

    assert list(servicer.seen[0].tokens.ids) == [5, 6]
    assert answer.num_prompt_tokens == 2


async def test_a_refusal_is_an_answer_with_its_status(served: tuple[TwoByTwo, Client]) -> None:
    _, client = served

    answer = await client.generate("bad", 4)

    assert answer == Answer(1.0, error="RESOURCE_EXHAUSTED: 1024 requests are waiting")


async def test_text_is_tokenized_by_the_server(served: tuple[TwoByTwo, Client]) -> None:
    _, client = served

    assert list(await client.tokenize("a bcd")) == [1, 3]


async def test_the_closed_loop_sends_each_index_once_and_counts_each_answer(served: tuple[TwoByTwo, Client]) -> None:
    _, client = served
    prompts = ["a b c", "a b c", "bad", "a b", "a b c"]
    ticks: list[str] = []

    answers = await closed_loop(
        lambda index: client.generate(prompts[index], 4), 5, SMALL.num_clients, lambda: ticks.append("done")
    )

    figures = summarise(answers, SMALL, wall_s=2.0)
    assert len(ticks) == 5
    assert (figures.requests, figures.errors, figures.wrong_prompt_lengths, figures.wrong_output_lengths) == (
        5,
        1,
        1,
        0,
    )
    assert figures.error_samples == ("RESOURCE_EXHAUSTED: 1024 requests are waiting",)
    assert (figures.output_tokens, figures.prompt_tokens) == (16, 11)
    assert figures.output_tokens_per_s == 8.0
    assert figures.tokens_per_response == 2.0


async def test_the_closed_loop_keeps_its_clients_busy_and_has_no_more_in_flight() -> None:
    in_flight: list[int] = []
    most: list[int] = []

    async def send(index: int) -> Answer:
        in_flight.append(index)
        most.append(len(in_flight))
        await asyncio.sleep(0)
        in_flight.remove(index)
        return Answer(0.0)

    answers = await closed_loop(send, num_requests=20, num_clients=4, on_answer=lambda: None)

    assert len(answers) == 20
    assert max(most) == 4
    assert most.count(4) >= 16


def test_figures_of_two_answers_are_these() -> None:
    answers = [
        Answer(0.0, (0.1, 0.2, 0.4, 0.5), num_prompt_tokens=3, num_cached_tokens=2, num_output_tokens=4),
        Answer(1.0, (1.3, 1.4), num_prompt_tokens=3, num_output_tokens=3),
    ]

    figures = summarise(answers, SMALL, wall_s=2.0)

    assert (figures.ttft_ms_p50, figures.ttft_ms_p99) == (200.0, 298.0)
    assert (figures.itl_ms_p50, figures.itl_ms_p99) == (100.0, 197.0)
    assert figures.wrong_output_lengths == 1
    assert figures.cached_tokens == 2
    assert figures.output_tokens_per_s == 3.5


def test_figures_of_failures_alone_have_no_latencies() -> None:
    figures = summarise([Answer(0.0, error="UNAVAILABLE: gone")], SMALL, wall_s=1.0)

    assert (figures.ttft_ms_p50, figures.itl_ms_p99, figures.tokens_per_response) == (None, None, None)
    assert (figures.errors, figures.output_tokens_per_s) == (1, 0.0)


def test_percentiles_lie_between_neighbours() -> None:
    times_s = [0.004, 0.001, 0.002, 0.003]

    assert percentile_ms(times_s, 50) == 2.5
    assert percentile_ms(times_s, 99) == 3.97
    assert percentile_ms(times_s, 0) == 1.0
    assert percentile_ms([], 50) is None


@pytest.mark.parametrize(
    ("name", "wave_s", "expected"),
    [
        ("W1", 3.0, 4),  # 10 s / 3 s, rounded up
        ("W2", 3.0, 32),
        ("W2", 60.0, 16),  # never fewer than two waves
        ("W4", 60.0, 48),  # six where a prefix may be found
    ],
)
def test_a_run_is_as_many_whole_waves_as_fill_its_time(name: str, wave_s: float, expected: int) -> None:
    assert num_requests_for(WORKLOADS[name], wave_s, run_s=10.0) == expected


def test_the_workloads_are_the_five_that_peers_were_measured_with() -> None:
    shapes = {
        name: (each.num_clients, each.num_prefix_tokens, each.num_distinct_tokens, each.num_output_tokens)
        for name, each in WORKLOADS.items()
    }

    assert shapes == {
        "W1": (1, 0, 128, 128),
        "W2": (8, 0, 128, 128),
        "W3": (32, 0, 128, 128),
        "W4": (8, 512, 32, 64),
        "W5": (1, 0, 1024, 16),
    }
