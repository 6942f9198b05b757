"""The queue of sequences that wait for a row.

Keeps them in the order of their places; whose turn it is, and whether there is room, is the scheduler's business.
"""

from heapq import heapify, heappop, heappush

from control_plane.scheduling.sequence import Sequence, State


class WaitingQueue:
    """Sequences in the order of their places. Owned by one scheduler.

    Whoever leaves from the middle is only marked, by its state, and swept when it comes to the front or when half
    of the entries are such: adding, leaving and taking cost O(log n), and a long queue costs nothing while it waits.
    Invariant: a sequence that is WAITING and was added has exactly one entry.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._num_gone = 0
        self.num_tokens = 0  # known tokens of all that wait

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into its place."""
        heappush(self._heap, (sequence.place, sequence))
        self.num_tokens += sequence.num_known

    def first(self) -> Sequence | None:
        """The one with the smallest place; it stays in the queue."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.state is State.WAITING:
                return sequence
            heappop(self._heap)
            self._num_gone -= 1
        return None

    def take_first(self) -> None:
        """Take out what `first` returned."""
        _, sequence = heappop(self._heap)
        self.num_tokens -= sequence.num_known

    def drop_in_flight(self, sequence: Sequence) -> None:
        """No plan names one of them any more: it has the tokens that have come."""
        self.num_tokens -= sequence.drop_in_flight()

    def note_gone(self, sequence: Sequence) -> None:
        """One of them has ended: its state says so already."""
        self.num_tokens -= sequence.num_known
        self._num_gone += 1
        if self._num_gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].state is State.WAITING]
            heapify(self._heap)
            self._num_gone = 0
