"""What requests asked of a processor, by row."""

import torch

from plugins.builtin.staged_rows import Chosen, StagedRows
from plugins.conformance.logits_driver import Tables
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
