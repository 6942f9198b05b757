"""Tells marked text from other text, with the key it was marked with. Needs the standard library only.

Kirchenbauer et al. 2023, arXiv 2301.10226, section 3; marking is the business of `watermark.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, sqrt

from plugins.builtin.green_list import is_green, key_of, threshold_of


@dataclass(frozen=True, slots=True)
class Detection:
    """How green a text is."""

    num_scored: int  # different pairs of neighbours
    num_green: int  # those of them whose second token is green after the first
    z_score: float  # standard deviations above what unmarked text has; 0 for a text without pairs
    p_value: float  # how likely unmarked text is at least as green, by the normal approximation


def detect(token_ids: Sequence[int], key: str, gamma: float, vocab_size: int) -> Detection:
    """Count green tokens. `gamma` is what the text was marked with.

    Each pair of neighbours counts once, however often the text says it: a text that repeats itself says nothing new.
    Raises: ValueError: gamma is not within (0, 1), or a token not within [0, vocab_size).
    """
    if not 0 < gamma < 1:
        raise ValueError(f"gamma is {gamma}; it must be above 0 and below 1")
    for each in token_ids:
        if not 0 <= each < vocab_size:
            raise ValueError(f"token {each} is not within [0, {vocab_size})")
    words, threshold = key_of(key), threshold_of(gamma)
    pairs = set(zip(token_ids, token_ids[1:], strict=False))
    num_green = sum(is_green(words, previous, token_id, threshold) for previous, token_id in pairs)
    if not pairs:
        return Detection(0, 0, 0.0, 0.5)
    z_score = (num_green - gamma * len(pairs)) / sqrt(len(pairs) * gamma * (1 - gamma))
    return Detection(len(pairs), num_green, z_score, erfc(z_score / sqrt(2)) / 2)
