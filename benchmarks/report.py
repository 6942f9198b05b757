"""Turns the figures of runs into a table for the terminal and one for a README.

    python -m benchmarks.report benchmarks/results/dihedral.json

prints the second from a results file.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS: Mapping[str, str] = {
    "output_tokens_per_s": "output tok/s",
    "ttft_ms_p50": "TTFT p50 ms",
    "ttft_ms_p99": "TTFT p99 ms",
    "itl_ms_p50": "ITL p50 ms",
    "itl_ms_p99": "ITL p99 ms",
    "requests": "requests",
    "errors": "errors",
    "peak_rss_mib": "peak RSS MiB",
    "foreign_cpu_percent": "foreign CPU %",
}

Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # by workload: one mapping of figures per run


def rich_table(runs: Runs) -> Table:
    """One line per run, narrow enough for a terminal of 80 columns."""
    table = Table("", *(heading.replace(" ", "\n", 1) for heading in COLUMNS.values()), padding=0)
    for name, figures in runs.items():
        for number, run in enumerate(figures, 1):
            table.add_row(f"{name}.{number}", *(_cell([run], column) for column in COLUMNS))
    return table


def markdown_table(runs: Runs) -> str:
    """One line per workload, its runs side by side, for a README."""
    lines = [("workload", *COLUMNS.values()), ("---",) * (1 + len(COLUMNS))]
    lines += [(name, *(_cell(figures, column) for column in COLUMNS)) for name, figures in runs.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(figures: Sequence[Mapping[str, Any]], column: str) -> str:
    return " / ".join(_number(run.get(column)) for run in figures)


def _number(value: float | None) -> str:
    """Four digits say all that a run repeats."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        Console(width=400).print(markdown_table(json.loads(Path(path).read_text())["runs"]), markup=False)
