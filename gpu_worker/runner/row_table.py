"""The sequences that are on a worker: one fixed row each, for its tokens, blocks and sampling parameters.

Knows what each row holds and when it ends; what a step computes is laid out in `inputs.py`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.sampling.sampler import SamplingInputs
from plugins.errors import InvariantBroken
from plugins.types import Admission, BlockId, Chunk, FinishReason, Row, TokenId

Ints = npt.NDArray[np.int64]


class RowTable:
    """Rows in [0, max_sequences). Owned by the model runner; the device thread alone calls it.

    Lengths live on the host and count a token as known from the moment its step is launched; token values live on
    the device. So a step can be laid out while the one before it still runs. It is the `RequestStates` of logits
    processors.

    Invariants: `num_computed <= num_tokens <= max_model_len` in each row; `block_table[row]` names `num_blocks[row]`
    blocks, then the null block; `occupancy[row]` grows by one whenever somebody else moves in.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        max_model_len: int,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        eos_token_ids: Sequence[TokenId],
        device: torch.device,
    ) -> None:
        self._max_model_len = max_model_len
        self._num_pool_blocks = num_blocks
        self._block_size = block_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size

        # On the host. N = max_sequences; a column is [N].
        def column() -> Ints:
            return np.zeros(max_sequences, dtype=np.int64)

        max_row_blocks = -(-max_model_len // block_size)
        self.block_table: Ints = np.full((max_sequences, max_row_blocks), num_blocks, dtype=np.int64)
        self.num_blocks = column()
        self.num_tokens = column()  # known: prompt and output so far
        self.num_computed = column()  # leading tokens whose keys and values are in the cache
        self.num_admitted = column()  # known when the row was admitted
        self.occupancy = column()
        self._end = column()  # num_tokens at which the row has reached its length
        self._is_occupied = np.zeros(max_sequences, dtype=np.bool_)
        self._is_finished = np.zeros(max_sequences, dtype=np.bool_)
        self._stop_token_ids: list[frozenset[TokenId]] = [frozenset()] * max_sequences
        self._temperature = np.zeros(max_sequences, dtype=np.float32)
        self._top_k = column()
        self._top_p = np.ones(max_sequences, dtype=np.float32)
        self._min_p = np.zeros(max_sequences, dtype=np.float32)
        self._seed = np.zeros(max_sequences, dtype=np.uint64)

        # On the device.
        self._token_ids = torch.zeros((max_sequences, max_model_len), dtype=torch.int32, device=device)
        self._prompt_len = torch.zeros(max_sequences, dtype=torch.int32, device=device)
        self._prefill_len = torch.zeros(max_sequences, dtype=torch.int32, device=device)
        self._total_len = torch.zeros(max_sequences, dtype=torch.int32, device=device)

    # -- RequestStates ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._token_ids.device

    @property
    def max_num_reqs(self) -> int:
        return len(self._is_occupied)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def all_token_ids(self) -> Tensor:
        return self._token_ids

    @property
    def prompt_len(self) -> Tensor:
        return self._prompt_len

    @property
    def prefill_len(self) -> Tensor:
        return self._prefill_len

    @property
    def total_len(self) -> Tensor:
        return self._total_len

    # -- what a plan does to rows -------------------------------------------------------------------------------

    @property
    def num_occupied(self) -> int:
        """Rows that hold a sequence."""
        return int(self._is_occupied.sum())

    def clear(self) -> None:
        """Forget every row."""
        self._is_occupied[:] = False

    def release(self, rows: Sequence[Row]) -> None:
        """Forget some rows. Raises: InvariantBroken: one holds nothing."""
        for row in rows:
            self._require_occupied(row, "released")
            self._is_occupied[row] = False

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Let sequences in.

        Raises: InvariantBroken: a row is out of range or taken, or the tokens, blocks and lengths of a sequence
            do not fit each other or the table.
        """
        for admission in admissions:
            self._check_admission(admission)
            row, num_tokens, sampling = admission.row, len(admission.token_ids), admission.sampling
            self._is_occupied[row] = True
            self._is_finished[row] = False
            self.occupancy[row] += 1
            self.block_table[row] = self._num_pool_blocks
            self.num_blocks[row] = 0
            self._append_blocks(row, admission.block_ids)
            self.num_tokens[row] = num_tokens
            self.num_admitted[row] = num_tokens
            self.num_computed[row] = admission.num_cached_tokens
            self._end[row] = self._max_model_len
            if sampling.max_tokens is not None:
                self._end[row] = min(self._max_model_len, admission.num_prompt_tokens + sampling.max_tokens)
            self._stop_token_ids[row] = frozenset(sampling.stop_token_ids)
            if not sampling.ignore_eos:
                self._stop_token_ids[row] |= self._eos_token_ids
            self._temperature[row] = sampling.temperature
            self._top_k[row] = sampling.top_k
            self._top_p[row] = sampling.top_p
            self._min_p[row] = sampling.min_p
            self._seed[row] = sampling.seed or 0
            self._token_ids[row, :num_tokens] = torch.tensor(admission.token_ids, dtype=torch.int32)
            self._prompt_len[row] = admission.num_prompt_tokens
            self._prefill_len[row] = num_tokens
            self._total_len[row] = num_tokens

    def extend(self, chunks: Sequence[Chunk]) -> tuple[BlockId, ...]:
        """Append the new blocks of each chunk to its row, and return them all.

        Raises: InvariantBroken: a row holds nothing or is named twice, or a block is out of range.
        """
        named: set[Row] = set()
        for chunk in chunks:
            self._require_occupied(chunk.row, "in a chunk")
            if chunk.row in named:
                raise InvariantBroken(f"row {chunk.row} has two chunks in one plan")
            named.add(chunk.row)
            self._append_blocks(chunk.row, chunk.new_blocks)
        return tuple(block for chunk in chunks for block in chunk.new_blocks)

    def runnable(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Leave out the chunks of rows that have ended, and check the others.

        Raises: InvariantBroken: a chunk has no tokens or passes what is known of its row, or its blocks do not
            cover its tokens.
        """
        chosen = tuple(
            chunk
            for chunk in chunks
            if not self._is_finished[chunk.row] and self.num_tokens[chunk.row] < self._end[chunk.row]
        )
        for chunk in chosen:
            end = int(self.num_computed[chunk.row]) + chunk.num_tokens
            num_slots = int(self.num_blocks[chunk.row]) * self._block_size
            if chunk.num_tokens < 1 or end > self.num_tokens[chunk.row]:
                raise InvariantBroken(
                    f"row {chunk.row} has {self.num_computed[chunk.row]} tokens computed of "
                    f"{self.num_tokens[chunk.row]} known; a chunk of {chunk.num_tokens} does not fit"
                )
            if end > num_slots:
                raise InvariantBroken(f"row {chunk.row} has blocks for {num_slots} tokens; its chunk ends at {end}")
        return chosen

    # -- what a step does to rows -------------------------------------------------------------------------------

    def token_ids_at(self, rows_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return known tokens: [T] int64."""
        flat = rows_T * self._max_model_len + positions_T
        return self._token_ids.view(-1).index_select(0, flat).long()

    def sampling_inputs(self, rows_R: Ints) -> SamplingInputs:
        """Return how to sample the next token of each row."""
        return SamplingInputs(
            temperature=torch.from_numpy(self._temperature[rows_R]),
            top_k=torch.from_numpy(self._top_k[rows_R]),
            top_p=torch.from_numpy(self._top_p[rows_R]),
            min_p=torch.from_numpy(self._min_p[rows_R]),
            seeds=self._seed[rows_R],
            positions=self.num_tokens[rows_R],
        )

    def advance(self, rows_S: Ints, num_tokens_S: Ints) -> None:
        """The step that computes these tokens is launched."""
        self.num_computed[rows_S] += num_tokens_S

    def append(self, rows_R: Ints, tokens_R: Tensor, is_waiting_R: npt.NDArray[np.bool_]) -> None:
        """Append one sampled token to each row. A negative one, of a row that failed, is kept as token 0.

        A row that waits gets none, and its last token counts as not computed: the next chunk begins with it.
        """
        if is_waiting_R.any():
            self.num_computed[rows_R[is_waiting_R]] -= 1
            goes_on_R = ~is_waiting_R
            rows_R, tokens_R = rows_R[goes_on_R], tokens_R[torch.from_numpy(goes_on_R).to(self.device)]
        rows = torch.from_numpy(rows_R).to(self.device)
        flat = rows * self._max_model_len + torch.from_numpy(self.num_tokens[rows_R]).to(self.device)
        self._token_ids.view(-1).index_copy_(0, flat, tokens_R.clamp(min=0).int())
        self.num_tokens[rows_R] += 1
        self._total_len.index_copy_(0, rows, torch.from_numpy(self.num_tokens[rows_R]).to(self.device).int())

    # -- verdicts -----------------------------------------------------------------------------------------------

    def goes_on(self, row: Row, occupancy: int) -> bool:
        """Say whether the row still holds the sequence that it held then, and that has not ended."""
        return bool(self._is_occupied[row] and self.occupancy[row] == occupancy and not self._is_finished[row])

    def judge(self, row: Row, token_id: TokenId, num_tokens: int) -> FinishReason | None:
        """Say whether a sampled token, which made the row `num_tokens` long, ends it; if so the row is finished."""
        if token_id in self._stop_token_ids[row]:
            reason = FinishReason.STOP
        elif num_tokens >= self._end[row]:
            reason = FinishReason.LENGTH
        else:
            return None
        self._is_finished[row] = True
        return reason

    def fail(self, row: Row) -> None:
        """Finish a row whose token could not be computed."""
        self._is_finished[row] = True

    # -- checks -------------------------------------------------------------------------------------------------

    def _require_occupied(self, row: Row, what: str) -> None:
        if not (0 <= row < self.max_num_reqs and self._is_occupied[row]):
            raise InvariantBroken(f"row {row} is {what}, but holds no sequence (rows: {self.max_num_reqs})")

    def _check_admission(self, admission: Admission) -> None:
        row, num_tokens = admission.row, len(admission.token_ids)
        if not 0 <= row < self.max_num_reqs:
            raise InvariantBroken(f"row {row} is admitted, but rows are in [0, {self.max_num_reqs})")
        if self._is_occupied[row]:
            raise InvariantBroken(f"row {row} is admitted, but holds a sequence already")
        if not 1 <= admission.num_prompt_tokens <= num_tokens < self._max_model_len:
            raise InvariantBroken(
                f"row {row} is admitted with {num_tokens} tokens, {admission.num_prompt_tokens} of them prompt; "
                f"the context holds {self._max_model_len}, one of them to be sampled"
            )
        num_slots = len(admission.block_ids) * self._block_size
        if not 0 <= admission.num_cached_tokens < num_tokens or admission.num_cached_tokens > num_slots:
            raise InvariantBroken(
                f"row {row} is admitted with {admission.num_cached_tokens} of {num_tokens} tokens cached in "
                f"blocks for {num_slots}"
            )
        if not all(0 <= token_id < self._vocab_size for token_id in admission.token_ids):
            raise InvariantBroken(f"row {row} is admitted with a token id outside [0, {self._vocab_size})")

    def _append_blocks(self, row: Row, blocks: Sequence[BlockId]) -> None:
        if not blocks:
            return
        start = int(self.num_blocks[row])
        end = start + len(blocks)
        if end > self.block_table.shape[1]:
            raise InvariantBroken(f"row {row} gets {end} blocks; a full context has {self.block_table.shape[1]}")
        for block in blocks:
            if not 0 <= block < self._num_pool_blocks:
                raise InvariantBroken(f"row {row} gets block {block}; blocks are in [0, {self._num_pool_blocks})")
        self.block_table[row, start:end] = blocks
        self.num_blocks[row] = end
