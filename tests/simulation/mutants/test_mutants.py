"""Every planted bug is found by the seeds of `make test`: the simulation would notice it if it were real."""

from collections import Counter

import pytest

from tests.simulation.__main__ import Failure, play_one
from tests.simulation.mutants import requests, steps
from tests.simulation.mutants.mutant import Mutant

MUTANTS = (*requests.MUTANTS, *steps.MUTANTS)
SEEDS = range(300)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    with mutant.planted():
        is_found = any(isinstance(play_one(seed), Failure) for seed in SEEDS)

    assert is_found, f"{mutant.bug} went unnoticed for {len(SEEDS)} seeds"


def test_each_of_the_first_six_promises_has_two_bugs_at_least() -> None:
    num_bugs = Counter(mutant.promise for mutant in MUTANTS)

    assert all(num_bugs[promise] >= 2 for promise in ("I1", "I2", "I3", "I4", "I5", "I6"))
    assert len(MUTANTS) >= 12
