"""The arguments of logits processors: who reads them, what their schemas and their own code say of them."""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from control_plane.admission.extra_args import ExtraArgs, warn_of_undeclared
from plugins.errors import FieldViolation, InvalidConfig, PluginFailed
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.logits_loading import load_processors
from plugins.types import Row, SamplingParams

FIELD = "sampling.extra_args"


class Silent(LogitsProcessor):
    """Declares nothing."""

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None: ...

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        return False

    def apply_staged_writes(self) -> None: ...

    def apply(self, logits: Any, ctx: LogitsContext) -> Any:
        return logits


class Budget(Silent):
    name = "budget"
    extra_arg_names = ("max_words", "words")
    parameter_schema: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "required": ["max_words"],
        "properties": {
            "max_words": {"type": "integer", "minimum": 1},
            "words": {"type": "array", "items": {"type": "string"}},
        },
    }
    asked: ClassVar[list[Mapping[str, Any]]] = []

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        cls.asked.append(sampling_params.extra_args)
        if sampling_params.extra_args.get("max_words") == 13:
            raise ValueError("13 is unlucky")
        if sampling_params.extra_args.get("max_words") == 14:
            raise LookupError("no such table")


class Steering(Silent):
    name = "steering"
    extra_arg_names = ("steer",)


class Greedy(Silent):
    name = "greedy"
    parameter_schema: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"max_words": {"maximum": 100}},
        "additionalProperties": {"type": "number"},
    }


def found(processors: list[type[LogitsProcessor]], **extra_args: Any) -> list[FieldViolation]:
    return ExtraArgs(load_processors(processors)).violations(SamplingParams(extra_args=extra_args))


@pytest.fixture(autouse=True)
def forget() -> None:
    Budget.asked.clear()


# -- who reads them -----------------------------------------------------------------------------------------------


def test_an_argument_that_nobody_reads_is_refused_with_the_nearest_that_is_read() -> None:
    assert found([Budget, Steering], steers=1, colour=2) == [
        FieldViolation(f"{FIELD}.steers", "UNKNOWN_ARGUMENT", "no logits processor reads it; did you mean steer?"),
        FieldViolation(
            f"{FIELD}.colour",
            "UNKNOWN_ARGUMENT",
            "no logits processor reads it; arguments that are read: max_words, steer, words",
        ),
    ]


def test_without_processors_no_argument_is_read() -> None:
    assert found([], steer=1) == [
        FieldViolation(
            f"{FIELD}.steer", "UNKNOWN_ARGUMENT", "no logits processor reads it; arguments that are read: <none>"
        )
    ]


def test_beside_a_processor_that_declares_nothing_any_argument_may_be_read() -> None:
    assert found([Steering, Silent], colour=2) == []


def test_of_many_unknown_arguments_ten_are_told() -> None:
    assert len(found([Steering], **{f"x{number}": 0 for number in range(40)})) == 10


def test_a_processor_that_declares_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_undeclared(load_processors([Steering, Silent]))

    (record,) = caplog.records
    assert (record.levelno, record.message) == (logging.WARNING, "logits_processor_undeclared")
    assert record.__dict__["place"].endswith("test_extra_args:Silent")


# -- their schemas ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra_args", "path", "description"),
    [
        ({"max_words": "3"}, ".max_words", "'3' is not of type 'integer', as budget declares"),
        ({"max_words": 3.5}, ".max_words", "3.5 is not of type 'integer', as budget declares"),
        ({"max_words": 0}, ".max_words", "0 is less than the minimum of 1, as budget declares"),
        ({"max_words": None}, ".max_words", "None is not of type 'integer', as budget declares"),
        ({"max_words": 3, "words": "x"}, ".words", "'x' is not of type 'array', as budget declares"),
        ({"max_words": 3, "words": ["x", {}]}, ".words", "{} is not of type 'string' (in 1), as budget declares"),
        ({"words": []}, ".max_words", "budget requires it"),
    ],
)
def test_an_argument_that_breaks_the_schema_is_named(
    extra_args: Mapping[str, Any], path: str, description: str
) -> None:
    """B085."""
    assert found([Budget], **extra_args) == [FieldViolation(FIELD + path, "SCHEMA_VIOLATION", description)]
    assert Budget.asked == []


