"""Sampling parameters that are each right and cannot be had together.

Looks at parameters that are within their ranges; what depends on the prompt is checked in `validator.py`.
"""

from collections.abc import Collection
from dataclasses import dataclass

from plugins.errors import FieldViolation
from plugins.sampling_ranges import told
from plugins.types import ModelInfo, SamplingParams


@dataclass(frozen=True, slots=True)
class _Conflict:
    """One combination: the field that is told, the others that take part, and why they do not go together."""

    field: str
    others: tuple[str, ...]
    reason: str
    description: str


def conflict_violations(sampling: SamplingParams, model: ModelInfo, wrong: Collection[str]) -> list[FieldViolation]:
    """Tell the combinations that cannot be had. Those that a field in `wrong` takes part in are left out."""
    return [
        FieldViolation(f"sampling.{each.field}", each.reason, each.description)
        for each in _conflicts(sampling, model)
        if not (each.field in wrong or any(other in wrong for other in each.others))
    ]


def _conflicts(sampling: SamplingParams, model: ModelInfo) -> list[_Conflict]:
    found = []
    if sampling.n > 1 and sampling.temperature == 0:
        description = f"is {sampling.n} and the temperature 0: the outputs would be equal; ask for one"
        found.append(_Conflict("n", ("temperature",), "CONFLICT", description))
    max_tokens = sampling.max_tokens
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        description = f"is {told(sampling.min_tokens)}; must be in [0, {max_tokens}], which is max_tokens"
        found.append(_Conflict("min_tokens", ("max_tokens",), "OUT_OF_RANGE", description))
    if sampling.stop and not sampling.detokenize:
        description = "needs text to look into: set detokenize, or give stop_token_ids"
        found.append(_Conflict("stop", ("detokenize",), "CONFLICT", description))
    if sampling.logprob_token_ids and sampling.logprobs is None:
        description = "needs logprobs: set it to any number that is allowed"
        found.append(_Conflict("logprob_token_ids", ("logprobs",), "CONFLICT", description))
    if sampling.structured_output is not None and sampling.ignore_eos:
        description = "ends with an end-of-sequence token, which ignore_eos never takes for an end; leave that out"
        found.append(_Conflict("structured_output", ("ignore_eos",), "CONFLICT", description))
    if sampling.structured_output is not None and sampling.allowed_token_ids:
        description = "and structured_output may leave no token to choose: give one of the two"
        found.append(_Conflict("allowed_token_ids", ("structured_output",), "CONFLICT", description))
    if _may_leave_nothing(sampling, model):
        others = ("bad_words", "min_tokens", "stop_token_ids", "ignore_eos")
        field = "allowed_token_ids" if sampling.allowed_token_ids else "bad_words"
        description = "bad_words, and end tokens before min_tokens, may leave no token to choose; allow others too"
        found.append(_Conflict(field, (*others, "allowed_token_ids"), "CONFLICT", description))
    return found


def _may_leave_nothing(sampling: SamplingParams, model: ModelInfo) -> bool:
    """True unless some token can always be chosen: one that ends no bad word, and that min_tokens does not hold back.

    A bad word of several tokens bans its last one, at the places where the output ends in the others.
    """
    if not sampling.bad_word_ids and not (sampling.min_tokens and sampling.allowed_token_ids):
        return False
    banned = {token_ids[-1] for token_ids in sampling.bad_word_ids}
    if sampling.min_tokens:
        banned.update(sampling.stop_token_ids, () if sampling.ignore_eos else model.eos_token_ids)
    if sampling.allowed_token_ids:
        return banned.issuperset(sampling.allowed_token_ids)
    return len(banned) >= model.vocab_size  # ids within the vocabulary, each once
