"""What is told of the real model's prompt and output does not depend on how the prompt was cut into chunks."""

import math
from collections.abc import Sequence

import pytest

from control_plane.engine.completions import Completion
from control_plane.engine.local import LocalEngine
from control_plane.scheduling.config import SchedulerConfig
from plugins.types import SamplingParams, TokenId, TokenLogprobs

PROMPT = [TokenId(token_id * 37 % 40_000 + 20) for token_id in range(100)]
ASKED = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=5, prompt_logprobs=2)


def complete(chunk: int) -> Completion:
    scheduler = SchedulerConfig(max_chunk_tokens=chunk, max_step_tokens=128, max_sequences=4)
    with LocalEngine(scheduler=scheduler, dtype="float32", threads=1, max_model_len=128, max_sequences=4) as engine:
        (completion,) = engine.generate([PROMPT], ASKED)
    return completion


@pytest.fixture(scope="module")
def whole() -> Completion:
    """The prompt in one chunk."""
    return complete(101)


def check(places: Sequence[TokenLogprobs], num_likeliest: int) -> None:
    """Each tells of the token itself and of the likeliest, in order, with values that can be right."""
    for place in places:
        assert len(place.token_ids) == len(place.logprobs) == len(place.ranks) == 1 + num_likeliest
        assert place.ranks[1:] == tuple(range(1, 1 + num_likeliest))
        assert list(place.logprobs[1:]) == sorted(place.logprobs[1:], reverse=True)
        assert sum(math.exp(value) for value in place.logprobs[1:]) <= 1.0 + 1e-6


def test_every_place_is_told_once(whole: Completion) -> None:
    """B068: 100 tokens of prompt, of which the first has nothing before it."""
    assert [place.token_ids[0] for place in whole.prompt_logprobs] == PROMPT[1:]
    assert [place.token_ids[0] for place in whole.logprobs] == list(whole.token_ids)
    assert len(whole.token_ids) == 4
    check(whole.prompt_logprobs, 2)
    check(whole.logprobs, 5)


@pytest.mark.parametrize("chunk", [7, 99, *(pytest.param(chunk, marks=pytest.mark.long) for chunk in (16, 100))])
def test_chunks_change_no_value(whole: Completion, chunk: int) -> None:
    """B068: in float32 not even the last bit, where 1e-4 would do."""
    chunked = complete(chunk)

    assert chunked.prompt_logprobs == whole.prompt_logprobs
    assert chunked.logprobs == whole.logprobs
    assert chunked.token_ids == whole.token_ids
