"""The budget for thinking."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from plugins.builtin.thinking import ThinkingBudget
from plugins.conformance.logits_driver import VOCAB_SIZE, Subject, Tables
from plugins.types import Row, SamplingParams
from tests.unit.plugins.one_row import RULED_OUT, allowed, scores

MARKED = {"thinking_budget": 2, "thinking_start": [5, 6], "thinking_end": [7, 8]}  # a section is 5 6 ... 7 8
OPEN = {"thinking_budget": 3, "thinking_open": True, "thinking_end": [7]}
SECTION = {"start": [498], "end": [499]}


def asked(args: dict[str, Any], output: Sequence[int] = (), drafts: Sequence[int] = (), **others: Any) -> torch.Tensor:
    """What becomes of the scores of a request on a worker that knows other marks, unless the section says otherwise."""
    return scores(ThinkingBudget, args, output, drafts, **{"section": SECTION} | others)


@pytest.mark.parametrize(
    ("args", "output", "choice"),
    [
        (MARKED, (), "all"),
        (MARKED, (1, 2, 3, 4), "all"),
        (MARKED, (5,), "all"),
        (MARKED, (5, 6), "all"),
        (MARKED, (5, 6, 1), "all"),
        (MARKED, (5, 6, 1, 2), [7]),
        (MARKED, (5, 6, 1, 2, 7), [8]),
        (MARKED, (5, 6, 1, 2, 7, 8), "all"),
        (MARKED, (5, 6, 1, 2, 7, 8, 3, 3, 3), "all"),
        (MARKED, (5, 6, 7, 8, 1, 2, 3), "all"),
        (MARKED, (5, 6, 1, 7), [8]),
        (MARKED, (5, 6, 1, 2, 3), [7]),
        (MARKED, (5, 6, 1, 5, 6), [7]),
        (MARKED, (5, 6, 7, 8, 5, 6, 1, 2), [7]),
        (MARKED, (5, 6, 7, 8, 5, 6, 1), "all"),
        ({**MARKED, "thinking_budget": 0}, (5, 6), [7]),
        (OPEN, (), "all"),
        (OPEN, (1, 2), "all"),
        (OPEN, (1, 2, 3), [7]),
        (OPEN, (1, 7, 3, 4, 5, 6), "all"),
        ({**OPEN, "thinking_budget": 0}, (), [7]),
        ({**OPEN, "thinking_end": [7, 7, 8]}, (1, 7, 7), [8]),
        ({**OPEN, "thinking_end": [7, 7, 8]}, (7, 7, 7), [8]),
        ({**MARKED, "thinking_end": [6, 8]}, (5, 6, 8, 1, 2, 3), "all"),
        ({**MARKED, "thinking_end": [6, 8]}, (5, 6, 1, 2), [6]),
        ({**OPEN, "thinking_end": [7, 7, 8], "thinking_start": [4]}, (7, 7, 8, 4, 1, 2, 3), [7]),
    ],
    ids=str,
)
def test_a_section_that_has_used_its_budget_is_closed(
    args: dict[str, Any], output: tuple[int, ...], choice: list[int] | str
) -> None:
    assert allowed(asked(args, output)[0]) == choice


def choice_of(args: dict[str, Any], output: Sequence[int]) -> list[int] | str:
    """The same by reading the output token by token."""
    start, end = args["thinking_start"], args["thinking_end"]
    section: list[int] | None = [] if args.get("thinking_open") else None  # what is in it so far
    since: list[int] = []  # what stands outside
    for token_id in output:
        if section is None:
            since.append(token_id)
            section = [] if since[-len(start) :] == start else None
        else:
            section.append(token_id)
            if section[-len(end) :] == end:
                section, since = None, []
    if section is None or len(section) < args["thinking_budget"]:
        return "all"
    said = [num for num in range(1, len(end)) if section[-num:] == end[:num]]
    return [end[max(said, default=0)]]


@pytest.mark.parametrize("seed", range(60))
def test_who_reads_token_by_token_finds_the_same(seed: int) -> None:
    draw = random.Random(seed)
    start, end = draw.choice((([5], [7]), ([5, 6], [7, 8]), ([5], [7, 7, 8]), ([5, 5], [7, 6, 7, 8])))
    args: dict[str, Any] = {
        "thinking_budget": draw.randint(0, 8),
        "thinking_open": draw.random() < 0.5,
        "thinking_start": start,
        "thinking_end": end,
    }
    output = [draw.choice((5, 6, 7, 8, 9)) for _ in range(draw.randint(0, 40))]

    assert allowed(asked(args, output)[0]) == choice_of(args, output)


def test_drafts_count() -> None:
    found = asked(MARKED, (5,), (6, 1, 2, 7, 8))

    assert [allowed(row) for row in found] == ["all", "all", "all", [7], [8], "all"]


def test_a_section_in_the_prompt_is_none_of_the_output() -> None:
    assert allowed(asked(MARKED, (1, 2, 3), prompt=(5, 6))[0]) == "all"


def test_a_forced_token_keeps_its_score() -> None:
    before = torch.full((1, VOCAB_SIZE), 2.5)

    assert float(asked(OPEN, (1, 2, 3), before=before)[0, 7]) == 2.5


def test_a_token_that_a_stage_before_has_ruled_out_is_not_forced() -> None:
    before = torch.zeros((1, VOCAB_SIZE))
    before[0, 7] = RULED_OUT

    assert asked(OPEN, (1, 2, 3), before=before).equal(before)


def test_the_configuration_says_what_opens_and_closes_where_the_request_does_not() -> None:
    section = {"start": [5, 6], "end": [7]}

    found = asked({"thinking_budget": 1}, (5, 6, 1), section=section)
    other = asked({"thinking_budget": 1, "thinking_end": [9]}, (5, 6, 1), section=section)

    assert (allowed(found[0]), allowed(other[0])) == ([7], [9])


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"thinking_budget": -1}, "thinking_budget is -1; it must be a whole number from 0 to 2147483647"),
        ({"thinking_budget": 1.5}, "thinking_budget is 1.5; it must be a whole number from 0 to 2147483647"),
        ({"thinking_open": 1}, "thinking_open is 1; it must be true or false"),
        ({**MARKED, "thinking_end": []}, "thinking_end is []; it must be a list of 1 to 16 token ids"),
        ({**MARKED, "thinking_end": "x"}, "thinking_end is 'x'; it must be a list of 1 to 16 token ids"),
        ({**MARKED, "thinking_start": [1, -2]}, "thinking_start has -2 in it, which is no token id"),
        (
            {**MARKED, "thinking_start": [5, 7, 8, 6]},
            "thinking_start has thinking_end in it: a section would be closed when it opens",
        ),
        ({"thinking_end": [7]}, "what opens and closes a section says nothing without thinking_budget"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(args: dict[str, Any], complaint: str) -> None:
    """B085."""
    with pytest.raises(ValueError) as refused:
        ThinkingBudget.validate_params(SamplingParams(extra_args=args))

    assert str(refused.value) == complaint


@pytest.mark.parametrize("marks", [{"thinking_start": [VOCAB_SIZE]}, {"thinking_end": [7, VOCAB_SIZE]}], ids=str)
def test_marks_that_the_model_has_no_tokens_for_force_nothing(marks: dict[str, Any]) -> None:
    """No mistake of a caller, which admission cannot see, fails on the worker."""
    processor = Subject(ThinkingBudget, (), SECTION).build(Tables())

    is_accepted = processor.add_request(Row(0), SamplingParams(extra_args={**MARKED, **marks}))

    assert is_accepted is False


def test_a_start_that_the_configured_end_closes_at_once_opens_nothing() -> None:
    section = {"start": [9], "end": [6]}

    found = asked({"thinking_budget": 1, "thinking_start": [5, 6]}, (5, 6, 1, 2, 3), section=section)

    assert allowed(found[0]) == "all"


KNOW = 'set {"thinking_budget": {"start": [ids], "end": [ids]}} in plugins.logits_processor_config'


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({}, KNOW),
        ({"start": [5]}, KNOW),
        ({"end": [7]}, KNOW),
        ({"stop": [7]}, "stop is no key of thinking_budget's section; start and end are"),
        ({"start": "<think>", "end": [7]}, "start is '<think>'; it must be a list of 1 to 16 token ids"),
        ({"start": [5], "end": [VOCAB_SIZE]}, "its section has token 500, and this model has ids below 500"),
        ({"start": [5, 7], "end": [7]}, "start has end in it: a section would be closed when it opens"),
    ],
    ids=str,
)
def test_a_section_that_does_not_say_what_opens_and_closes_stops_the_start(
    section: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError) as refused:
        Subject(ThinkingBudget, (), section).build(Tables())

    assert complaint in str(refused.value)
