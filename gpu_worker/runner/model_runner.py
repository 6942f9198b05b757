"""Carries out one step plan after the other on one device.

Says in which order things happen to rows, blocks and tokens; what each of them is belongs to the row table,
the cache, the model and the sampler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_worker.attention.groups import AttentionShape
from gpu_worker.kv.cache import KVCache
from gpu_worker.models.registry import Model
from gpu_worker.runner.inputs import Ints, StepInputs, build_inputs
from gpu_worker.runner.row_table import RowTable
from gpu_worker.sampling.pipeline import Sampled, SamplingPipeline
from gpu_worker.sampling.prompt_logprobs import PromptColumns, PromptScorer
from plugins.errors import InvariantBroken
from plugins.types import (
    Chunk,
    FinishReason,
    PromptLogprobs,
    Row,
    RowFailure,
    StepPlan,
    StepResult,
    TokenId,
    TokenLogprobs,
)


class ModelRunner:
    """One model, its cache and its rows. The device thread alone calls it.

    Plans must come in order, each after the one before it was launched; results may be read later.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        table: RowTable,
        sampling: SamplingPipeline,
        shape: AttentionShape,
        dtype: torch.dtype,
        max_step_tokens: int,
    ) -> None:
        self._model = model
        self._cache = cache
        self._table = table
        self._sampling = sampling
        self._prompts = PromptScorer(self._scores, table.token_ids_at)
        self._failures: dict[Row, RowFailure] = {}  # of rows that no plan has named since
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
        self._sampling.clear()
        self._prompts.clear()
        self._failures.clear()

    def close(self) -> None:
        """End what runs beside the device thread. Nothing may follow."""
        self._sampling.close()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "PendingStep":
        """Start a plan. Nothing waits for the device; what the plan produced is in `PendingStep.result`.

        Raises: InvariantBroken: the plan breaks a rule of the step protocol; rows are then in no known state, and
            only `reset` may follow.
        """
        pending = PendingStep(plan, self._table)
        self._check(plan)
        self._release(plan.released_rows)
        self._cache.copy_blocks(plan.block_copies)
        self._table.admit(plan.admitted)
        self._cache.clear_blocks(self._table.extend(plan.chunks))  # nothing of their last owner is left
        self._fail(self._sampling.admit(plan.admitted))
        self._prompts.admit(plan.admitted)
        for _ in range(plan.decode_steps):
            self._fail(self._sampling.apply_staged_writes())
            chunks = self._table.runnable(plan.chunks)
            if not chunks:
                break
            pending.add(*self._step(chunks))
        pending.failures = {
            chunk.row: self._failures.pop(chunk.row) for chunk in plan.chunks if chunk.row in self._failures
        }
        return pending

    def _fail(self, failures: Sequence[RowFailure]) -> None:
        """Compute these rows no more; the next plan that names one of them tells its failure. Others have ended."""
        for failure in failures:
            if self._table.goes_on(failure.row, int(self._table.occupancy[failure.row])):
                self._table.fail(failure.row)
                self._failures[failure.row] = failure

    def _release(self, rows: Sequence[Row]) -> None:
        self._table.release(rows)
        self._sampling.release(rows)
        self._prompts.release(rows)
        for row in rows:
            self._failures.pop(row, None)

    def _step(self, chunks: tuple[Chunk, ...]) -> tuple[StepInputs, Sampled, tuple[PromptColumns, ...]]:
        """One forward pass, what it sampled, and what it tells of prompts."""
        inputs = build_inputs(chunks, self._table, self._shape, self._dtype, self._table.device)
        self._sampling.begin(inputs)
        hidden_TE = self._model.forward(inputs, self._cache)
        told = self._prompts.tell(hidden_TE, inputs)
        sampled = self._sampling.sample(self._scores(hidden_TE[inputs.logits_indices]), inputs)
        self._table.advance(inputs.rows, inputs.num_tokens)
        self._table.append(inputs.sampled_rows, sampled.tokens, sampled.is_waiting)
        return inputs, sampled, told

    def _scores(self, hidden_RE: Tensor) -> Tensor:
        """Return the scores of what may be sampled, [R, V], in one piece: a model may have more, to fill its matrix."""
        return self._model.head(hidden_RE)[:, : self._table.vocab_size].contiguous()

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
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # one per token
    prompt_logprobs: PromptLogprobs | None = None
    finish: FinishReason | None = None
    failure: RowFailure | None = None


