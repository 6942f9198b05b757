"""The four facts about a worker that together decide whether it may be given work.

Four small state machines, not one big one: each has its table of legal moves, and a step runs only when all permit it.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from plugins.errors import InvariantBroken


class Intake(enum.Enum):
    """Whether new requests are taken, and whether those at hand move."""

    OPEN = "open"
    PAUSED = "paused"  # nothing is planned; new requests wait
    DRAINING = "draining"  # requests at hand go on; new ones are refused


class Residency(enum.Enum):
    """Where the memory of one tag (weights, kv_cache) is."""

    RESIDENT = "resident"
    SUSPENDING = "suspending"
    ASLEEP = "asleep"
    WAKING = "waking"


class Weights(enum.Enum):
    """Whether the weights may be computed with."""

    VALID = "valid"
    UPDATING = "updating"
    NEEDS_WEIGHTS = "needs_weights"


class Link(enum.Enum):
    """The step stream to the worker."""

    CONNECTING = "connecting"
    LIVE = "live"
    LOST = "lost"  # will be connected again
    FAILED = "failed"  # will not, until someone acts


INTAKE_MOVES: Mapping[Intake, frozenset[Intake]] = {
    Intake.OPEN: frozenset({Intake.PAUSED, Intake.DRAINING}),
    Intake.PAUSED: frozenset({Intake.OPEN, Intake.DRAINING}),
    Intake.DRAINING: frozenset({Intake.OPEN}),
}
RESIDENCY_MOVES: Mapping[Residency, frozenset[Residency]] = {
    Residency.RESIDENT: frozenset({Residency.SUSPENDING}),
    Residency.SUSPENDING: frozenset({Residency.ASLEEP, Residency.RESIDENT}),
    Residency.ASLEEP: frozenset({Residency.WAKING}),
    Residency.WAKING: frozenset({Residency.RESIDENT, Residency.ASLEEP}),
}
WEIGHTS_MOVES: Mapping[Weights, frozenset[Weights]] = {
    Weights.VALID: frozenset({Weights.UPDATING, Weights.NEEDS_WEIGHTS}),
    Weights.UPDATING: frozenset({Weights.VALID, Weights.NEEDS_WEIGHTS}),
    Weights.NEEDS_WEIGHTS: frozenset({Weights.UPDATING}),
}
LINK_MOVES: Mapping[Link, frozenset[Link]] = {
    Link.CONNECTING: frozenset({Link.LIVE, Link.LOST, Link.FAILED}),
    Link.LIVE: frozenset({Link.LOST, Link.FAILED}),
    Link.LOST: frozenset({Link.CONNECTING, Link.FAILED}),
    Link.FAILED: frozenset({Link.CONNECTING}),
}

Fact = TypeVar("Fact", bound=enum.Enum)


def move(moves: Mapping[Fact, frozenset[Fact]], now: Fact, to: Fact) -> Fact:
    """Return `to` if the table allows it; staying is always allowed. Raises: InvariantBroken: it does not."""
    if to is not now and to not in moves[now]:
        legal = ", ".join(sorted(state.name for state in moves[now]))
        raise InvariantBroken(f"{type(now).__name__} cannot move from {now.name} to {to.name}; legal: {legal}")
    return to


def _resident() -> dict[str, Residency]:
    return {"weights": Residency.RESIDENT, "kv_cache": Residency.RESIDENT}


@dataclass(slots=True)
class Facts:
    """The four facts of one worker. Owned by the engine core; others read."""

    intake: Intake = Intake.OPEN
    link: Link = Link.CONNECTING
    weights: Weights = Weights.VALID
    residency: dict[str, Residency] = field(default_factory=_resident)  # by memory tag

    def move_intake(self, to: Intake) -> None:
        """Open, pause or drain. Raises: InvariantBroken: not a legal move."""
        self.intake = move(INTAKE_MOVES, self.intake, to)

    def move_link(self, to: Link) -> None:
        """Note what became of the step stream. Raises: InvariantBroken: not a legal move."""
        self.link = move(LINK_MOVES, self.link, to)

    @property
    def permit_step(self) -> bool:
        """True if a plan may be handed out now."""
        return (
            self.link is Link.LIVE
            and self.intake is not Intake.PAUSED
            and self.weights is Weights.VALID
            and all(residency is Residency.RESIDENT for residency in self.residency.values())
        )
