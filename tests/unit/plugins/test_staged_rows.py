"""What requests asked of a processor, by row; and the rows of a step that it works on."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from plugins.builtin.ngram import NgramRepetitionBreaker
from plugins.builtin.staged_rows import Chosen, StagedRows
from plugins.builtin.thinking import ThinkingBudget
from plugins.builtin.watermark import Watermark
from plugins.conformance.logits import check_logits_processor
from plugins.conformance.logits_driver import Fed, Rig, Subject, Tables
from plugins.logits import LogitsProcessor
from plugins.types import Row

ALL = torch.arange(8)


def test_a_row_has_what_was_asked_last_and_what_is_idle_elsewhere() -> None:
    rows = StagedRows(Tables(), {"size": 2, "marks": [-1, -1, -1]})

    rows.accept(Row(3), size=7, marks=(5, 6, 9))
    rows.accept(Row(3), marks=[4])
    rows.flush()

    chosen = Chosen(ALL[3:5], ALL[3:5], None)
    assert rows.column("size", chosen).tolist() == [2, 2]
    assert rows.column("marks", chosen).tolist() == [[4, -1, -1], [-1, -1, -1]]


def test_a_declined_row_is_idle() -> None:
    rows = StagedRows(Tables(), {"size": 2})
    rows.accept(Row(3), size=7)

    rows.decline(Row(3))
    rows.flush()

    assert rows.column("size", Chosen(ALL, ALL, None)).tolist() == [2] * 8


def test_the_device_has_nothing_new_before_a_flush() -> None:
    rows = StagedRows(Tables(), {"size": 2})

    rows.accept(Row(3), size=7)

    assert rows.column("size", Chosen(ALL, ALL, None)).tolist() == [2] * 8


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
    [(NgramRepetitionBreaker, {}), (ThinkingBudget, {}), (Watermark, {"key": "a key of these tests"})],
    ids=["n-gram", "thinking", "watermark"],
)
def test_all_promises_are_kept_where_rows_are_not_picked(
    cls: type[LogitsProcessor], section: Mapping[str, Any]
) -> None:
    results = check_logits_processor(without_picking(cls), (), section)

    assert [result for result in results if not result.passed] == []


def test_picked_or_not_the_scores_are_the_same_bit_for_bit() -> None:
    found = []
    for cls in (Watermark, without_picking(Watermark)):
        subject = Subject(cls, ({"watermark": True}, {"watermark": True, "watermark_gamma": 0.7}), {"key": "k"})
        rig = Rig(subject)
        for row, asked in enumerate((*subject.requests(1), subject.plain)):
            rig.admit(row, asked)
        found.append(rig.step(Fed(2), Fed(1, (3,)), Fed(0)).after)

    assert found[0].equal(found[1])
