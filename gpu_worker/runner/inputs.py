"""Turns the chunks of a step into every tensor that the step reads.

A pure function: the row table is read, nothing is changed, nothing waits for the device. What rows are is the
business of `row_table.py`; what is done with the tensors that of the model, the attention and the sampler.

Shapes: S = sequences of the step, T = their new tokens together, R = sequences that sample, K = KV heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.attention.groups import AttentionGroup, AttentionShape
from gpu_worker.runner.row_table import RowTable
from gpu_worker.sampling.sampler import SamplingInputs
from plugins.logits import LogitsContext
from plugins.types import Chunk

Ints = npt.NDArray[np.int64]

# One more attention call a layer costs as much as reading this many blocks of padding: 35 us against 0.7 us a block
# (bfloat16, 3 KV heads, one thread).
MAX_PADDING_BLOCKS = 48


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Every tensor of one step. Tokens lie side by side, sequence after sequence, in the order of `groups`."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64: each token's place in its sequence, from 0
    write_slots: Tensor  # [T * K] int64: where each token's keys and values go, as KVCache.write wants it
    groups: tuple[AttentionGroup, ...]
    rows: Ints  # [S]
    starts: Ints  # [S]: position of the first new token of each row
    num_tokens: Ints  # [S]: new tokens of each row
    sampled_rows: Ints  # [R]: the rows whose known tokens end in this step
    logits_indices: Tensor  # [R] int64: their last tokens, in [0, T)
    sampling: SamplingInputs  # one entry per sampled row
    context: LogitsContext  # the same rows, as logits processors see them


@dataclass(frozen=True, slots=True)
class _Spans:
    """The sequences of a step on the host, equal lengths side by side. Every array is [S]."""

    rows: Ints
    num_tokens: Ints
    starts: Ints  # position of the first new token
    ends: Ints  # one past the last
    offsets: Ints  # index of the first new token in the step


def build_inputs(
    chunks: Sequence[Chunk], table: RowTable, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> StepInputs:
    """Lay the chunks out for one forward pass.

    The table has applied the plan: rows are admitted, and their blocks cover every token of their chunks.
    At least one chunk; no row twice. `dtype` is that of the attention masks.
    """
    spans = _lay_out(chunks, table)
    rows_T = np.repeat(spans.rows, spans.num_tokens)
    positions_T = np.arange(len(rows_T)) - np.repeat(spans.offsets - spans.starts, spans.num_tokens)
    token_ids = table.token_ids_at(_tensor(rows_T, device), _tensor(positions_T, device))

    is_sampled = spans.ends == table.num_tokens[spans.rows]
    sampled_rows = spans.rows[is_sampled]
    last_R = (spans.offsets + spans.num_tokens - 1)[is_sampled]
    logits_indices = _tensor(last_R, device)
    return StepInputs(
        token_ids=token_ids,
        positions=_tensor(positions_T, device),
        write_slots=_tensor(_write_slots(rows_T, positions_T, table, shape), device),
        groups=_groups(spans, table, shape, dtype, device),
        rows=spans.rows,
        starts=spans.starts,
        num_tokens=spans.num_tokens,
        sampled_rows=sampled_rows,
        logits_indices=logits_indices,
        sampling=table.sampling_inputs(sampled_rows),
        context=_context(sampled_rows, token_ids[logits_indices], positions_T[last_R], device),
    )


def _lay_out(chunks: Sequence[Chunk], table: RowTable) -> _Spans:
    """Sort by number of new tokens, then by context, so that decodes of similar length are neighbours."""
    rows = np.array([chunk.row for chunk in chunks], dtype=np.int64)
    num_tokens = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    starts = table.num_computed[rows]
    order = np.lexsort((starts, num_tokens))
    rows, num_tokens, starts = rows[order], num_tokens[order], starts[order]
    return _Spans(rows, num_tokens, starts, starts + num_tokens, np.cumsum(num_tokens) - num_tokens)


def _write_slots(rows_T: Ints, positions_T: Ints, table: RowTable, shape: AttentionShape) -> Ints:
    blocks_T = table.block_table[rows_T, positions_T // shape.block_size]
    heads_TK = blocks_T[:, None] * shape.num_kv_heads + np.arange(shape.num_kv_heads)
    return (heads_TK * shape.block_size + (positions_T % shape.block_size)[:, None]).reshape(-1)


def _groups(
    spans: _Spans, table: RowTable, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionGroup, ...]:
    """Cut the spans into runs of equal query length whose padding costs less than another call."""
    num_blocks = -(-spans.ends // shape.block_size)
    groups: list[AttentionGroup] = []
    first, padding = 0, 0
    for i in range(1, len(spans.rows) + 1):
        if i < len(spans.rows) and spans.num_tokens[i] == spans.num_tokens[first]:
            padding += int(num_blocks[i] - num_blocks[i - 1]) * (i - first)
            if padding <= MAX_PADDING_BLOCKS:
                continue
        groups.append(_group(spans, slice(first, i), int(num_blocks[i - 1]), table, shape, dtype, device))
        first, padding = i, 0
    return tuple(groups)


def _group(
    spans: _Spans,
    run: slice,
    num_blocks: int,
    table: RowTable,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionGroup:
    rows_B, starts_B, num_new = spans.rows[run], spans.starts[run], int(spans.num_tokens[run.start])
    start = int(spans.offsets[run.start])
    blocks_B1P = table.block_table[rows_B, None, :num_blocks]
    heads_BKP = blocks_B1P * shape.num_kv_heads + np.arange(shape.num_kv_heads)[:, None]
    return AttentionGroup(
        start=start,
        end=start + len(rows_B) * num_new,
        num_sequences=len(rows_B),
        heads=_tensor(heads_BKP.reshape(-1), device),
        mask=_mask(_tensor(starts_B, device), num_new, num_blocks * shape.block_size, shape, dtype),
    )


def _mask(starts_B: Tensor, num_new: int, num_slots: int, shape: AttentionShape, dtype: torch.dtype) -> Tensor:
    """A query sees its own position and those before it. One query row serves all heads of a lone token."""
    device = starts_B.device
    queries_BQ1 = (starts_B[:, None] + torch.arange(num_new, device=device))[:, :, None]
    is_hidden_BQL = torch.arange(num_slots, device=device) > queries_BQ1
    mask_BQL = torch.zeros(is_hidden_BQL.shape, dtype=dtype, device=device).masked_fill_(is_hidden_BQL, -torch.inf)
    if num_new > 1:
        mask_BQL = mask_BQL.repeat_interleave(shape.group_size, dim=1)
    mask_BKQL = mask_BQL[:, None].expand(-1, shape.num_kv_heads, -1, -1)
    return mask_BKQL.reshape(len(starts_B) * shape.num_kv_heads, -1, num_slots)


def _context(rows_R: Ints, input_ids_R: Tensor, positions_R: Ints, device: torch.device) -> LogitsContext:
    """One row of logits per sequence, because there are no drafts."""
    rows = _tensor(rows_R, device)
    return LogitsContext(
        expanded_idx_mapping=rows,
        expanded_local_pos=torch.zeros_like(rows),
        idx_mapping=rows,
        idx_mapping_np=rows_R,
        input_ids=input_ids_R,
        pos=_tensor(positions_R, device),
        seq_lens_upper_bound_np=positions_R + 1,
    )


def _tensor(array: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
