"""The whole control plane under drawn faults: 300 seeds, and the same seed twice.

`make simulate` plays more of them; `mutants/` shows that these would notice a bug.
"""

import pytest
from rich.console import Console

from tests.simulation.__main__ import PAIRS, Failure, Summary, play, play_all, play_one
from tests.simulation.faults import Point

SEEDS = range(300)
MORE_SEEDS = range(1_000, 6_000)
RARE_PAIRS = {("preempted", "abort"), ("preempted", "deadline"), ("preempted", "crash")}  # too rare for 300 seeds


def play_many(seeds: range) -> Summary:
    summary = Summary()
    for outcome in play(seeds):
        summary.add(outcome)
    return summary


def broken(summary: Summary) -> list[str]:
    return [f"make simulate SEED={failure.seed}: {failure.message}" for failure in summary.failures]


def test_every_seed_keeps_every_promise_and_meets_every_fault() -> None:
    summary = play_many(SEEDS)

    assert broken(summary) == []
    # A simulation that never met these has shown nothing about them.
    assert [point.value for point in Point if not summary.fired_live[point]] == []
    assert [pair for pair in PAIRS if pair not in RARE_PAIRS and not summary.pairs[pair]] == []


def test_the_same_seed_tells_the_same_story() -> None:
    first, again, other = play_one(7), play_one(7), play_one(8)

    assert not isinstance(first, Failure) and not isinstance(again, Failure) and not isinstance(other, Failure)
    assert first == again
    assert first.trace != other.trace


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_more_seeds() -> None:
    summary = play_all(MORE_SEEDS, Console(quiet=True))

    assert broken(summary) == []
