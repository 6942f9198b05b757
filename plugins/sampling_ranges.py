"""The ranges of the numbers in SamplingParams, for all who take such numbers from elsewhere.

Callers' numbers are admission's business, a model's own defaults those of its loader. Limits that a worker or an
operator sets are not here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_ABOVE_0: Final = 2.0**-150  # samplers compute with 32 bits, where this and all below it is 0
_MAX_TOLD_BITS: Final = 128  # Python refuses to write integers of more than 4,300 digits


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The values that one number may have: [low, high], or (low, high]. NaN is in none."""

    low: float
    high: float
    rule: str  # the range and what its ends mean, for whoever must correct a value
    is_whole: bool = False
    is_optional: bool = False  # None is a value too
    is_low_open: bool = False

    def fault(self, value: object) -> tuple[str, str] | None:
        """Tell what is wrong with a value, as reason and description; None: nothing is. Raises nothing."""
        if value is None and self.is_optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else int | float):
            kind = "a whole number" if self.is_whole else "a number"
            return "WRONG_TYPE", f"is {told(value)}; must be {kind}{', or left out' if self.is_optional else ''}"
        if (self.low < value if self.is_low_open else self.low <= value) and value <= self.high:
            return None
        return "OUT_OF_RANGE", f"is {told(value)}; {self.rule}"


def told(value: object) -> str:
    """Tell a value in a few words: a number as it is, anything else by its type alone."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return str(int(value)) if value.bit_length() <= _MAX_TOLD_BITS else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return str(float(value))
    return f"of type {type(value).__name__}"


RANGES: Final[Mapping[str, NumberRange]] = {
    "max_tokens": NumberRange(1, math.inf, "must be at least 1, or left out", is_whole=True, is_optional=True),
    "min_tokens": NumberRange(0, math.inf, "must be at least 0", is_whole=True),
    "temperature": NumberRange(0, 100, "must be in [0, 100], 0 is greedy"),  # beyond it all tokens are as likely
    "top_k": NumberRange(0, 2**32 - 1, "must be in [0, 2**32), 0 keeps all tokens", is_whole=True),
    "top_p": NumberRange(_ABOVE_0, 1, "must be in (0, 1], 1 keeps all tokens", is_low_open=True),
    "min_p": NumberRange(0, 1, "must be in [0, 1], 0 keeps all tokens"),
    "presence_penalty": NumberRange(-2, 2, "must be in [-2, 2], 0 changes nothing"),
    "frequency_penalty": NumberRange(-2, 2, "must be in [-2, 2], 0 changes nothing"),
    "repetition_penalty": NumberRange(_ABOVE_0, 100, "must be in (0, 100], 1 changes nothing", is_low_open=True),
    "seed": NumberRange(0, 2**64 - 1, "must be in [0, 2**64), or left out", is_whole=True, is_optional=True),
    "stream_interval": NumberRange(1, 1024, "must be in [1, 1024]", is_whole=True),
}
