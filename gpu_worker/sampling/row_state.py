"""What a built-in stage keeps of its rows: which of them asked, and with which numbers.

Knows nothing of what the numbers mean; that is the business of the stages. Shapes: N = rows of the worker,
R = rows of logits, S = sequences that sample, A = rows of logits of askers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plugins.logits import LogitsContext
from plugins.types import Row


class Askers:
    """The rows whose occupants asked for a stage. Kept on the host: a step is laid out there, nothing waits."""

    def __init__(self, num_rows: int) -> None:
        self._is_asker = np.zeros(num_rows, dtype=np.bool_)

    def mark(self, row: Row, is_asker: bool) -> bool:
        """Say whether the row's new occupant asked. Returns the same."""
        self._is_asker[row] = is_asker
        return is_asker

    def find(self, ctx: LogitsContext) -> Tensor | None:
        """Return which rows of logits are the askers': [A] int64, on the device; None if none are."""
        is_asker_S = self._is_asker[ctx.idx_mapping_np]
        if not is_asker_S.any():
            return None
        rows_R = ctx.expanded_idx_mapping
        if rows_R is ctx.idx_mapping:  # one row of logits each, in the order that the host knows
            return torch.from_numpy(np.flatnonzero(is_asker_S)).to(rows_R.device)
        return torch.from_numpy(self._is_asker).to(rows_R.device)[rows_R].nonzero().squeeze(1)

    def max_len(self, ctx: LogitsContext) -> int:
        """Return a length that no asker's sequence passes; there is one in the batch."""
        return int(ctx.seq_lens_upper_bound_np[self._is_asker[ctx.idx_mapping_np]].max())


class StagedTable:
    """One line of numbers per row: written on the host when a row is taken, on the device with the next step."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._lines_NK = torch.zeros((num_rows, width), dtype=dtype, device=device)
        self._staged: dict[Row, npt.NDArray[Any]] = {}
        self._dtype = torch.zeros(0, dtype=dtype).numpy().dtype

    def put(self, row: Row, numbers: Sequence[float]) -> None:
        """Stage a line, filled up with its own first number. Raises: ValueError: it is empty or too long."""
        width = self._lines_NK.shape[1]
        if not 1 <= len(numbers) <= width:
            raise ValueError(f"{len(numbers)} numbers do not fit; a row holds 1 to {width}")
        line = np.full(width, numbers[0], dtype=self._dtype)
        line[: len(numbers)] = numbers
        self._staged[row] = line

    def flush(self) -> None:
        """Bring what is staged to the device."""
        if not self._staged:
            return
        device = self._lines_NK.device
        rows = torch.tensor(list(self._staged), device=device)
        self._lines_NK.index_copy_(0, rows, torch.from_numpy(np.stack(list(self._staged.values()))).to(device))
        self._staged.clear()

    def lines(self, rows_A: Tensor, width: int) -> Tensor:
        """Return the first numbers of some rows' lines: [A, width]."""
        return self._lines_NK[:, :width].index_select(0, rows_A)


class TokenLists:
    """One list of tokens per row. Lists are read side by side, the shorter ones filled up with their own first token:
    whoever writes one value per token writes that one twice, and the same."""

    def __init__(self, num_rows: int, max_tokens: int, device: torch.device) -> None:
        self._tokens = StagedTable(num_rows, max_tokens, torch.int64, device)
        self._num_tokens = np.zeros(num_rows, dtype=np.int64)

    def put(self, row: Row, token_ids: Sequence[int]) -> None:
        """Stage a row's list. Raises: ValueError: it is empty or too long."""
        self._tokens.put(row, token_ids)
        self._num_tokens[row] = len(token_ids)

    def drop(self, row: Row) -> None:
        """The row has no list."""
        self._num_tokens[row] = 0

    def flush(self) -> None:
        """Bring what is staged to the device."""
        self._tokens.flush()

    def max_len(self, ctx: LogitsContext) -> int:
        """Return the length of the batch's longest list."""
        return int(self._num_tokens[ctx.idx_mapping_np].max())

    def read(self, rows_A: Tensor, ctx: LogitsContext) -> Tensor:
        """Return the lists of some rows: [A, K], K the length of the batch's longest."""
        return self._tokens.lines(rows_A, self.max_len(ctx))
