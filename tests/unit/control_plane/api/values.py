"""Kinds of values that a field may be given, and which of them its rules let pass.

Values are those that a protobuf client would set; `every_field.py` says which field has which rules.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

NOBODY: Final = (("NaN", math.nan), ("+inf", math.inf), ("-inf", -math.inf))  # numbers that nobody may give
_ENDS: Final = ("limit-1", "limit", "limit+1", "huge")
_NUMBERS: Final = ("unset", "zero", "negative", *_ENDS, "NaN", "+inf", "-inf")
KINDS: Final[Mapping[str, frozenset[str]]] = {  # what must be tried, by the kind of a field
    "whole": frozenset(_NUMBERS),
    "real": frozenset(_NUMBERS),
    "switch": frozenset({"unset", "zero", "limit", "wrong type"}),
    "text": frozenset({"unset", "empty", "NUL", "huge"}),
    "texts": frozenset({"unset", "empty", "NUL", *_ENDS}),
    "wholes": frozenset({"unset", "empty", *_NUMBERS}),
    "map": frozenset({"unset", "empty", *_NUMBERS}),
    "json": frozenset({"unset", "empty", "zero", "negative", "huge", "NaN", "+inf", "-inf", "NUL", "wrong type"}),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One value of a field, and what becomes of it. A value of None: the field is not set."""

    kind: str
    value: Any
    reason: str | None = None  # of the refusal; None: it is served
    field: str | None = None  # that the refusal names, if not the field's own path
    is_unsendable: bool = False


def fine(kind: str, value: Any) -> Case:
    return Case(kind, value)


def bad(kind: str, value: Any, reason: str, field: str | None = None) -> Case:
    return Case(kind, value, reason, field)


def unsendable(kind: str, value: Any) -> Case:
    return Case(kind, value, is_unsendable=True)


def wholes(low: int, high: int | None, num_bits: int = 32) -> list[Case]:
    """An unsigned number in [low, high]; `high` None: as large as it can be written."""
    largest = 2**num_bits - 1
    most = largest if high is None else high
    above = unsendable("limit+1", most + 1) if most == largest else bad("limit+1", most + 1, "OUT_OF_RANGE")
    return [
        fine("zero", 0) if low == 0 else bad("zero", 0, "OUT_OF_RANGE"),
        fine("limit", low),
        fine("limit-1", most - 1),
        fine("limit", most),
        above,
        fine("huge", largest) if most == largest else bad("huge", largest, "OUT_OF_RANGE"),
        unsendable("huge", largest + 1),
        unsendable("negative", -1),
        *(unsendable(kind, value) for kind, value in NOBODY),
        unsendable("wrong type", "1"),
    ]


def reals(low: float, high: float, is_low_open: bool = False) -> list[Case]:
    """A 32-bit float in [low, high], or (low, high]."""
    is_zero_in = low < 0 or not is_low_open
    smallest = 2.0**-149  # that is not 0
    return [
        fine("zero", 0.0) if is_zero_in else bad("zero", 0.0, "OUT_OF_RANGE"),
        fine("negative", low) if low < 0 else bad("negative", -smallest, "OUT_OF_RANGE"),
        bad("negative", low - 1e-6 * max(1, abs(low)), "OUT_OF_RANGE"),
        fine("limit-1", smallest),
        fine("limit-1", _float32(high, -1)),
        fine("limit", high),
        bad("limit+1", _float32(high, 1), "OUT_OF_RANGE"),
        bad("huge", 3e38, "OUT_OF_RANGE"),
        bad("negative", -3e38, "OUT_OF_RANGE"),
        *(bad(kind, value, "OUT_OF_RANGE") for kind, value in NOBODY),
        unsendable("wrong type", "1"),
    ]


def switches() -> list[Case]:
    return [fine("zero", False), fine("limit", True), unsendable("wrong type", "true")]


def texts(max_characters: int, refused: Mapping[str, str] | None = None) -> list[Case]:
    """A text of at most so many characters, which may be empty; `refused` are reasons by kind."""
    reasons = refused or {}
    return [
        fine("empty", ""),
        Case("NUL", "a\x00", reasons.get("NUL")),
        fine("limit-1", "x" * (max_characters - 1)),
        fine("limit", "x" * max_characters),
        bad("limit+1", "x" * (max_characters + 1), "TOO_LONG"),
        bad("huge", "x" * 20_000, "TOO_LONG"),
        unsendable("wrong type", "\ud800"),
        unsendable("wrong type", 5),
    ]


def words(max_words: int, max_characters: int, beyond: int | None = None) -> list[Case]:
    """A list of texts, none of them empty; `beyond` are too many of them, if not one more."""
    several = [f"{number:03}" for number in range(20_000)]
    return [
        fine("empty", []),
        bad("empty", [""], "EMPTY"),
        bad("empty", ["a", ""], "EMPTY"),
        fine("NUL", ["\x00"]),
        fine("limit-1", several[: max_words - 1]),
        fine("limit", several[:max_words]),
        bad("limit+1", several[: beyond or max_words + 1], "TOO_MANY"),
        bad("huge", several, "TOO_MANY"),
        fine("limit", ["x" * max_characters]),
        bad("limit+1", ["x" * (max_characters + 1)], "TOO_LONG"),
        bad("huge", ["x" * 100_000], "TOO_LONG"),
        unsendable("wrong type", ["\ud800"]),
        unsendable("wrong type", [5]),
    ]


