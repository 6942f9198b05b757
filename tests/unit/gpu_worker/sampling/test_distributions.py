"""100,000 draws with fixed seeds follow the distribution that the parameters describe: Pearson's chi-square test.

The limits are its 0.999 quantiles: a right sampler is below them with 999 of 1,000 choices of seeds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.sampling.sampler import SamplingInputs, sample
from tests.unit.gpu_worker.sampling.tables import Tables, apply, take

NUM_DRAWS = 100_000
LIMITS = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}  # by degrees of freedom
EIGHT = (0.3, 0.2, 0.15, 0.12, 0.1, 0.06, 0.04, 0.03)


def draw(logits: Sequence[float], *, seeds: Any = None, positions: Any = 10, **parameters: float) -> list[int]:
    """How often each token came. Every draw has another seed, unless the test says otherwise."""
    shared = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | parameters
    inputs = SamplingInputs(
        temperature=torch.full((NUM_DRAWS,), float(shared["temperature"])),
        top_k=torch.full((NUM_DRAWS,), int(shared["top_k"])),
        top_p=torch.full((NUM_DRAWS,), float(shared["top_p"])),
        min_p=torch.full((NUM_DRAWS,), float(shared["min_p"])),
        seeds=np.broadcast_to(np.arange(NUM_DRAWS) if seeds is None else seeds, NUM_DRAWS).astype(np.uint64),
        positions=np.broadcast_to(positions, NUM_DRAWS).astype(np.int64),
    )
    tokens = sample(torch.tensor(logits).expand(NUM_DRAWS, len(logits)), inputs)
    return [int(count) for count in np.bincount(tokens.numpy(), minlength=len(logits))]


def check(counts: Sequence[int], weights: Sequence[float]) -> None:
    """The counts are those of the weights, which need not sum to 1; tokens of weight 0 never come."""
    expected = np.array(weights) / sum(weights) * NUM_DRAWS
    possible = expected > 0
    assert np.array(counts)[~possible].sum() == 0
    statistic = ((np.array(counts) - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < LIMITS[int(possible.sum()) - 1]


def test_many_seeds() -> None:
    check(draw(np.log(EIGHT).tolist()), EIGHT)


def test_many_positions_of_one_seed() -> None:
    check(draw(np.log(EIGHT).tolist(), seeds=99, positions=np.arange(NUM_DRAWS)), EIGHT)


def test_a_temperature_of_a_half_squares_the_probabilities() -> None:
    check(draw(np.log(EIGHT).tolist(), temperature=0.5), (0.09, 0.04, 0.0225, 0.0144, 0.01, 0.0036, 0.0016, 0.0009))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_top_k(temperature: float) -> None:
    weights = (0.3, 0.2, 0.15) if temperature == 1 else (0.09, 0.04, 0.0225)

    check(draw(np.log(EIGHT).tolist(), top_k=3, temperature=temperature), (*weights, 0, 0, 0, 0, 0))


def test_top_p() -> None:
    check(draw(np.log(EIGHT).tolist(), top_p=0.76), (0.3, 0.2, 0.15, 0.12, 0, 0, 0, 0))


def test_top_p_after_top_k() -> None:
    """Of 0.77, which top-k leaves, 0.65 is 0.84."""
    check(draw(np.log(EIGHT).tolist(), top_k=4, top_p=0.84), (0.3, 0.2, 0.15, 0, 0, 0, 0, 0))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_min_p(temperature: float) -> None:
    """0.3 of 0.3 is 0.09; with the temperature 0.3 of 0.09 is 0.027."""
    weights = (0.3, 0.2, 0.15, 0.12, 0.1) if temperature == 1 else (0.09, 0.04, 0, 0, 0)

    check(draw(np.log(EIGHT).tolist(), min_p=0.3, temperature=temperature), (*weights, 0, 0, 0))


def test_min_p_before_top_p() -> None:
    """min_p leaves 0.65 of tokens 0 to 2; 0.7 of that are tokens 0 and 1."""
    check(draw(np.log(EIGHT).tolist(), min_p=0.45, top_p=0.7), (0.3, 0.2, 0, 0, 0, 0, 0, 0))


def test_penalties() -> None:
    """Scores are 2, 1, 0, -1, 1, 0, 0, 0; the prompt has tokens 0 and 3, the output twice 1 and once 2."""
    tables = Tables(vocab_size=8)
    tables.put(0, (0, 3), (1, 2, 1))
    stages = tables.stages()
    take(stages, 0, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=-0.5)
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.0, 0.0, 0.0, 0.0]])

    counts = draw(apply(stages, scores, tables.context(0))[0].tolist())

    check(counts, np.exp([1.0, 0.5 - 0.5 + 0.5, -0.25 + 0.5, -2.0, 1.0, 0.0, 0.0, 0.0]).tolist())


def test_a_bias_and_a_bad_word_together_with_top_p() -> None:
    tables = Tables(vocab_size=8)
    tables.put(0, (0, 3))
    stages = tables.stages()
    take(stages, 0, logit_bias={7: float(np.log(10))}, bad_word_ids=((0,),))
    scores = torch.tensor([np.log(EIGHT).tolist()])

    counts = draw(apply(stages, scores, tables.context(0))[0].tolist(), top_p=0.6)

    check(counts, (0, 0.2, 0.15, 0, 0, 0, 0, 0.3))
