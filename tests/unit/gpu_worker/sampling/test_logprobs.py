"""What is told of chosen tokens: the values, the ranks, and of whom."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.sampling.logprobs import Logprobs, tell
from gpu_worker.sampling.sampler import SamplingInputs, kept_logprobs, sample
from plugins.types import LogprobsMode, SamplingParams, TokenLogprobs
from tests.unit.gpu_worker.sampling.reference import reference_probabilities
from tests.unit.gpu_worker.sampling.test_against_reference import sampling_inputs
from tests.unit.gpu_worker.tiny import admission

INF = float("inf")
CHANCES = torch.tensor([[0.125, 0.5, 0.125, 0.25]])
LN_2 = 0.6931471805599453


def told(
    raw: Tensor, processed: Tensor | None = None, tokens: Sequence[int] = (1,), **sampling: Any
) -> dict[int, TokenLogprobs]:
    """What row 5, and nobody else, is told; the stages made `processed` of its scores."""
    logprobs = Logprobs()
    given = {"temperature": 1.0, "logprobs": 2} | sampling
    logprobs.admit(admission(5, (1,), **given))
    asked = logprobs.look(raw, np.array([5]))
    assert asked is not None
    logits = raw if processed is None else processed
    inputs = sampling_inputs([SamplingParams(**given)], [1])
    return tell(asked, logits, inputs, torch.tensor(tokens)).read()


def check(
    entry: TokenLogprobs, token_ids: tuple[int, ...], logprobs: tuple[float, ...], ranks: tuple[int, ...]
) -> None:
    assert entry.token_ids == token_ids
    assert entry.logprobs == pytest.approx(logprobs, abs=1e-6)
    assert entry.ranks == ranks


def test_the_token_comes_first_and_then_the_likeliest_with_the_lower_id_first_among_equals() -> None:
    result = told(CHANCES.log(), tokens=(2,), logprobs=3)

    check(result[0], (2, 1, 3, 0), (-3 * LN_2, -LN_2, -2 * LN_2, -3 * LN_2), (4, 1, 2, 3))


def test_none_besides_the_token_may_be_asked_for() -> None:
    result = told(CHANCES.log(), tokens=(3,), logprobs=0)

    check(result[0], (3,), (-2 * LN_2,), (2,))


def test_a_vocabulary_smaller_than_what_is_asked_for_is_told_whole() -> None:
    result = told(CHANCES.log(), tokens=(3,), logprobs=20)

    assert result[0].token_ids == (3, 1, 3, 0, 2)


def test_named_tokens_are_told_in_their_order_instead_of_the_likeliest() -> None:
    result = told(CHANCES.log(), tokens=(1,), logprob_token_ids=(0, 3, 2, 1))

    check(result[0], (1, 0, 3, 2, 1), (-LN_2, -3 * LN_2, -2 * LN_2, -3 * LN_2, -LN_2), (1, 3, 2, 4, 1))


def test_raw_ones_are_the_models_whatever_the_stages_and_the_temperature_do() -> None:
    raw = CHANCES.log()

    result = told(raw, raw.flip(1) * 7, tokens=(0,), temperature=0.1, top_k=1)

    check(result[0], (0, 1, 3), (-3 * LN_2, -LN_2, -2 * LN_2), (3, 1, 2))


def test_processed_ones_are_those_that_the_token_was_drawn_from() -> None:
    result = told(
        torch.zeros(1, 4), CHANCES.log(), temperature=0.5, logprobs=4, logprobs_mode=LogprobsMode.PROCESSED, top_k=2
    )

    squares = (0.25, 0.0625)
    total = sum(squares)
    check(
        result[0],
        (1, 1, 3, 0, 2),
        (float(np.log(0.25 / total)), float(np.log(0.25 / total)), float(np.log(0.0625 / total)), -INF, -INF),
        (1, 1, 2, 3, 4),
    )


def test_a_greedy_row_is_told_of_its_processed_scores_without_temperature_and_uncut() -> None:
    result = told(
        torch.zeros(1, 4), CHANCES.log(), temperature=0.0, logprobs=4, logprobs_mode=LogprobsMode.PROCESSED, top_k=1
    )

    check(result[0], (1, 1, 3, 0, 2), (-LN_2, -LN_2, -2 * LN_2, -3 * LN_2, -3 * LN_2), (1, 1, 2, 3, 4))


def test_scores_that_differ_by_less_than_their_logarithms_show_keep_their_ranks() -> None:
    logits = torch.tensor([[100.0, 100.00001, -100.0, 50.0]])

    result = told(logits, tokens=(1,), logprobs=1)

    assert (result[0].token_ids, result[0].ranks) == ((1, 1), (1, 1))


def test_negative_zero_ranks_as_zero() -> None:
    result = told(torch.tensor([[-1.0, -0.0, 0.0, -0.0]]), tokens=(3,), logprobs=3)

    assert (result[0].token_ids, result[0].ranks) == ((3, 1, 2, 3), (3, 1, 2, 3))


def test_only_rows_that_ask_are_told_each_as_many_as_it_wants() -> None:
    logprobs = Logprobs()
    logprobs.admit(admission(0, (1,)))
    logprobs.admit(admission(1, (1,), logprobs=1))
    logprobs.admit(admission(2, (1,), logprobs=3, logprobs_mode=LogprobsMode.PROCESSED))
    logprobs.admit(admission(3, (1,), logprobs=0))
    logits = CHANCES.log().expand(4, 4).contiguous()
    inputs = sampling_inputs([SamplingParams(temperature=0.0)] * 4, [1] * 4)

    asked = logprobs.look(logits, np.array([3, 2, 0, 1]))

    assert asked is not None
    result = tell(asked, logits, inputs, torch.tensor([1, 1, 1, 3])).read()
    assert {place: entry.token_ids for place, entry in result.items()} == {0: (1,), 1: (1, 1, 3, 0), 3: (3, 1)}


def test_a_batch_of_which_nobody_asks_has_nothing_to_tell() -> None:
    logprobs = Logprobs()
    logprobs.admit(admission(1, (1,), logprobs=1))
    logprobs.admit(admission(2, (1,), logprobs=1))
    logprobs.admit(admission(3, (1,), logprobs=1))
    logprobs.admit(admission(2, (1,)))
    logprobs.release([admission(3, (1,)).row])

    assert logprobs.look(torch.zeros(2, 4), np.array([2, 3])) is None
    logprobs.clear()
    assert logprobs.look(torch.zeros(1, 4), np.array([1])) is None


@pytest.mark.parametrize("seed", range(8))
def test_kept_logprobs_are_the_logarithms_of_what_a_plain_reference_draws_from(seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.3, 1.0, 2.5])),
            top_k=int(rng.choice([0, 1, 5, 300])),
            top_p=float(rng.choice([1.0, 0.9, 0.3])),
            min_p=float(rng.choice([0.0, 0.0, 0.1])),
        )
        for _ in range(40)
    ]
    logits = torch.from_numpy(rng.normal(size=(40, 100)) * 3).float()

    kept = kept_logprobs(logits, sampling_inputs(params, [1] * 40)).numpy()

    for row, each in enumerate(params):
        order, chances = reference_probabilities(logits[row].numpy().astype(np.float64), each)
        expected = np.zeros(100)
        expected[order] = chances
        assert np.exp(kept[row].astype(np.float64)) == pytest.approx(expected, abs=2e-6)
        assert (np.isneginf(kept[row]) == (expected == 0)).all()


def test_every_token_that_is_drawn_has_a_chance_that_is_told() -> None:
    logits = torch.randn(400, 3000, generator=torch.Generator().manual_seed(3)) * 0.3
    params = [SamplingParams(top_p=0.95, seed=row) for row in range(400)]  # more tokens than are ranked at first
    inputs: SamplingInputs = sampling_inputs(params, [1] * 400)

    tokens = sample(logits, inputs)

    assert not kept_logprobs(logits, inputs).gather(1, tokens.unsqueeze(1)).isinf().any()
