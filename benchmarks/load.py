"""Sends requests in a closed loop over gRPC and measures what a client sees.

Speaks to whatever serves `InferenceService`; what is sent comes from `benchmarks/prompts.py`, and who else used
the machine meanwhile is told by `benchmarks/machine.py`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import grpc
import numpy as np

from benchmarks.workloads import Workload
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from protos.inference.v1.inference_pb2_grpc import InferenceServiceStub

Clock = Callable[[], float]  # seconds, never backwards

REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request brought, by the client's clock in seconds."""

    start_s: float
    piece_s: tuple[float, ...] = ()  # when each response with tokens came
    num_prompt_tokens: int = 0  # as the server counted them
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # as they arrived
    error: str | None = None  # a failed request is a result too


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run of one workload. Latencies are in milliseconds, None where nothing was measured."""

    requests: int
    errors: int
    error_samples: tuple[str, ...]
    wrong_prompt_lengths: int
    wrong_output_lengths: int
    wall_s: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens_per_s: float
    tokens_per_response: float | None
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    itl_ms_p50: float | None  # between responses that carry tokens
    itl_ms_p99: float | None


class Client:
    """A client of one server. Used by one event loop."""

    def __init__(self, channel: grpc.aio.Channel, clock: Clock) -> None:
        self._stub = InferenceServiceStub(channel)
        self._clock = clock

    async def tokenize(self, text: str) -> Sequence[int]:
        """Turn text into token ids, as the server would."""
        return (await self._stub.Tokenize(inference_pb2.TokenizeRequest(text=text))).token_ids

    async def generate(self, prompt: str | Sequence[int], num_output_tokens: int) -> Answer:
        """Ask for so many greedy tokens. Never raises for what the server does: that is in the answer."""
        request = inference_pb2.GenerateRequest(
            sampling=common_pb2.SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.ids.extend(prompt)
        start_s, piece_s, num_output_tokens = self._clock(), list[float](), 0
        usage = inference_pb2.Usage()
        try:
            async for response in self._stub.Generate(request, timeout=REQUEST_TIMEOUT_S):
                if response.token_ids:
                    piece_s.append(self._clock())
                    num_output_tokens += len(response.token_ids)
                if response.HasField("usage"):
                    usage = response.usage
        except grpc.aio.AioRpcError as error:
            return Answer(start_s, error=f"{error.code().name}: {error.details()}")
        return Answer(start_s, tuple(piece_s), usage.prompt_tokens, usage.cached_tokens, num_output_tokens)


async def closed_loop(
    send: Callable[[int], Awaitable[Answer]], num_requests: int, num_clients: int, on_answer: Callable[[], None]
) -> list[Answer]:
    """Keep `num_clients` requests in flight until `num_requests` have ended; `send` gets each index once."""
    indices = iter(range(num_requests))
    answers: list[Answer] = []

    async def client() -> None:
        for index in indices:
            answers.append(await send(index))
            on_answer()

    await asyncio.gather(*(client() for _ in range(min(num_clients, num_requests))))
    return answers


def num_requests_for(workload: Workload, wave_s: float, run_s: float) -> int:
    """How many requests make a run of about `run_s`, in whole waves, if one wave of all clients takes `wave_s`."""
    return workload.num_clients * max(workload.min_waves, math.ceil(run_s / wave_s))


def summarise(answers: Sequence[Answer], workload: Workload, wall_s: float) -> Figures:
    """Reduce the answers of one run. Failed requests count as errors and nowhere else."""
    good = [answer for answer in answers if answer.error is None]
    errors = [answer.error for answer in answers if answer.error is not None]
    ttft_s = [answer.piece_s[0] - answer.start_s for answer in good if answer.piece_s]
    gaps_s = [later - earlier for answer in good for earlier, later in pairwise(answer.piece_s)]
    num_output = sum(answer.num_output_tokens for answer in good)
    num_pieces = sum(len(answer.piece_s) for answer in good)
    return Figures(
        requests=len(answers),
        errors=len(errors),
        error_samples=tuple(sorted(set(errors)))[:3],
        wrong_prompt_lengths=sum(answer.num_prompt_tokens != workload.num_prompt_tokens for answer in good),
        wrong_output_lengths=sum(answer.num_output_tokens != workload.num_output_tokens for answer in good),
        wall_s=round(wall_s, 3),
        output_tokens=num_output,
        prompt_tokens=sum(answer.num_prompt_tokens for answer in good),
        cached_tokens=sum(answer.num_cached_tokens for answer in good),
        output_tokens_per_s=round(num_output / wall_s, 2),
        tokens_per_response=round(num_output / num_pieces, 3) if num_pieces else None,
        ttft_ms_p50=percentile_ms(ttft_s, 50),
        ttft_ms_p99=percentile_ms(ttft_s, 99),
        itl_ms_p50=percentile_ms(gaps_s, 50),
        itl_ms_p99=percentile_ms(gaps_s, 99),
    )


def percentile_ms(times_s: Sequence[float], percent: float) -> float | None:
    """Return the percentile in milliseconds, between neighbours where it falls between them; None of nothing."""
    return round(float(np.percentile(times_s, percent)) * 1000, 3) if times_s else None
