"""The suite of logits processors, against those of ours and against planted bugs."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli.commands import main
from plugins.builtin.ngram import NgramRepetitionBreaker
from plugins.builtin.thinking import ThinkingBudget
from plugins.builtin.watermark import Watermark
from plugins.conformance.logits import LOGITS_CHECKS, check_logits_processor, examples_of
from plugins.conformance.logits_driver import Fed, Rig, Subject
from plugins.conformance.report import CheckResult
from plugins.logits import LogitsProcessor
from tests.architecture.sources import ROOT
from tests.contract import broken_processors as broken
from tests.contract.torch_at_top import TorchAtTop

MARKS: Mapping[str, Any] = {"start": [498], "end": [499]}
THINKING: Mapping[str, Any] = {"thinking_budget": 4, "thinking_start": [5], "thinking_end": [7, 8, 7]}


def failed(results: tuple[CheckResult, ...]) -> dict[str, str]:
    return {result.name: result.why for result in results if not result.passed}


@pytest.mark.parametrize(
    ("cls", "examples", "section"),
    [
        (NgramRepetitionBreaker, (), {}),
        (NgramRepetitionBreaker, ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 16}), {}),
        (ThinkingBudget, (), MARKS),
        (ThinkingBudget, (THINKING, {"thinking_budget": 1}), {"start": [4], "end": [9]}),
        (Watermark, (), {"key": "a key of these tests"}),
        (broken.Fee, broken.EXAMPLES, {}),
    ],
    ids=["n-gram", "long n-grams", "thinking", "configured thinking", "watermark", "fee"],
)
def test_a_sound_processor_passes_every_check(
    cls: type[LogitsProcessor], examples: tuple[Mapping[str, Any], ...], section: Mapping[str, Any]
) -> None:
    """B080: with random additions, ends and preemptions too each request gets its own."""
    results = check_logits_processor(cls, examples, section)

    assert failed(results) == {}
    assert len(results) == len(LOGITS_CHECKS) == 19


def without_picking(cls: type[LogitsProcessor]) -> type[LogitsProcessor]:
    """Let a processor work as on a device where picking rows would wait: on all of them."""

    class OnADevice(cls):  # type: ignore[misc, valid-type]  # a class that is given
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._asked._picks_rows = False

    OnADevice.__module__ = cls.__module__  # this one imports torch
    return OnADevice


@pytest.mark.parametrize(
    ("cls", "section"),
    [(NgramRepetitionBreaker, {}), (ThinkingBudget, MARKS), (Watermark, {"key": "a key of these tests"})],
    ids=["n-gram", "thinking", "watermark"],
)
def test_all_promises_are_kept_where_rows_are_not_picked(
    cls: type[LogitsProcessor], section: Mapping[str, Any]
) -> None:
    results = check_logits_processor(without_picking(cls), (), section)

    assert failed(results) == {}


def test_picked_or_not_the_scores_are_the_same_bit_for_bit() -> None:
    found = []
    for cls in (Watermark, without_picking(Watermark)):
        subject = Subject(cls, ({"watermark": True}, {"watermark": True, "watermark_gamma": 0.7}), {"key": "k"})
        rig = Rig(subject)
        for row, asked in enumerate((*subject.requests(1), subject.plain)):
            rig.admit(row, asked)
        found.append(rig.step(Fed(2), Fed(1, (3,)), Fed(0)).after)

    assert found[0].equal(found[1])


@pytest.mark.parametrize(
    ("cls", "check", "why"),
    [
        (TorchAtTop, "its module is imported where there is no torch", "import it inside the methods that need it"),
        (broken.OtherSignature, "it is built from a configuration and the states", "missing 1 required positional"),
        (broken.OtherSchema, "what it declares is valid", "describes ['price'], and its extra_arg_names are ['fee']"),
        (
            broken.NoClassMethod,
            "validate params is a class method that takes the examples",
            "validate_params is a function, not a class method",
        ),
        (
            broken.RaisesOnJunk,
            "validate params refuses by value error alone",
            "fee=None raises TypeError: '<' not supported between instances of 'NoneType' and 'int'",
        ),
        (broken.SaysNothing, "add request says true or false", "add_request returned None, not True or False"),
        (broken.AcceptsAll, "a request without its arguments is declined", "gives none of its arguments"),
        (
            broken.KeepsThePreviousOccupant,
            "a row keeps nothing of its previous occupant",
            "the row's next occupant gets 3 of 500 scores that it would not get alone",
        ),
        (broken.NeedsAdditions, "staged writes are applied with nothing to write", "IndexError: pop from empty list"),
        (broken.Leaves, "the scores keep shape type and device", "SystemExit: 0"),
        (broken.OtherType, "the scores keep shape type and device", "torch.float64"),
        (broken.OneRow, "the scores keep shape type and device", "apply returned (1, 500) torch.float32"),
        (broken.WritesDeclinedRows, "declined rows are untouched", "the scores of a row that it had declined"),
        (broken.AddsNothingToDeclinedRows, "declined rows are untouched", "the scores of a row that it had declined"),
        (broken.RaisesMinusInfinity, "minus infinity stays and nothing becomes nan", "it raised a score of -inf"),
        (broken.MakesNan, "minus infinity stays and nothing becomes nan", "it made a score that is no number"),
        (broken.LeavesNothing, "minus infinity stays and nothing becomes nan", "nothing can be chosen"),
        (
            broken.TakesPlacesForRows,
            "a request gets the same beside others in any row and order",
            "a request in a batch gets",
        ),
        (
            broken.LooksAtNeighbours,
            "a request gets the same beside others in any row and order",
            "a request in a batch gets",
        ),
        (
            broken.ForgetsHistory,
            "a preempted request goes on as if nothing had been",
            "a request preempted after 5 tokens gets 2 of 500 scores",
        ),
        (broken.IgnoresDrafts, "a row after drafts is as if they had been chosen", "the row after 1 drafts gets 1 of"),
        (broken.WantsTheWholePrompt, "rows in the middle of a prompt do no harm", "IndexError: a row before the end"),
        (broken.WritesStates, "the states are only read", "it wrote to req_states"),
        (broken.SharesItsRows, "two instances share nothing", "a request of one of two instances gets"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_planted_bug_is_found_by_the_check_of_its_promise(cls: type[LogitsProcessor], check: str, why: str) -> None:
    found = failed(check_logits_processor(cls, broken.EXAMPLES))

    assert why in found.get(check, "it was not found")


def test_a_processor_that_takes_no_example_was_not_checked() -> None:
    found = failed(check_logits_processor(broken.Fee, ({"fee": 0.0},)))

    assert found == {
        "add request says true or false": "it declines every example; give arguments that it takes: --example '{...}'"
    }


def test_a_missing_key_fails_the_checks_with_the_remedy() -> None:
    found = failed(check_logits_processor(Watermark))

    assert (
        'set {"watermark": {"key": "a secret"}} in plugins.logits_processor_config'
        in found["it is built from a configuration and the states"]
    )


@pytest.mark.parametrize(
    ("schema", "examples"),
    [
        (None, ({},)),
        ({"type": "object"}, ({},)),
        ({"examples": [{"a": 1}, {"a": 2}], "properties": {"a": {"minimum": 0}}}, ({"a": 1}, {"a": 2})),
        ({"properties": {"a": {"examples": [3, 4]}, "b": {"default": "x"}}}, ({"a": 3, "b": "x"}, {"a": 4, "b": "x"})),
        ({"properties": {"a": {"enum": ["p", "q"]}, "b": {"minimum": 2}}}, ({"a": "p", "b": 2}, {"a": "q", "b": 2})),
        ({"properties": {"a": {"type": "boolean", "default": False}, "b": {}, "c": True}}, ({"a": True},)),
    ],
    ids=["no schema", "no properties", "its own", "of a property", "enum and limit", "boolean"],
)
def test_examples_are_found_in_a_schema(
    schema: Mapping[str, Any] | None, examples: tuple[Mapping[str, Any], ...]
) -> None:
    assert examples_of(schema) == examples


def sources_of_the_page() -> list[str]:
    page = (ROOT / "docs/logits_processors.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_the_processor_of_the_page_keeps_its_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = [each for each in sources_of_the_page() if "class Brevity(" in each]
    (tmp_path / "brevity.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))

    assert main(["plugins", "check", "brevity:Brevity"]) == 0
    assert main(["plugins", "check", "brevity:Brevity", "--example", '{"brevity": 1}']) == 0


def test_the_detector_runs_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = [each for each in sources_of_the_page() if "detect(" in each]

    exec(source, {})

    assert len(capsys.readouterr().out.split()) == 2
