"""What `make simulate` tells, and when it fails."""

import io
import os
import subprocess
import sys
from collections import Counter

import pytest
from rich.console import Console

from tests.simulation import __main__ as command
from tests.simulation.__main__ import Failure, Summary, tell
from tests.simulation.faults import Point
from tests.simulation.world import Report


def report(seed: int, trace: str = "00") -> Report:
    fired = Counter({Point.FREEZE: 2})
    return Report(seed, trace, fired, Counter({Point.FREEZE: 1}), Counter({("queued", "abort"): 3}), Counter())


def told(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=100)
    tell(summary, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_failure_is_told_with_the_command_that_repeats_it() -> None:
    summary = Summary()
    summary.add(Failure(123, "AssertionError: r1 was lost", "a traceback"))

    text = told(summary)

    assert "seed 123: AssertionError: r1 was lost\n    make simulate SEED=123" in text
    assert "1 seed, 1 failure, trace" in text


def test_only_ends_are_among_the_ends_of_requests() -> None:
    summary = Summary()
    summary.seen.update({"LENGTH": 3, "BlocksStored": 5, "culprit found after 2 deaths": 1})

    ends, _, others = told(summary).partition("also seen")

    assert "LENGTH" in ends and "LENGTH" not in others
    assert "BlocksStored" in others and "culprit" in others


@pytest.mark.parametrize("number", ["0", "-5", "many"])
def test_no_seeds_are_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main([f"--seeds={number}"])

    assert caught.value.code == 2
    assert f"--seeds: invalid natural value: '{number}'" in capsys.readouterr().err


def test_the_table_has_what_fired_and_what_fired_with_a_live_request() -> None:
    summary = Summary()
    summary.add(report(1))
    summary.add(report(2))

    row = next(line for line in told(summary).splitlines() if "worker freezes" in line)

    assert [cell.strip() for cell in row.strip("│").split("│")] == ["worker freezes", "4", "2"]


def test_the_trace_of_many_seeds_does_not_depend_on_who_came_first() -> None:
    there, back, other = Summary(), Summary(), Summary()
    for seed in (1, 2):
        there.add(report(seed, f"{seed}"))
        back.add(report(3 - seed, f"{3 - seed}"))
        other.add(report(seed, "0"))

    assert there.trace == back.trace != other.trace


def test_a_point_that_fired_too_seldom_is_a_gap_and_so_is_a_pair_that_was_never_seen() -> None:
    summary = Summary()
    summary.fired_live.update(dict.fromkeys(Point, 100))
    summary.pairs.update(dict.fromkeys(command.PAIRS, 1))
    assert summary.gaps() == []

    summary.fired_live[Point.LEAVE] = 99
    summary.pairs["homeless", "crash"] = 0

    assert summary.gaps() == ["worker leaves and comes back: 99", "homeless and crash: never"]


def test_a_seed_tells_the_same_story_in_every_process() -> None:
    traces = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", "5"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},  # the order of sets of names
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]

    assert traces[0].startswith("trace ") and traces[0].endswith(": no promise broken\n")
    assert traces[0] == traces[1]


def test_one_seed_that_breaks_a_promise_is_told_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "play", lambda seeds: [Failure(seed, "broken", "the traceback") for seed in seeds])

    code = command.main(["--seed", "5"])

    assert code == 1
    assert capsys.readouterr().out == "the traceback\n"
