"""The whole way from scores to a token in plain numpy and float64, one row at a time, with nothing clever."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plugins.types import SamplingParams

Floats = npt.NDArray[np.float64]


def reference_scores(
    scores: Floats, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, eos: Sequence[int]
) -> Floats:
    """What all stages before the temperature make of one row."""
    scores = np.array(scores, dtype=np.float64)
    if params.allowed_token_ids:
        kept = {allowed: scores[allowed] for allowed in params.allowed_token_ids}
        scores[:] = -np.inf
        for allowed, score in kept.items():
            scores[allowed] = score
    for biased, bias in params.logit_bias.items():
        scores[biased] += bias
    if len(output) < params.min_tokens:
        ends: set[int] = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
        without = scores.copy()
        for token in ends:
            without[token] = -np.inf
        if without.max() > -np.inf:
            scores = without
    for token in set(prompt) | set(output):
        scores[token] = (
            scores[token] / params.repetition_penalty
            if scores[token] > 0
            else (scores[token] * params.repetition_penalty)
        )
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count
        scores[token] -= params.presence_penalty
    for word in params.bad_word_ids:
        *others, last = word
        if not others or list(output[-len(others) :]) == others:
            scores[last] = -np.inf
    return scores


def reference_probabilities(scores: Floats, params: SamplingParams) -> tuple[npt.NDArray[np.int64], Floats]:
    """The tokens in the order in which they are drawn, and their chances, which sum to 1."""
    ranked = np.lexsort((np.arange(len(scores)), -scores))
    if params.temperature == 0:
        return ranked[:1], np.ones(1)
    weights = np.exp((scores - scores.max()) / params.temperature)
    weights[weights < params.min_p * weights.max()] = 0.0
    has_top_k = 0 < params.top_k < len(scores)
    order = ranked if has_top_k or params.top_p < 1 else np.arange(len(scores))
    weights = weights[order]
    if has_top_k:
        weights[params.top_k :] = 0.0
    if params.top_p < 1:
        total, mass = weights.sum(), 0.0
        for place, weight in enumerate(weights):
            if mass >= params.top_p * total:
                weights[place:] = 0.0
                break
            mass += weight
    return order, weights / weights.sum()


def reference_token(scores: Floats, params: SamplingParams, noise: float) -> int:
    """The token whose share of the chances holds the noise."""
    order, chances = reference_probabilities(scores, params)
    mass = 0.0
    for token, chance in zip(order, chances, strict=True):
        mass += chance
        if mass > noise:
            return int(token)
    raise ValueError(f"chances of {mass} do not hold {noise}")
