"""What the requests in a worker's rows asked of a processor: written on the host, read on the device.

Knows rows and columns of numbers; what they mean is the business of the processor that has them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from plugins.logits import LogitsContext, RequestStates
from plugins.types import Row

if TYPE_CHECKING:
    from torch import Tensor

Number = int | float


class Chosen(NamedTuple):
    """The rows of a step's logits that a processor works on. K = how many."""

    rows: "Tensor"  # [K] int64, into the logits
    req_idx: "Tensor"  # [K] int64: whose they are
    is_wanted: "Tensor | None"  # [K] bool: the others are computed in vain, and stay as they are; None: all are wanted

    def only(self, is_meant_K: "Tensor") -> "Chosen":
        """Leave some rows out."""
        if self.is_wanted is not None:
            return self._replace(is_wanted=self.is_wanted & is_meant_K)
        return Chosen(self.rows[is_meant_K], self.req_idx[is_meant_K], None)


class StagedRows:
    """One line of numbers for each row of a worker. Owned by one processor; its device thread alone calls it.

    Invariants: after `flush` the device has what the host has; a row that was not accepted is idle.
    """

    def __init__(self, states: RequestStates, columns: Mapping[str, Number | Sequence[Number]]) -> None:
        """`columns` gives each column's name and what an idle row holds: a number, or so many numbers."""
        import torch

        self._device = states.device
        self._picks_rows = states.device.type == "cpu"  # elsewhere it would wait for the device, so all are computed
        self._idle = {name: torch.tensor(idle) for name, idle in columns.items()}
        self._host = {name: idle.repeat(states.max_num_reqs, *[1] * idle.dim()) for name, idle in self._idle.items()}
        self._is_accepted = torch.zeros(states.max_num_reqs, dtype=torch.bool)
        self._is_stale = True
        self.flush()

    def accept(self, row: Row, **values: Number | Sequence[Number]) -> None:
        """Take a row, with a value for each column that is not idle; a short list is filled up with what is idle."""
        import torch

        self._empty(row)
        for name, value in values.items():
            if isinstance(value, Sequence):
                self._host[name][row, : len(value)] = torch.tensor(value)
            else:
                self._host[name][row] = value
        self._is_accepted[row] = True

    def decline(self, row: Row) -> None:
        """Forget whoever had the row."""
        if self._is_accepted[row]:
            self._empty(row)

    def _empty(self, row: Row) -> None:
        for name, host in self._host.items():
            host[row] = self._idle[name]
        self._is_accepted[row] = False
        self._is_stale = True

    def flush(self) -> None:
        """Bring what has changed to the device."""
        if not self._is_stale:
            return
        self._columns = {name: host.to(self._device, copy=True) for name, host in self._host.items()}
        self._is_accepted_there = self._is_accepted.to(self._device, copy=True)
        self._is_stale = False

    def column(self, name: str, chosen: Chosen) -> "Tensor":
        """Return a column at the chosen rows: [K] or [K, width]."""
        return self._columns[name][chosen.req_idx]

    def largest(self, name: str, ctx: LogitsContext) -> int:
        """Return the largest value of a column among the accepted rows of a step. Does not wait for the device."""
        req_idx = ctx.idx_mapping_np
        return int(self._host[name].numpy()[req_idx[self._is_accepted.numpy()[req_idx]]].max())

    def choose(self, ctx: LogitsContext) -> Chosen | None:
        """Choose the rows of a step to work on; None if none was accepted. Does not wait for the device."""
        import torch

        if not self._is_accepted.numpy()[ctx.idx_mapping_np].any():
            return None
        is_accepted_R = self._is_accepted_there[ctx.expanded_idx_mapping]
        if self._picks_rows:
            rows = is_accepted_R.nonzero().flatten()
            return Chosen(rows, ctx.expanded_idx_mapping[rows], None)
        rows = torch.arange(len(is_accepted_R), device=is_accepted_R.device)
        return Chosen(rows, ctx.expanded_idx_mapping, is_accepted_R)


def write_back(logits: "Tensor", changed: "Tensor", chosen: Chosen) -> "Tensor":
    """Put changed scores, [K, V], in their places, in place; rows that are not wanted keep theirs."""
    import torch

    if chosen.is_wanted is not None:
        changed = torch.where(chosen.is_wanted[:, None], changed, logits[chosen.rows])
    logits[chosen.rows] = changed
    return logits
