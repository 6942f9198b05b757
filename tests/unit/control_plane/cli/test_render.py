"""Results as tables and as JSON."""

import io
import json
from dataclasses import dataclass

from rich.console import Console

from control_plane.cli.render import render


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
        ["kind", "apples", "height", "m"],
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


def test_rows_of_many_fields_stand_beside_each_other() -> None:
    out = io.StringIO()

    render(Beds((Bed(1, 2, 3, 4, 5, 6, "x"), Bed(7, 8, 9, 10, 11, 12, "y"))), False, Console(file=out, width=60))

    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["beds"],
        ["a", "1", "7"],
        ["b", "2", "8"],
        ["c", "3", "9"],
        ["d", "4", "10"],
        ["e", "5", "11"],
        ["f", "6", "12"],
        ["g", "x", "y"],
    ]


def test_json_has_every_field_under_its_own_name() -> None:
    text = drawn(Garden("Ada", 3, None, (Tree("a very long name " * 10, 1, 2.0),)), as_json=True)

    assert json.loads(text) == {
        "owner": "Ada",
        "num_guests": 3,
        "note": None,
        "trees": [{"kind": "a very long name " * 10, "num_apples": 1, "height_m": 2.0}],
    }
