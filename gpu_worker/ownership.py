"""Decides who owns a worker, and whether a plan is the owner's next one.

Pure: time comes from an injected clock, and streams are the business of `gpu_worker/service.py`.
"""

from collections.abc import Callable
from typing import Final

from plugins.errors import PlanOutOfOrder, WorkerOwned

MAX_PLANS_AHEAD: Final = 8  # plans without an answer; the control plane sends 2, the rest is room for its successors


class Ownership:
    """Who owns one worker. Called from the worker's event loop alone.

    Each taking of the worker opens an epoch, counted by the worker itself, so that what belongs to an earlier
    one can be told apart. Invariant: the open epoch is the last one given, or no epoch is open.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s  # how long an owner keeps the worker after its stream ended
        self._clock = clock  # seconds, monotonic
        self._owner_id: str | None = None
        self._epoch = 0
        self._is_open = False
        self._ended_at = 0.0
        self._last_seq = 0
        self._num_unanswered = 0

    @property
    def lease_s(self) -> float:
        return self._lease_s

    @property
    def epoch(self) -> int:
        """The last epoch that was given; 0 before the first."""
        return self._epoch

    def take(self, owner_id: str) -> int:
        """Give the worker to an owner and open an epoch. The same owner replaces its own stream at once.

        Raises: WorkerOwned: another owner's stream is open, or its lease runs.
        """
        if self._owner_id is not None and self._owner_id != owner_id:
            lease_left_s = self._lease_s if self._is_open else self._ended_at + self._lease_s - self._clock()
            if self._is_open or lease_left_s > 0:
                raise WorkerOwned(self._owner_id, lease_left_s)
        self._owner_id = owner_id
        self._epoch += 1
        self._is_open = True
        self._last_seq = 0
        self._num_unanswered = 0
        return self._epoch

    def release(self, epoch: int) -> None:
        """The stream of an epoch ended; the lease starts. Nothing happens if the epoch is over already."""
        if self._is_open and epoch == self._epoch:
            self._is_open = False
            self._ended_at = self._clock()

    def accept_plan(self, epoch: int, plan_epoch: int, seq: int) -> None:
        """Let a plan in that came over the stream of `epoch`.

        Raises: PlanOutOfOrder: it is of another epoch, not the next one, or too far ahead of the answers.
        """
        if not self._is_open or epoch != self._epoch or plan_epoch != self._epoch:
            raise PlanOutOfOrder(f"plan {seq} is of epoch {plan_epoch}; the worker's epoch is {self._epoch}")
        if seq != self._last_seq + 1:
            raise PlanOutOfOrder(f"plan {seq} came after plan {self._last_seq} in epoch {epoch}")
        if self._num_unanswered == MAX_PLANS_AHEAD:
            raise PlanOutOfOrder(f"plan {seq} came with {self._num_unanswered} plans unanswered, which is the most")
        self._last_seq = seq
        self._num_unanswered += 1

    def note_answer(self, epoch: int) -> None:
        """The result of a plan was sent."""
        if epoch == self._epoch:
            self._num_unanswered -= 1
