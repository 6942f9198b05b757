"""Makes the tables of docs/metrics.md and docs/configuration.md from the code that they describe.

`python -m tests.architecture.reference_pages` writes them; a test holds that the pages are up to date.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from control_plane.cli.flags import field_comments
from control_plane.config import find_sections
from plugins.metrics import CONTROL_PLANE_METRICS, WORKER_METRICS, Metric
from tests.architecture.sources import ROOT


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def metrics_table(metrics: Iterable[Metric]) -> str:
    rows = (
        (f"`{each.name}`", each.kind, ", ".join(f"`{label}`" for label in each.labels), each.help) for each in metrics
    )
    return table(("metric", "type", "labels", "meaning"), rows)


def shown(value: object) -> str:
    """Write a default as YAML and the environment would."""
    if value is None:
        return "-"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def section_tables(sections: Mapping[str, type[Any]]) -> str:
    parts = []
    for name, kind in sections.items():
        meanings = field_comments(kind)
        rows = (
            (f"`{each.name}`", shown(each.default), meanings.get(each.name, "")) for each in dataclasses.fields(kind)
        )
        parts.append(
            f"## `{name}`\n\n`{kind.__module__.replace('.', '/')}.py`\n\n" + table(("key", "default", "meaning"), rows)
        )
    return "\n\n".join(parts)


def pages() -> dict[str, str]:
    """Return the pages as they should be, by their path below the root."""
    tables = {
        "docs/metrics.md": {
            "table: control plane": metrics_table(CONTROL_PLANE_METRICS),
            "table: worker": metrics_table(WORKER_METRICS),
        },
        "docs/configuration.md": {"tables: sections": section_tables(find_sections())},
    }
    return {path: filled((ROOT / path).read_text(encoding="utf-8"), made) for path, made in tables.items()}


def filled(page: str, tables: Mapping[str, str]) -> str:
    """Put each table between its mark, an HTML comment, and the next end mark."""
    for mark, made in tables.items():
        head, _, rest = page.partition(f"<!-- {mark} -->")
        _, end, tail = rest.partition("<!-- end -->")
        if not end:
            raise ValueError(f"the page has no mark {mark!r} with an end mark after it")
        page = f"{head}<!-- {mark} -->\n\n{made}\n\n{end}{tail}"
    return page


def main() -> None:
    for path, page in pages().items():
        (ROOT / path).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
