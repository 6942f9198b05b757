"""Reads a processor's arguments out of `extra_args`, and says what is wrong with one.

Which arguments there are, and what they mean, is the business of each processor.
"""

from collections.abc import Mapping
from typing import Any


def whole_number(args: Mapping[str, Any], name: str, default: int, lowest: int, highest: int) -> int:
    """Return a whole number in [lowest, highest]. Raises: ValueError."""
    value = args.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise ValueError(f"{name} is {value!r:.100}; it must be a whole number from {lowest} to {highest}")
    return value


def number(args: Mapping[str, Any], name: str, default: float, lowest: float, highest: float) -> float:
    """Return a number in [lowest, highest]. Raises: ValueError."""
    value = args.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not lowest <= value <= highest:
        raise ValueError(f"{name} is {value!r:.100}; it must be a number from {lowest} to {highest}")
    return float(value)


def truth(args: Mapping[str, Any], name: str) -> bool:
    """Return true or false, which is what stands for no argument. Raises: ValueError."""
    value = args.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.100}; it must be true or false")
    return value


def token_ids(args: Mapping[str, Any], name: str, max_tokens: int) -> tuple[int, ...] | None:
    """Return a list of 1 to `max_tokens` token ids; None if it is not given. Raises: ValueError."""
    if name not in args:
        return None
    value = args[name]
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= max_tokens:
        raise ValueError(f"{name} is {value!r:.100}; it must be a list of 1 to {max_tokens} token ids")
    for each in value:
        if not isinstance(each, int) or isinstance(each, bool) or each < 0:
            raise ValueError(f"{name} has {each!r:.100} in it, which is no token id")
    return tuple(value)
