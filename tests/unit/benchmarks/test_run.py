"""What the command decides: which workloads, whether the runs were clean, what the tables say."""

from io import StringIO

import pytest
from rich.console import Console

from benchmarks.report import markdown_table, rich_table
from benchmarks.run import choose, is_clean
from plugins.errors import InvalidConfig

CLEAN = {"errors": 0, "wrong_prompt_lengths": 0, "wrong_output_lengths": 0}


def test_workloads_are_chosen_by_name() -> None:
    assert [workload.num_clients for workload in choose("W5,W2")] == [1, 8]


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match=r"no workload is called W9; there are W1, W2, W3, W4, W5"):
        choose("W1,W9")


@pytest.mark.parametrize("fault", ["errors", "wrong_prompt_lengths", "wrong_output_lengths"])
def test_one_fault_in_one_run_makes_the_whole_unclean(fault: str) -> None:
    assert is_clean([[CLEAN, CLEAN], [CLEAN]])
    assert not is_clean([[CLEAN, CLEAN | {fault: 1}], [CLEAN]])


def test_the_table_puts_the_runs_of_a_workload_side_by_side() -> None:
    run = CLEAN | {"output_tokens_per_s": 48.91, "ttft_ms_p50": 98.52, "requests": 6}

    table = markdown_table({"W1": [run, run | {"output_tokens_per_s": 1048.5, "ttft_ms_p50": None}]})

    lines = table.splitlines()
    assert lines[0].startswith("| workload | output tok/s | TTFT p50 ms |")
    assert lines[2].startswith("| W1 | 48.91 / 1048 | 98.52 / - | - / - |")


def test_the_terminal_shows_a_line_for_each_run_and_cuts_nothing_off() -> None:
    run = dict.fromkeys(
        ("output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "foreign_cpu_percent"),
        12345.6,
    )
    console = Console(width=80, record=True, file=StringIO())

    console.print(rich_table({"W1": [CLEAN | run], "W3": [CLEAN | run, CLEAN | run]}))

    text = console.export_text()
    assert [name for name in ("W1.1", "W1.2", "W3.1", "W3.2") if name in text] == ["W1.1", "W3.1", "W3.2"]
    assert "…" not in text
    assert all(word in text for word in ("output", "TTFT", "p50 ms", "foreign", "CPU %"))
