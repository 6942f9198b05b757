"""Results as tables and as JSON."""

import io
import json
from dataclasses import dataclass, field

from rich.console import Console

from control_plane.cli.render import JSON_ONLY, render


@dataclass(frozen=True)
class Tree:
    kind: str
    num_apples: int
    height_m: float


@dataclass(frozen=True)
class Garden:
    owner: str
    num_guests: int
    note: str | None
    trees: tuple[Tree, ...]


def drawn(garden: Garden, as_json: bool) -> str:
    out = io.StringIO()
    render(garden, as_json, Console(file=out, width=60))
    return out.getvalue()


def test_plain_fields_become_a_list_and_tuples_become_tables() -> None:
    text = drawn(Garden("Ada", 1234, None, (Tree("oak [old]", 0, 21.456), Tree("elm", 7, 250.0))), as_json=False)

    assert [line.split() for line in text.splitlines()] == [
        ["owner", "Ada"],
        ["guests", "1,234"],
        ["note", "-"],
        ["trees"],
        ["height"],
        ["kind", "apples", "m"],
        ["oak", "[old]", "0", "21.5"],
        ["elm", "7", "250"],
    ]


def test_an_empty_table_says_so() -> None:
    assert drawn(Garden("Ada", 0, None, ()), as_json=False).split()[-2:] == ["trees", "none"]


@dataclass(frozen=True)
class Bed:
    a: int
    b: int
    c: int
    d: int
    e: int
    f: int
    g: str


@dataclass(frozen=True)
class Beds:
    beds: tuple[Bed, ...]


def beds(width: int, *rows: Bed) -> list[list[str]]:
    out = io.StringIO()
    render(Beds(rows), False, Console(file=out, width=width))
    return [line.split() for line in out.getvalue().splitlines()]


def test_rows_that_are_longer_than_the_console_stand_beside_each_other() -> None:
    assert beds(14, Bed(1, 2, 3, 4, 5, 6, "x"), Bed(7, 8, 9, 10, 11, 12, "y")) == [
        ["beds"],
        ["a", "1", "7"],
        ["b", "2", "8"],
        ["c", "3", "9"],
        ["d", "4", "10"],
        ["e", "5", "11"],
        ["f", "6", "12"],
        ["g", "x", "y"],
    ]


def test_rows_that_fit_stand_below_each_other() -> None:
    assert beds(40, Bed(1, 2, 3, 4, 5, 6, "x"), Bed(7, 8, 9, 10, 11, 12, "")) == [
        ["beds"],
        ["a", "b", "c", "d", "e", "f", "g"],
        ["1", "2", "3", "4", "5", "6", "x"],
        ["7", "8", "9", "10", "11", "12", "-"],
    ]


def test_a_column_that_no_row_has_is_left_out() -> None:
    assert beds(40, Bed(0, 2, 3, 4, 5, 6, "")) == [
        ["beds"],
        ["a", "b", "c", "d", "e", "f"],
        ["0", "2", "3", "4", "5", "6"],
    ]


@dataclass(frozen=True)
class Pond:
    name: str
    depth_m: float = field(metadata=JSON_ONLY)


def test_a_field_for_json_alone_is_in_no_table() -> None:
    texts = []
    for as_json in (False, True):
        out = io.StringIO()
        render(Pond("big", 2.0), as_json, Console(file=out, width=40))
        texts.append(out.getvalue())

    assert texts[0].split() == ["name", "big"]
    assert json.loads(texts[1]) == {"name": "big", "depth_m": 2.0}


def test_json_has_every_field_under_its_own_name() -> None:
    text = drawn(Garden("Ada", 3, None, (Tree("a very long name " * 10, 1, 2.0),)), as_json=True)

    assert json.loads(text) == {
        "owner": "Ada",
        "num_guests": 3,
        "note": None,
        "trees": [{"kind": "a very long name " * 10, "num_apples": 1, "height_m": 2.0}],
    }
