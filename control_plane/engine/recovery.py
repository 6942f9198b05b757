"""The requests whose worker went away: who waits for another one, and who is suspected of having killed it.

Keeps them; where they go is decided in `control_plane/engine/core.py`.
"""

from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from control_plane.engine.live import Live
from plugins.types import GenerationId

ALONE_IN_DOUBT: Final = 1 + 1e-9  # the blame for one whole death, which chance may bring upon anybody once


def _arrival(live: Live) -> int:
    return live.request.arrival


def judge_death(lost: Collection[Live]) -> set[Live]:
    """A worker died with these requests in its plans. Share the blame, and return those that are suspected.

    Whoever had settled on the worker is above suspicion if somebody had not; if all had, anybody may have done it,
    and nobody is blamed. The blame for a death is 1, shared by those who had not settled: equally, but who was tried
    there as a suspect bears half of it, however many newcomers stood beside it. So who was in doubt when a worker died
    is the culprit when the next one dies of it alone, and when the next two do in any company; and workers that are
    killed from outside cost nobody anything, however often, unless two strike one request that has not settled.
    """
    unsettled = {live for live in lost if not live.is_settled}
    tried = {live for live in unsettled if live.is_suspect}
    newcomers = unsettled - tried
    for group in filter(None, (tried, newcomers)):
        share = 0.5 if tried and newcomers else 1.0
        for live in group:
            live.blame += share / len(group)
    return unsettled or set(lost)


def is_culprit(live: Live) -> bool:
    """True if a request has to answer for so much that no further worker is risked."""
    return live.blame > ALONE_IN_DOUBT


@dataclass(slots=True)
class _Ward:
    """The requests of one generation that have no worker, each list oldest first."""

    homeless: list[Live] = field(default_factory=list)
    suspects: list[Live] = field(default_factory=list)
    orphaned_at_s: float | None = None  # when the generation's last worker went away; None: it has one


class Recovery:
    """Requests without a worker. Owned by the engine core.

    A request that was in a plan of a worker that died is suspected: perhaps it is what kills workers. Suspects are
    tried one at a time on each worker until it has settled there; all others go back to work at once.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s  # how long a generation may be without a worker
        self._wards: dict[GenerationId, _Ward] = {}

    def __len__(self) -> int:
        return sum(len(ward.homeless) + len(ward.suspects) for ward in self._wards.values())

    def add(self, live: Live) -> None:
        """Keep a request until it has a worker."""
        ward = self._wards.setdefault(live.generation, _Ward())
        insort(ward.suspects if live.is_suspect else ward.homeless, live, key=_arrival)

    def discard(self, live: Live) -> None:
        """Keep a request no longer, if it was kept: it has ended."""
        ward = self._wards.get(live.generation)
        if ward is not None:
            kept = ward.suspects if live.is_suspect else ward.homeless
            if live in kept:
                kept.remove(live)
            self._tidy(live.generation)

    def take_homeless(self, generation: GenerationId) -> list[Live]:
        """Take out all that are not suspected, oldest first: a worker is there."""
        ward = self._wards.get(generation)
        if ward is None:
            return []
        homeless, ward.homeless = ward.homeless, []
        self._tidy(generation)
        return homeless

    def take_suspect(self, generation: GenerationId) -> Live | None:
        """Take out the oldest suspect, to be tried."""
        ward = self._wards.get(generation)
        if ward is None or not ward.suspects:
            return None
        suspect = ward.suspects.pop(0)
        self._tidy(generation)
        return suspect

    def note_orphaned(self, generation: GenerationId, now_s: float) -> None:
        """The generation has no worker any more: from now on its requests wait for so long at most."""
        ward = self._wards.get(generation)
        if ward is not None and ward.orphaned_at_s is None:
            ward.orphaned_at_s = now_s

    def note_adopted(self, generation: GenerationId) -> None:
        """The generation has a worker."""
        ward = self._wards.get(generation)
        if ward is not None:
            ward.orphaned_at_s = None

    def expired(self, now_s: float) -> Iterable[tuple[Live, float]]:
        """Take out those that have waited too long, with how long they waited."""
        late: list[tuple[Live, float]] = []
        for generation, ward in tuple(self._wards.items()):
            if ward.orphaned_at_s is not None and now_s - ward.orphaned_at_s >= self._timeout_s:
                late += [(live, now_s - ward.orphaned_at_s) for live in (*ward.homeless, *ward.suspects)]
                del self._wards[generation]
        return late

    def next_expiry_s(self) -> float | None:
        """When `expired` will first have something to return; None: never, as things are."""
        times = [ward.orphaned_at_s for ward in self._wards.values() if ward.orphaned_at_s is not None]
        return min(times) + self._timeout_s if times else None

    def _tidy(self, generation: GenerationId) -> None:
        ward = self._wards[generation]
        if not ward.homeless and not ward.suspects:
            del self._wards[generation]
