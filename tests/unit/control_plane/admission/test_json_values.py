"""Arguments of logits processors: JSON, finite, not too deep, not too much; and known to somebody."""

import time
from typing import Any

import pytest

from plugins.errors import FieldViolation
from plugins.types import SamplingParams
from tests.unit.control_plane.admission.asking import INFINITY, NAN, admitted, only, refused, validator

FIELD = "sampling.extra_args"


class Taking:
    """Processors that take every argument but some, and remember what they were asked."""

    def __init__(self, refused_names: tuple[str, ...] = ()) -> None:
        self._refused = refused_names
        self.asked: list[SamplingParams] = []

    def violations(self, sampling: SamplingParams) -> list[FieldViolation]:
        self.asked.append(sampling)
        return [
            FieldViolation(f"{FIELD}.{name}", "SCHEMA_VIOLATION", "is not what was declared")
            for name in sampling.extra_args
            if name in self._refused
        ]


def checked(values: object) -> tuple[str, str, str]:
    return only(validator(extra_args=Taking()), extra_args=values)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(2**63), 2**64 - 1, 0.5, -1e308, "", "\x00 \U0001f600", [], {}, [1, "a", None], {"a": {"b": [1]}}],
)
def test_json_is_handed_on_as_it_is(value: object) -> None:
    assert admitted(validator(extra_args=Taking()), extra_args={"a": value}).extra_args == {"a": value}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (NAN, "OUT_OF_RANGE"),
        (INFINITY, "OUT_OF_RANGE"),
        ([{"a": -INFINITY}], "OUT_OF_RANGE"),
        (2**64, "OUT_OF_RANGE"),
        (-(2**63) - 1, "OUT_OF_RANGE"),
        ("\ud800", "NOT_UNICODE"),
        (b"a", "WRONG_TYPE"),
        ({1}, "WRONG_TYPE"),
        (1j, "WRONG_TYPE"),
        ([object()], "WRONG_TYPE"),
        ({5: 1}, "WRONG_TYPE"),
        ({"\ud800": 1}, "WRONG_TYPE"),
        (nested(16), "TOO_DEEP"),
    ],
)
def test_what_is_no_json_is_refused_under_its_name(value: object, reason: str) -> None:
    assert checked({"good": 1, "bad": value})[:2] == (f"{FIELD}.bad", reason)


def test_sixteen_levels_are_not_too_deep() -> None:
    assert admitted(validator(extra_args=Taking()), extra_args={"a": nested(15)}).extra_args == {"a": nested(15)}


@pytest.mark.parametrize("value", [5, "a", [("a", 1)], None])
def test_arguments_have_names(value: object) -> None:
    assert checked(value)[:2] == (FIELD, "WRONG_TYPE")


@pytest.mark.parametrize(
    ("name", "reason"), [(5, "WRONG_TYPE"), ("", "EMPTY"), ("x" * 129, "TOO_LONG"), ("\ud800", "NOT_UNICODE")]
)
def test_a_name_is_a_short_text(name: object, reason: str) -> None:
    assert checked({name: 1})[:2] == (FIELD, reason)


def test_there_are_at_most_128_names() -> None:
    names = {f"name{number}": 1 for number in range(129)}

    assert checked(names) == (FIELD, "TOO_MANY", "has 129 names; at most 128 are allowed")


def test_arguments_have_at_most_64_kib_as_json() -> None:
    fits = "x" * (64 * 1024 - len('{"a":""}'))

    assert admitted(validator(extra_args=Taking()), extra_args={"a": fits}).extra_args == {"a": fits}
    assert checked({"a": fits + "x"}) == (FIELD, "TOO_LONG", "is longer than 65536 bytes of JSON, which are allowed")


@pytest.mark.parametrize("value", [[0] * 50_000, ["é" * 40_000], {str(number): number for number in range(20_000)}])
def test_many_small_values_are_too_much_as_well(value: object) -> None:
    assert checked({"a": value})[:2] == (FIELD, "TOO_LONG")


def test_a_value_that_contains_itself_is_refused_in_no_time() -> None:
    forest: list[Any] = []
    forest += [forest] * 1000
    started_s = time.perf_counter()

    assert checked({"a": forest})[0].startswith(FIELD)

    assert time.perf_counter() - started_s < 1


def test_an_argument_that_nobody_reads_is_refused_under_its_name() -> None:
    found = refused(extra_args={"a": 1, "b": 2})

    assert [(name, reason) for name, reason, _ in found] == [
        (f"{FIELD}.a", "UNKNOWN_ARGUMENT"),
        (f"{FIELD}.b", "UNKNOWN_ARGUMENT"),
    ]


def test_processors_are_asked_about_every_request_with_its_wrong_fields_left_out() -> None:
    processors = Taking(refused_names=("b",))
    checker = validator(extra_args=processors)

    found = refused(checker, extra_args={"b": 1}, top_p=NAN, top_k=5)
    refused(checker, extra_args={"b": NAN})
    admitted(checker)

    assert [name for name, _, _ in found] == ["sampling.top_p", f"{FIELD}.b"]
    assert processors.asked == [
        SamplingParams(extra_args={"b": 1}, top_k=5),
        SamplingParams(),
        SamplingParams(),
    ]