def test_whole_numbers_may_come_as_floats_as_they_do_over_grpc() -> None:
    assert found([Budget], max_words=3.0) == []


def test_a_schema_is_for_who_gives_any_of_its_arguments() -> None:
    assert found([Budget, Steering], steer=1) == []


def test_a_schema_without_names_is_for_all_arguments() -> None:
    violations = found([Budget, Greedy], max_words=101, colour="red")

    assert [(each.field, each.description) for each in violations] == [
        (f"{FIELD}.colour", "'red' is not of type 'number', as greedy declares"),
        (f"{FIELD}.max_words", "101 is greater than the maximum of 100, as greedy declares"),
    ]


def test_of_many_violations_ten_are_told_and_long_ones_are_cut() -> None:
    violations = found([Budget], max_words=1, words=[number * 10**400 for number in range(30)])

    assert len(violations) == 10
    assert max(len(each.description) for each in violations) < 260


def test_what_is_no_schema_stops_the_start() -> None:
    class Broken(Steering):
        parameter_schema: ClassVar[Mapping[str, Any]] = {"type": "whole number"}

    with pytest.raises(
        InvalidConfig, match=r"logits processor steering \(.*Broken of no installed .*'whole number' is"
    ):
        ExtraArgs(load_processors([Broken]))


def test_a_reference_is_never_fetched_and_fails_the_request() -> None:
    class Distant(Steering):
        parameter_schema: ClassVar[Mapping[str, Any]] = {"$ref": "http://127.0.0.1:9/schema.json"}

    with pytest.raises(PluginFailed, match=r"steering \(.*Distant\) failed in parameter_schema: .*Unresolvable"):
        found([Distant], steer=1)


# -- their own code -----------------------------------------------------------------------------------------------


def test_the_code_of_a_processor_sees_every_request_once() -> None:
    assert found([Budget, Budget], max_words=5) == []
    assert found([Budget, Steering]) == []

    assert Budget.asked == [{"max_words": 5}, {}]


def test_a_value_error_refuses_the_request_in_the_processors_words() -> None:
    assert found([Budget], max_words=13) == [
        FieldViolation(FIELD, "REFUSED_BY_PROCESSOR", "budget refuses it: 13 is unlucky")
    ]


def test_anything_else_fails_the_request_and_names_the_processor(caplog: pytest.LogCaptureFixture) -> None:
    """B083."""
    with pytest.raises(PluginFailed) as caught:
        found([Budget], max_words=14)

    assert str(caught.value) == (
        "logits processor budget (tests.unit.control_plane.admission.test_extra_args:Budget) failed in "
        "validate_params: LookupError: no such table"
    )
    assert [record.message for record in caplog.records] == ["logits_processor_failed"]
    assert "no such table" not in caplog.text


def test_one_that_would_end_the_process_fails_the_request() -> None:
    class Leaving(Steering):
        @classmethod
        def validate_params(cls, sampling_params: SamplingParams) -> None:
            raise SystemExit(3)

    with pytest.raises(PluginFailed, match=r"Leaving\) failed in validate_params: SystemExit: 3"):
        found([Leaving], steer=1)


def test_what_it_writes_to_the_arguments_nobody_else_sees() -> None:
    class Eating(Steering):
        @classmethod
        def validate_params(cls, sampling_params: SamplingParams) -> None:
            sampling_params.extra_args.clear()  # type: ignore[attr-defined]  # what it must not

    sampling = SamplingParams(extra_args={"steer": 1})

    assert ExtraArgs(load_processors([Eating])).violations(sampling) == []
    assert sampling.extra_args == {"steer": 1}
