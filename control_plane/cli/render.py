"""Draws what commands return: JSON for machines, tables for people. The one place that knows how results look."""

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

MAX_WIDTH: Final = 10_000  # of any table
JSON_ONLY: Final = {"shown": False}  # metadata of a field that would only crowd a table


def render(result: Any, as_json: bool, console: Console) -> None:
    """Print a dataclass: its plain fields as a list of names and values, each tuple of dataclasses as a table."""
    if as_json:
        console.print(
            json.dumps(dataclasses.asdict(result), default=_plain), markup=False, highlight=False, soft_wrap=True
        )
        return
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    tables: list[Table] = []
    for field in _shown(result):
        value = getattr(result, field.name)
        if isinstance(value, tuple) and all(dataclasses.is_dataclass(each) for each in value):
            tables.append(table(field.name, value, console))
        else:
            facts.add_row(_title(field.name), _text(value))
    if facts.row_count:
        console.print(facts, highlight=False)
    for each in tables:
        console.print(each, highlight=False)


def table(title: str, rows: Sequence[Any], console: Console) -> Table:
    """Draw one line per dataclass, or one column if the lines are too long; a title alone if there are none.

    Lines leave out what none of them has.
    """
    if not rows:
        empty = _empty(title)
        empty.add_column("none")
        return empty
    shown = _shown(rows[0])
    lines = _empty(title, padding=1)
    used = [field.name for field in shown if any(getattr(row, field.name) not in (None, "") for row in rows)]
    for name in used:
        values = [getattr(row, name) for row in rows]
        is_number = any(isinstance(value, int | float) for value in values)
        is_prose = any(" " in _text(value) for value in values)
        header = _title(name) if is_prose else _title(name).replace(" ", "\n")
        lines.add_column(header, justify="right" if is_number else "left", overflow="fold", no_wrap=not is_prose)
    for row in rows:
        lines.add_row(*(_text(getattr(row, name)) for name in used))
    unbounded = console.options.update_width(MAX_WIDTH)  # else no table would be wider than the console
    if Measurement.get(console, unbounded, lines).minimum <= console.width:
        return lines
    columns = _empty(title)
    columns.show_header = False
    for field in shown:
        columns.add_row(_title(field.name), *(_text(getattr(row, field.name)) for row in rows))
    return columns


def _empty(title: str, padding: int = 2) -> Table:
    name = _title(title)
    table = Table(title=name, title_justify="left", title_style="bold", box=None, padding=(0, padding, 0, 0))
    table.min_width = len(name)
    return table


def _shown(row: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(row) if field.metadata.get("shown", True)]


def _title(name: str) -> str:
    if "." in name:
        return name  # no field, such as a group of entry points
    return name.removeprefix("num_").replace("_", " ")


def _text(value: object) -> str:
    match value:
        case None | "":
            return "-"
        case enum.Enum():
            return value.name.lower()
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
        case int():
            return f"{value:,}"
        case _:
            return escape(str(value))


def _plain(value: object) -> object:
    return value.name.lower() if isinstance(value, enum.Enum) else str(value)
