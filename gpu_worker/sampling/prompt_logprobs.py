"""Log-probabilities of prompt tokens, for the rows that ask: the model's own.

The score at one place tells of the token at the next, so a chunk tells of the places behind each of its tokens, as far
as they are prompt. Scores are made for 64 places at a time: what is kept of them is small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.runner.inputs import StepInputs
from gpu_worker.sampling.logprobs import Told, tell_likeliest
from plugins.types import Admission, PromptLogprobs, Row

MAX_SLICE = 64  # places scored at once; with 49,152 tokens their scores take 12 MiB

Scores = Callable[[Tensor], Tensor]  # [A, E] of the forward to [A, V] float32, the caller's own
TokensAt = Callable[[Tensor, Tensor], Tensor]  # rows [A], places [A] to the tokens there, [A] int64


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """What one chunk tells of its row's prompt, on the device."""

    row: Row
    start: int  # the first place that is told
    num_others: int
    slices: tuple[Told, ...]

    def read(self) -> PromptLogprobs | None:
        """Wait for the device. None: a score was not finite."""
        if any(bool(each.logprobs[:, 0].isnan().any()) for each in self.slices):
            return None
        places = [place for each in self.slices for place in each.read([self.num_others] * each.token_ids.shape[0])]
        return PromptLogprobs(self.row, self.start, tuple(places))


@dataclass(frozen=True, slots=True)
class _Wish:
    num_others: int
    num_prompt_tokens: int


class PromptScorer:
    """Who wants to be told of prompts. Owned by the runner; called from the device thread alone."""

    def __init__(self, scores: Scores, tokens_at: TokensAt) -> None:
        self._scores = scores
        self._tokens_at = tokens_at
        self._wishes: dict[Row, _Wish] = {}

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Take new occupants of rows. One that comes back is told again of what is computed again."""
        for admission in admissions:
            self._wishes.pop(admission.row, None)
            if admission.sampling.prompt_logprobs is not None:
                wish = _Wish(admission.sampling.prompt_logprobs, admission.num_prompt_tokens)
                self._wishes[admission.row] = wish

    def release(self, rows: Sequence[Row]) -> None:
        """Forget some rows."""
        for row in rows:
            self._wishes.pop(row, None)

    def clear(self) -> None:
        """Forget every row."""
        self._wishes.clear()

    def tell(self, hidden_TE: Tensor, inputs: StepInputs) -> tuple[PromptColumns, ...]:
        """Tell of the prompts that the step computes parts of. Nothing waits for the device.

        Shapes: T = tokens of the step, E = hidden size.
        """
        if not self._wishes:
            return ()
        offsets_S = np.cumsum(inputs.num_tokens) - inputs.num_tokens
        columns = zip(
            inputs.rows.tolist(), inputs.starts.tolist(), inputs.num_tokens.tolist(), offsets_S.tolist(), strict=True
        )
        told = []
        for row, start, num_tokens, offset in columns:
            wish = self._wishes.get(row)
            if wish is not None and (num_told := min(num_tokens, wish.num_prompt_tokens - 1 - start)) > 0:
                chunk_CE = hidden_TE[offset : offset + num_told]
                slices = tuple(
                    self._tell_slice(part_AE, row, start + 1 + index * MAX_SLICE, wish.num_others)
                    for index, part_AE in enumerate(chunk_CE.split(MAX_SLICE))  # type: ignore[no-untyped-call]  # torch leaves it untyped
                )
                told.append(PromptColumns(row, start + 1, wish.num_others, slices))
        return tuple(told)

    def _tell_slice(self, part_AE: Tensor, row: Row, first_place: int, num_others: int) -> Told:
        places_A = torch.arange(first_place, first_place + len(part_AE), device=part_AE.device)
        tokens_A = self._tokens_at(torch.full_like(places_A, row), places_A)
        scores_AV = self._scores(part_AE)
        return tell_likeliest(scores_AV, scores_AV.log_softmax(-1), tokens_A, num_others)
