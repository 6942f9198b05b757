"""Carries out one step plan after the other on one device.

Says in which order things happen to rows, blocks and tokens; what each of them is belongs to the row table,
the cache, the model and the sampler.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_worker.attention.groups import AttentionShape
from gpu_worker.kv.cache import KVCache
from gpu_worker.models.registry import Model
from gpu_worker.runner.inputs import Ints, StepInputs, build_inputs
from gpu_worker.runner.row_table import RowTable
from gpu_worker.sampling.processors import ProcessorChain
from gpu_worker.sampling.sampler import sample
from plugins.errors import InvariantBroken
from plugins.types import Chunk, FinishReason, Row, RowFailure, StepPlan, StepResult, TokenId


class ModelRunner:
    """One model, its cache and its rows. The device thread alone calls it.

    Plans must come in order, each after the one before it was launched; results may be read later.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        table: RowTable,
        processors: ProcessorChain,
        shape: AttentionShape,
        dtype: torch.dtype,
        max_step_tokens: int,
    ) -> None:
        self._model = model
        self._cache = cache
        self._table = table
        self._processors = processors
        self._shape = shape
        self._dtype = dtype
        self._max_step_tokens = max_step_tokens

    @property
    def num_rows(self) -> int:
        """Rows that hold a sequence."""
        return self._table.num_occupied

    def reset(self) -> None:
        """Forget all rows."""
        self._table.clear()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "PendingStep":
        """Start a plan. Nothing waits for the device; what the plan produced is in `PendingStep.result`.

        Raises: InvariantBroken: the plan breaks a rule of the step protocol; rows are then in no known state, and
            only `reset` may follow. PluginFailed: a logits processor raised.
        """
        pending = PendingStep(plan, self._table)
        self._check(plan)
        self._table.release(plan.released_rows)
        self._cache.copy_blocks(plan.block_copies)
        self._table.admit(plan.admitted)
        self._cache.clear_blocks(self._table.extend(plan.chunks))  # nothing of their last owner is left
        for admission in plan.admitted:
            self._processors.add_request(admission.row, admission.sampling)
        for _ in range(plan.decode_steps):
            self._processors.apply_staged_writes()
            chunks = self._table.runnable(plan.chunks)
            if not chunks:
                break
            pending.add(*self._step(chunks))
        return pending

    def _step(self, chunks: tuple[Chunk, ...]) -> tuple[StepInputs, Tensor]:
        """One forward pass, and the tokens that it sampled: [R] int64, on the device."""
        inputs = build_inputs(chunks, self._table, self._shape, self._dtype, self._table.device)
        logits_RV = self._model.forward(inputs, self._cache)
        tokens_R = sample(self._processors.apply(logits_RV, inputs.context), inputs.sampling)
        self._table.advance(inputs.rows, inputs.num_tokens)
        self._table.append(inputs.sampled_rows, tokens_R)
        return inputs, tokens_R

    def _check(self, plan: StepPlan) -> None:
        if plan.num_tokens > self._max_step_tokens:
            raise InvariantBroken(f"plan {plan.seq} has {plan.num_tokens} tokens; at most {self._max_step_tokens} fit")
        if plan.decode_steps < 1:
            raise InvariantBroken(f"plan {plan.seq} has {plan.decode_steps} decode steps; at least 1 is needed")
        if plan.decode_steps > 1 and any(chunk.num_tokens != 1 for chunk in plan.chunks):
            raise InvariantBroken(f"plan {plan.seq} repeats a step that is not made of decodes of one token")
        for copy in plan.block_copies:
            if not (0 <= copy.source < self._cache.num_blocks and 0 <= copy.destination < self._cache.num_blocks):
                raise InvariantBroken(
                    f"plan {plan.seq} copies block {copy.source} to {copy.destination}; "
                    f"blocks are in [0, {self._cache.num_blocks})"
                )


@dataclass(slots=True)
class _Outcome:
    """What a plan did for one of its rows."""

    is_told: bool  # it sampled or was skipped; a chunk in the middle of a prompt has nothing to tell
    token_ids: list[TokenId] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: RowFailure | None = None


class PendingStep:
    """A plan that was launched. Read once, in the order of launching, by the device thread.

    It remembers who held each row when the plan came, because a row may have changed hands since.
    """

    def __init__(self, plan: StepPlan, table: RowTable) -> None:
        self.plan = plan
        self._table = table
        self._sampled: list[tuple[Ints, Ints, Ints, Tensor]] = []  # rows, occupancy, num_tokens, tokens: each [R]
        self._computed_rows: set[int] = set()
        self.num_prompt_tokens = 0  # computed tokens that were known when their row was admitted

    def add(self, inputs: StepInputs, tokens_R: Tensor) -> None:
        """One forward pass of the plan was launched, and the table knows its tokens."""
        rows = inputs.sampled_rows
        self._sampled.append((rows, self._table.occupancy[rows], self._table.num_tokens[rows], tokens_R))
        self._computed_rows.update(inputs.rows.tolist())
        starts_S = self._table.num_computed[inputs.rows] - inputs.num_tokens
        num_prompt_S = (self._table.num_admitted[inputs.rows] - starts_S).clip(0, inputs.num_tokens)
        self.num_prompt_tokens += int(num_prompt_S.sum())

    def is_ready(self) -> bool:
        """Say whether `result` would not wait. On a CPU the work is done when it is launched."""
        return True

    def result(self) -> StepResult:
        """Wait for the device, and say what each row produced. How long it took is timed by the caller."""
        outcomes = {chunk.row: _Outcome(is_told=chunk.row not in self._computed_rows) for chunk in self.plan.chunks}
        for rows_R, occupancy_R, num_tokens_R, tokens_R in self._sampled:
            columns = zip(rows_R.tolist(), occupancy_R.tolist(), num_tokens_R.tolist(), tokens_R.tolist(), strict=True)
            for row, occupancy, num_tokens, token_id in columns:
                outcomes[row].is_told = True
                if self._table.goes_on(row, occupancy):
                    self._settle(outcomes[row], row, num_tokens, token_id)
        told = [(row, outcome) for row, outcome in outcomes.items() if outcome.is_told and outcome.failure is None]
        return StepResult(
            seq=self.plan.seq,
            rows=tuple(row for row, _ in told),
            counts=tuple(len(outcome.token_ids) for _, outcome in told),
            token_ids=tuple(token_id for _, outcome in told for token_id in outcome.token_ids),
            finishes=tuple(outcome.finish for _, outcome in told),
            failures=tuple(outcome.failure for outcome in outcomes.values() if outcome.failure is not None),
        )

    def _settle(self, outcome: _Outcome, row: Row, num_tokens: int, token_id: TokenId) -> None:
        if token_id < 0:
            outcome.failure = RowFailure(row, "LOGITS_NOT_FINITE", f"the model's scores at token {num_tokens} are NaN")
            self._table.fail(row)
            return
        outcome.token_ids.append(token_id)
        outcome.finish = self._table.judge(row, token_id, num_tokens)
