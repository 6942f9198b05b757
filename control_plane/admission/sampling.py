"""The ranges of sampling parameters.

What depends on the length of the prompt is checked in `validator.py`.
"""

from collections.abc import Sequence

from plugins.errors import FieldViolation
from plugins.types import SamplingParams

MAX_TEMPERATURE = 100.0  # far beyond it every token is as likely as any other
MAX_STOP_TOKEN_IDS = 64


def sampling_violations(sampling: SamplingParams, vocab_size: int) -> list[FieldViolation]:
    """Tell what is out of range. Comparisons are written so that NaN fails them."""
    violations = []

    def check(is_right: bool, field: str, description: str) -> None:
        if not is_right:
            violations.append(FieldViolation(f"sampling.{field}", "OUT_OF_RANGE", description))

    max_tokens = sampling.max_tokens
    check(max_tokens is None or max_tokens >= 1, "max_tokens", f"is {max_tokens}; must be at least 1, or left out")
    check(
        0 <= sampling.temperature <= MAX_TEMPERATURE,
        "temperature",
        f"is {sampling.temperature}; must be in [0, {MAX_TEMPERATURE:g}], 0 is greedy",
    )
    check(sampling.top_k >= 0, "top_k", f"is {sampling.top_k}; must be at least 0, 0 keeps all tokens")
    check(0 < sampling.top_p <= 1, "top_p", f"is {sampling.top_p}; must be in (0, 1], 1 keeps all tokens")
    check(0 <= sampling.min_p <= 1, "min_p", f"is {sampling.min_p}; must be in [0, 1], 0 keeps all tokens")
    seed = sampling.seed
    check(seed is None or 0 <= seed < 2**64, "seed", f"is {seed}; must be in [0, 2**64), or left out")
    num_stops = len(sampling.stop_token_ids)
    are_few = num_stops <= MAX_STOP_TOKEN_IDS
    check(are_few, "stop_token_ids", f"has {num_stops} tokens; at most {MAX_STOP_TOKEN_IDS} are allowed")
    if are_few:  # else there may be millions to look at
        violations += token_id_violations("sampling.stop_token_ids", sampling.stop_token_ids, vocab_size)
    return violations


def token_id_violations(field: str, token_ids: Sequence[int], vocab_size: int) -> list[FieldViolation]:
    """Name the first token that the vocabulary does not have."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            description = f"token {token_id} at index {index} is not in the vocabulary, [0, {vocab_size})"
            return [FieldViolation(field, "TOKEN_OUT_OF_VOCABULARY", description)]
    return []
