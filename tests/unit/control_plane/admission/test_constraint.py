"""What the text must look like: exactly one thing, and one that the worker can hold an output to."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from control_plane.engine.served import ServedModel
from plugins.errors import FieldViolation, InvalidRequest
from plugins.types import StructuredOutput
from tests.unit.control_plane.admission.asking import SMALL, admitted, only, refused, validator

ABLE = replace(SMALL, worker=replace(SMALL.worker, has_grammars=True))
FIELD = "sampling.structured_output"


@dataclass
class Spelling:
    """Grammars that say what they were made of, or refuse."""

    refusal: str = ""
    asked: list[StructuredOutput] = field(default_factory=list)

    def compile(self, output: StructuredOutput, model: ServedModel) -> str:
        self.asked.append(output)
        if self.refusal:
            raise InvalidRequest([FieldViolation(f"{FIELD}.regex", "INVALID_GRAMMAR", self.refusal)])
        return f"grammar of {output.regex} for {model.worker.model.name}"


def of(**fields: Any) -> StructuredOutput:
    return StructuredOutput(**fields)


def asked(output: object, **others: Any) -> tuple[str, str, str]:
    return only(validator(ABLE, grammars=Spelling()), structured_output=output, **others)


def test_a_constraint_is_compiled_once_for_the_model_that_serves_it() -> None:
    grammars = Spelling()

    sampling = admitted(validator(ABLE, grammars=grammars), structured_output=of(regex="a+"))

    assert sampling.grammar == "grammar of a+ for small"
    assert grammars.asked == [of(regex="a+")]


@pytest.mark.parametrize(
    ("output", "where", "reason"),
    [
        (of(), "", "REQUIRED"),
        (of(json_object=False), "", "REQUIRED"),
        (of(choice=()), "", "REQUIRED"),
        (of(regex="a", json_object=True), "", "REQUIRED"),
        (of(json_schema="{}", grammar="", choice=("a",)), "", "REQUIRED"),
        (of(json_schema=""), ".json_schema", "EMPTY"),
        (of(regex=""), ".regex", "EMPTY"),
        (of(grammar=""), ".grammar", "EMPTY"),
        (of(regex="\ud800"), ".regex", "NOT_UNICODE"),
        (of(choice=("",)), ".choice", "EMPTY"),
        (of(choice=("a", "\ud800")), ".choice", "NOT_UNICODE"),
        (of(choice=("a",) * 1001), ".choice", "TOO_MANY"),
        (of(choice=("a" * 1025,)), ".choice", "TOO_LONG"),
        (of(choice=(5,)), ".choice", "WRONG_TYPE"),
        (of(choice="yes"), ".choice", "WRONG_TYPE"),
        (of(regex=5), ".regex", "WRONG_TYPE"),
        (of(json_schema={"type": "object"}), ".json_schema", "WRONG_TYPE"),
        (of(grammar=b"start: /a/"), ".grammar", "WRONG_TYPE"),
        (of(json_object="yes"), ".json_object", "WRONG_TYPE"),
        ({"regex": "a"}, "", "WRONG_TYPE"),
        ("a+", "", "WRONG_TYPE"),
    ],
)
def test_a_constraint_is_exactly_one_thing(output: object, where: str, reason: str) -> None:
    assert asked(output)[:2] == (f"{FIELD}{where}", reason)


def test_a_constraint_that_is_none_or_several_things_names_them() -> None:
    names = "set exactly one of json_schema, json_object, regex, choice, grammar"

    assert asked(of())[2] == f"sets none; {names}"
    assert asked(of(regex="a", choice=("b",)))[2] == f"sets regex, choice; {names}"


def test_a_wrong_constraint_is_not_compiled() -> None:
    grammars = Spelling()

    only(validator(ABLE, grammars=grammars), structured_output=of(regex=""))

    assert grammars.asked == []


def test_what_the_compiler_refuses_is_told_with_all_that_is_wrong_besides() -> None:
    checker = validator(ABLE, grammars=Spelling(refusal="is no expression"))

    found = refused(checker, structured_output=of(regex="("), top_p=2.0)

    assert [(name, reason) for name, reason, _ in found] == [
        ("sampling.top_p", "OUT_OF_RANGE"),
        (f"{FIELD}.regex", "INVALID_GRAMMAR"),
    ]


@pytest.mark.parametrize(
    ("model", "hooks"),
    [pytest.param(SMALL, {"grammars": Spelling()}, id="the worker"), pytest.param(ABLE, {}, id="the control plane")],
)
def test_a_constraint_needs_both_planes_to_know_grammars(model: ServedModel, hooks: dict[str, Any]) -> None:
    assert only(validator(model, **hooks), structured_output=of(regex="a"))[:2] == (FIELD, "UNSUPPORTED")


def test_an_output_that_no_end_token_ends_cannot_be_held_to_a_grammar() -> None:
    assert asked(of(regex="a"), ignore_eos=True)[:2] == (FIELD, "CONFLICT")


def test_two_lists_of_what_is_allowed_may_have_nothing_in_common() -> None:
    assert asked(of(regex="a"), allowed_token_ids=[3])[:2] == ("sampling.allowed_token_ids", "CONFLICT")


def test_outputs_of_a_grammar_may_be_several_and_may_have_stop_strings() -> None:
    checker = validator(ABLE, grammars=Spelling())

    assert admitted(
        checker, structured_output=of(regex="a"), stop=["b"], min_tokens=2, bad_words=["a"]
    ).grammar.startswith("grammar")
