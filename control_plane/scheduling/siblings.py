"""Sequences that wait for a sibling: once its prompt is computed they share its blocks instead of computing their own.

Knows who waits for whom; whose prompt is computed is the scheduler's business.
"""

from collections.abc import Mapping

from control_plane.scheduling.sequence import Sequence
from plugins.types import RequestId


class Siblings:
    """The sequences that are held back, by the request that they name. Owned by one scheduler.

    Invariant: `num_tokens` are the known tokens of all that are held.
    """

    def __init__(self) -> None:
        self._held: dict[RequestId, list[Sequence]] = {}
        self.num_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def leaders(self) -> tuple[RequestId, ...]:
        """Who is waited for."""
        return tuple(self._held)

    def hold(self, sequence: Sequence, leader_id: RequestId) -> None:
        """Let a sequence wait for another one."""
        self._held.setdefault(leader_id, []).append(sequence)
        self.num_tokens += sequence.num_known

    def discard(self, sequence: Sequence) -> bool:
        """Hold a sequence no longer, for it has ended; False if it was not held."""
        leader_id = sequence.request.sibling_of
        held = self._held.get(leader_id) if leader_id is not None else None
        if held is None or sequence not in held:
            return False
        held.remove(sequence)
        self.num_tokens -= sequence.num_known
        return True

    def take(self, leader_id: RequestId) -> list[Sequence]:
        """Take out all that wait for this one, in the order in which they came."""
        taken = self._held.pop(leader_id, [])
        self.num_tokens -= sum(sequence.num_known for sequence in taken)
        return taken


def leader_of(sequence: Sequence, sequences: Mapping[RequestId, Sequence]) -> Sequence | None:
    """The sibling that a sequence names, unless that name is another prompt's by now, or its own.

    None also for one whose prompt is told about: it computes all of it.
    """
    request = sequence.request
    leader = None if request.sibling_of is None else sequences.get(request.sibling_of)
    if leader is None or leader is sequence or sequence.tells_prompt:
        return None
    if leader.request.cache_salt != request.cache_salt:
        return None
    return leader if leader.request.prompt_token_ids == request.prompt_token_ids else None
