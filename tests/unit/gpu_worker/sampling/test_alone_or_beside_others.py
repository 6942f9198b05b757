"""A request's token and log-probabilities are the same alone and in any crowd, bit for bit, whatever anybody asks."""

from collections.abc import Iterator

import numpy as np
import pytest

from plugins.types import LogprobsMode
from tests.unit.gpu_worker.sampling.crowd import Sampling, draw_crowd

NUM_ROWS = 32


@pytest.fixture(scope="module")
def sampling() -> Iterator[Sampling]:
    made = Sampling(NUM_ROWS)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_request_gets_the_same_beside_31_others_as_alone(sampling: Sampling, seed: int) -> None:
    crowd = draw_crowd(seed, NUM_ROWS)
    order = np.random.default_rng(seed).permutation(NUM_ROWS).tolist()

    together = sampling.answer(dict(zip(order, crowd, strict=True)))
    alone = [answer for each in crowd for answer in sampling.answer({seed: each})]

    assert together == alone


def test_such_crowds_ask_for_everything_and_are_answered(sampling: Sampling) -> None:
    """Else equality would say little."""
    crowds = [draw_crowd(seed, NUM_ROWS) for seed in range(4)]
    asked = [each.sampling for crowd in crowds for each in crowd]

    answers = [answer for crowd in crowds for answer in sampling.answer(dict(enumerate(crowd)))]

    assert sum(bool(each.grammar) for each in asked) >= 15
    assert sum("watermark" in each.extra_args for each in asked) >= 15
    assert sum(answer.logprobs is not None for answer in answers) >= 60
    assert {each.logprobs_mode for each in asked if each.logprob_token_ids} == {
        LogprobsMode.RAW,
        LogprobsMode.PROCESSED,
    }
    assert len({answer.token_id for answer in answers if answer.token_id >= 0}) >= 60
    assert [answer.failure for answer in answers if answer.failure is not None] == []