class PendingStep:
    """A plan that was launched. Read once, in the order of launching, by the device thread.

    It remembers who held each row when the plan came, because a row may have changed hands since.
    """

    def __init__(self, plan: StepPlan, table: RowTable) -> None:
        self.plan = plan
        self._table = table
        self._sampled: list[_SampledRows] = []
        self._prompts: list[tuple[PromptColumns, int]] = []  # with the row's occupancy
        self._computed_rows: set[int] = set()
        self.failures: Mapping[Row, RowFailure] = {}  # rows that failed before anything was computed
        self.num_prompt_tokens = 0  # computed tokens that were known when their row was admitted

    def add(self, inputs: StepInputs, sampled: Sampled, prompts: Sequence[PromptColumns]) -> None:
        """One forward pass of the plan was launched, and the table knows its tokens."""
        rows = inputs.sampled_rows
        self._sampled.append(_SampledRows(rows, self._table.occupancy[rows], self._table.num_tokens[rows], sampled))
        self._prompts.extend((columns, int(self._table.occupancy[columns.row])) for columns in prompts)
        self._computed_rows.update(inputs.rows.tolist())
        num_prompt_S = (self._table.num_admitted[inputs.rows] - inputs.starts).clip(0, inputs.num_tokens)
        self.num_prompt_tokens += int(num_prompt_S.sum())

    def is_ready(self) -> bool:
        """Say whether `result` would not wait. On a CPU the work is done when it is launched."""
        return True

    def result(self) -> StepResult:
        """Wait for the device, and say what each row produced. How long it took is timed by the caller."""
        outcomes = {chunk.row: _Outcome(is_told=chunk.row not in self._computed_rows) for chunk in self.plan.chunks}
        for row, failure in self.failures.items():
            outcomes[row].failure = failure
        for columns, occupancy in self._prompts:
            if self._table.goes_on(columns.row, occupancy):
                self._read_prompt(columns, outcomes[columns.row])
        for step in self._sampled:
            self._read(step, outcomes)
        told = [(row, outcome) for row, outcome in outcomes.items() if outcome.is_told and outcome.failure is None]
        logprobs = tuple(each for _, outcome in told for each in outcome.logprobs)
        return StepResult(
            seq=self.plan.seq,
            rows=tuple(row for row, _ in told),
            counts=tuple(len(outcome.token_ids) for _, outcome in told),
            token_ids=tuple(token_id for _, outcome in told for token_id in outcome.token_ids),
            finishes=tuple(outcome.finish for _, outcome in told),
            failures=tuple(outcome.failure for outcome in outcomes.values() if outcome.failure is not None),
            logprobs=logprobs if any(each is not None for each in logprobs) else (),
            prompt_logprobs=tuple(
                outcome.prompt_logprobs
                for outcome in outcomes.values()
                if outcome.prompt_logprobs is not None and outcome.failure is None
            ),
        )

    def _read_prompt(self, columns: PromptColumns, outcome: _Outcome) -> None:
        outcome.prompt_logprobs = columns.read()
        if outcome.prompt_logprobs is None:
            outcome.failure = _not_finite(columns.row, f"of the prompt from token {columns.start - 1}")
            self._table.fail(columns.row)

    def _read(self, step: "_SampledRows", outcomes: dict[Row, _Outcome]) -> None:
        logprobs = {} if step.sampled.logprobs is None else step.sampled.logprobs.read()
        columns = zip(
            step.rows.tolist(),
            step.occupancy.tolist(),
            step.num_tokens.tolist(),
            step.sampled.tokens.tolist(),
            step.sampled.is_waiting.tolist(),
            strict=True,
        )
        for place, (row, occupancy, num_tokens, token_id, is_waiting) in enumerate(columns):
            outcome = outcomes[row]
            outcome.is_told = True
            if not self._table.goes_on(row, occupancy):
                continue
            failure = step.sampled.failures.get(row)
            if failure is None and token_id < 0 and not is_waiting:
                failure = _not_finite(row, f"at token {num_tokens - 1}")
            if failure is not None:
                outcome.failure = failure
                self._table.fail(row)
            elif not is_waiting:
                outcome.token_ids.append(token_id)
                outcome.logprobs.append(logprobs.get(place))
                outcome.finish = self._table.judge(row, token_id, num_tokens)


def _not_finite(row: Row, which: str) -> RowFailure:
    return RowFailure(row, "LOGITS_NOT_FINITE", f"the scores {which} are not finite; no token is chosen")


@dataclass(frozen=True, slots=True)
class _SampledRows:
    """One forward pass of a plan: who was in the rows that sampled, and how long they are since. Arrays are [R]."""

    rows: Ints
    occupancy: Ints
    num_tokens: Ints
    sampled: Sampled
