"""Draws what commands return: JSON for machines, tables for people. The one place that knows how results look."""

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

MAX_COLUMNS = 6  # more do not fit a terminal beside each other


def render(result: Any, as_json: bool, console: Console) -> None:
    """Print a dataclass: its plain fields as a list of names and values, each tuple of dataclasses as a table."""
    if as_json:
        console.print(
            json.dumps(dataclasses.asdict(result), default=_plain), markup=False, highlight=False, soft_wrap=True
        )
        return
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    tables: list[Table] = []
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        if isinstance(value, tuple) and all(dataclasses.is_dataclass(each) for each in value):
            tables.append(table(field.name, value))
        else:
            facts.add_row(_title(field.name), _text(value))
    if facts.row_count:
        console.print(facts, highlight=False)
    for each in tables:
        console.print(each, highlight=False)


def table(title: str, rows: Sequence[Any]) -> Table:
    """Draw one line per dataclass, or one column if they have many fields; a title alone if there are none."""
    drawn = Table(title=_title(title), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    names = [field.name for field in dataclasses.fields(rows[0])] if rows else []
    if not rows:
        drawn.add_column("none")
    elif len(names) > MAX_COLUMNS:
        drawn.show_header = False
        for name in names:
            drawn.add_row(_title(name), *(_text(getattr(row, name)) for row in rows))
    else:
        for name in names:
            is_number = isinstance(getattr(rows[0], name), int | float)
            drawn.add_column(_title(name), justify="right" if is_number else "left", overflow="fold")
        for row in rows:
            drawn.add_row(*(_text(getattr(row, name)) for name in names))
    return drawn


def _title(name: str) -> str:
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
