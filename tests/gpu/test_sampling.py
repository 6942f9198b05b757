"""Stages, grammars, processors, draw and log-probabilities on a GPU tell what they tell on the CPU.

Sums of probabilities round otherwise there, so that a token may differ where the noise falls between two.
"""

import pytest

from plugins.types import TokenLogprobs
from tests.unit.gpu_worker.sampling.crowd import Asking, Sampling, draw_crowd

pytestmark = pytest.mark.gpu

NUM_ROWS = 32
NUM_CROWDS = 8
TOLERANCE = 1e-4  # of a log-probability in float32
MAX_OTHER = 3  # of 256 tokens


def test_a_crowd_gets_the_same_on_both_devices() -> None:
    on_cpu, on_gpu = Sampling(NUM_ROWS), Sampling(NUM_ROWS, "cuda")

    others = []
    for seed in range(NUM_CROWDS):
        crowd = dict(enumerate(draw_crowd(seed, NUM_ROWS)))
        for asking, here, there in zip(crowd.values(), on_cpu.answer(crowd), on_gpu.answer(crowd), strict=True):
            assert there.failure == here.failure
            assert (there.token_id < 0) == (here.token_id < 0)
            if there.token_id != here.token_id:
                others.append(asking)
            elif here.token_id >= 0 and here.logprobs is not None:
                assert there.logprobs is not None
                assert_close(here.logprobs, there.logprobs)

    assert [asking for asking in others if asking.sampling.temperature == 0] == []
    assert len(others) <= MAX_OTHER


def test_on_a_gpu_too_a_request_gets_the_same_in_any_row() -> None:
    sampling = Sampling(NUM_ROWS, "cuda")
    crowd: list[Asking] = draw_crowd(1, NUM_ROWS)

    forwards = sampling.answer(dict(enumerate(crowd)))
    backwards = sampling.answer({NUM_ROWS - 1 - row: asking for row, asking in enumerate(crowd)})

    assert [answer.token_id for answer in backwards] == [answer.token_id for answer in forwards]


def assert_close(here: TokenLogprobs, there: TokenLogprobs) -> None:
    assert there.token_ids == here.token_ids
    assert there.ranks == here.ranks
    assert there.logprobs == pytest.approx(here.logprobs, abs=TOLERANCE)