def token_lists(max_tokens: int, vocab_size: int) -> list[Case]:
    """A list of tokens, which may be empty."""
    return [
        fine("empty", []),
        fine("zero", [0]),
        fine("limit-1", [vocab_size - 2]),
        fine("limit", [vocab_size - 1]),
        bad("limit+1", [vocab_size], "TOKEN_OUT_OF_VOCABULARY"),
        bad("huge", [2**32 - 1], "TOKEN_OUT_OF_VOCABULARY"),
        fine("limit-1", [3] * (max_tokens - 1)),
        fine("limit", [3] * max_tokens),
        bad("limit+1", [3] * (max_tokens + 1), "TOO_MANY"),
        bad("huge", [3] * 100_000, "TOO_MANY"),
        unsendable("negative", [-1]),
        *(unsendable(kind, [value]) for kind, value in NOBODY),
    ]


def biases(max_tokens: int, vocab_size: int) -> list[Case]:
    """A map from tokens to numbers in [-100, 100]. Cases of a vocabulary that is smaller than the map are left out."""
    return [
        fine("empty", {}),
        fine("zero", {0: 0.0}),
        bad("negative", {-1: 5.0}, "TOKEN_OUT_OF_VOCABULARY"),
        fine("limit-1", {vocab_size - 2: 5.0}),
        fine("limit", {vocab_size - 1: 5.0}),
        bad("limit+1", {vocab_size: 5.0}, "TOKEN_OUT_OF_VOCABULARY"),
        bad("huge", {2**31 - 1: 1.0}, "TOKEN_OUT_OF_VOCABULARY"),
        unsendable("huge", {2**31: 1.0}),
        fine("limit", {3: 100.0, 4: -100.0}),
        bad("limit+1", {3: _float32(100, 1)}, "OUT_OF_RANGE"),
        bad("negative", {3: _float32(-100, 1)}, "OUT_OF_RANGE"),
        bad("huge", {3: 3e38}, "OUT_OF_RANGE"),
        *(bad(kind, {3: value}, "OUT_OF_RANGE") for kind, value in NOBODY),
        bad("limit+1", dict.fromkeys(range(max_tokens + 1), 1.0), "TOO_MANY"),
        unsendable("wrong type", {"3": 1.0}),
        unsendable("wrong type", {3: "1"}),
    ]


def extra_args() -> list[Case]:
    """Arguments where no processor reads any: those that are JSON are known to nobody."""
    path = "sampling.extra_args"
    unknown = "UNKNOWN_ARGUMENT"
    return [
        fine("empty", {}),
        bad("zero", {"a": 0}, unknown, f"{path}.a"),
        bad("negative", {"a": -1}, unknown, f"{path}.a"),
        bad("huge", {"a": 1e300}, unknown, f"{path}.a"),
        *(bad(kind, {"a": value}, "OUT_OF_RANGE", f"{path}.a") for kind, value in NOBODY),
        *(bad("wrong type", {"a": value}, unknown, f"{path}.a") for value in (None, True, "1", [1], {"b": 1})),
        bad("NUL", {"a": "\x00"}, unknown, f"{path}.a"),
        bad("NUL", {"\x00": 1}, unknown, f"{path}.\x00"),
        bad("empty", {"": 1}, "EMPTY"),
        bad("limit", {"a": _nested(15)}, unknown, f"{path}.a"),
        bad("limit+1", {"a": _nested(16)}, "TOO_DEEP", f"{path}.a"),
        bad("limit", {"a": "x" * (64 * 1024 - 8)}, unknown, f"{path}.a"),
        bad("limit+1", {"a": "x" * (64 * 1024 - 7)}, "TOO_LONG"),
        bad("limit+1", {f"a{number}": 1 for number in range(129)}, "TOO_MANY"),
        bad("limit+1", {"x" * 129: 1}, "TOO_LONG"),
        bad("huge", {"a": "x" * 1_000_000}, "TOO_LONG"),
        unsendable("wrong type", {"a": {1, 2}}),
        unsendable("wrong type", {5: 1}),
    ]


def json_cases(field: str, is_list: bool) -> list[Case]:
    """JSON objects for a template that looks at none of them, or one such object."""

    def value(inner: object) -> object:
        return [{"a": inner}] if is_list else {"a": inner}

    return [
        fine("empty", [{}] if is_list else {}),
        *(
            fine(kind, value(inner))
            for kind, inner in (("zero", 0), ("negative", -1), ("huge", 1e300), ("NUL", "\x00"))
        ),
        *(bad(kind, value(inner), "OUT_OF_RANGE", field) for kind, inner in NOBODY),
        bad("huge", value(_nested(16)), "TOO_DEEP", field),
        unsendable("wrong type", value({1, 2})),
    ]


def _nested(depth: int) -> Sequence[Any]:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value  # type: ignore[no-any-return]  # depth >= 1


def _float32(value: float, step: int) -> float:
    """The nearest 32-bit float that is further from 0, or nearer to it."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<i", bits + step))[0])
