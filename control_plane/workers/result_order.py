"""Tells which results belong to a step stream: those of its epoch, one per plan, in order.

Pure; where results come from is the business of the handle that asks.
"""

from plugins.errors import PlanOutOfOrder
from plugins.types import StepResult


class ResultOrder:
    """What one opened handle may still expect. Owned by that handle."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._last_seq = 0

    def accepts(self, epoch: int, result: StepResult) -> bool:
        """Tell whether a result is the next one; False is one of an earlier owner, to be discarded.

        Raises: PlanOutOfOrder: it is of a later epoch, or not of the oldest plan without a result.
        """
        if epoch < self._epoch:
            return False
        if epoch > self._epoch or result.seq != self._last_seq + 1:
            raise PlanOutOfOrder(
                f"result {result.seq} of epoch {epoch} came after result {self._last_seq} of epoch {self._epoch}"
            )
        self._last_seq = result.seq
        return True
