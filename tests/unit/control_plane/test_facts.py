"""The four facts: each table of moves, checked move by move, and what permits a step."""

import enum
from collections.abc import Mapping
from typing import Any

import pytest

from control_plane.engine.facts import (
    INTAKE_MOVES,
    LINK_MOVES,
    RESIDENCY_MOVES,
    WEIGHTS_MOVES,
    Facts,
    Intake,
    Link,
    Residency,
    Weights,
    move,
)
from plugins.errors import InvariantBroken

# Written out a second time on purpose: a change of a table is a change of a promise.
LEGAL = {
    "Intake": "OPEN>PAUSED OPEN>DRAINING PAUSED>OPEN PAUSED>DRAINING DRAINING>OPEN",
    "Residency": "RESIDENT>SUSPENDING SUSPENDING>ASLEEP SUSPENDING>RESIDENT ASLEEP>WAKING WAKING>RESIDENT "
    "WAKING>ASLEEP",
    "Weights": "VALID>UPDATING VALID>NEEDS_WEIGHTS UPDATING>VALID UPDATING>NEEDS_WEIGHTS NEEDS_WEIGHTS>UPDATING",
    "Link": "CONNECTING>LIVE CONNECTING>LOST CONNECTING>FAILED LIVE>LOST LIVE>FAILED LOST>CONNECTING LOST>FAILED "
    "FAILED>CONNECTING",
}


@pytest.mark.parametrize(
    ("states", "moves"),
    [(Intake, INTAKE_MOVES), (Residency, RESIDENCY_MOVES), (Weights, WEIGHTS_MOVES), (Link, LINK_MOVES)],
)
def test_each_fact_makes_its_legal_moves_and_no_other(
    states: type[enum.Enum], moves: Mapping[Any, frozenset[Any]]
) -> None:
    legal = {tuple(pair.split(">")) for pair in LEGAL[states.__name__].split()}

    for now in states:
        for to in states:
            if now is to or (now.name, to.name) in legal:
                assert move(moves, now, to) is to
            else:
                with pytest.raises(InvariantBroken, match=f"cannot move from {now.name} to {to.name}"):
                    move(moves, now, to)


def test_a_step_runs_only_when_every_fact_permits_it() -> None:
    live = Facts(link=Link.LIVE)
    draining = Facts(link=Link.LIVE, intake=Intake.DRAINING)
    refusing = [
        Facts(),
        Facts(link=Link.LOST),
        Facts(link=Link.LIVE, intake=Intake.PAUSED),
        Facts(link=Link.LIVE, weights=Weights.UPDATING),
        Facts(link=Link.LIVE, residency={"weights": Residency.RESIDENT, "kv_cache": Residency.ASLEEP}),
    ]

    assert live.permit_step
    assert draining.permit_step
    assert [facts.permit_step for facts in refusing] == [False] * 5
