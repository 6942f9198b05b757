"""The stage of the penalties: repetition, then frequency, then presence.

Costs what the history of the rows that ask is long, and nothing that grows with the vocabulary: only the scores of
tokens that were seen are read and written.
"""

import torch
from torch import Tensor

from gpu_worker.sampling.history import History
from gpu_worker.sampling.row_state import Askers, StagedTable
from gpu_worker.sampling.scores import read_scores, write_scores
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingParams

MAX_SCORE = torch.finfo(torch.float32).max


class Penalties(LogitsProcessor):
    """Makes tokens that were seen less likely, or likelier: repetition looks at prompt and output, the others at the
    output alone. Keeps no counts from step to step: a row that comes back has all that is needed in its history."""

    name = "penalties"
    extra_arg_names = ()

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        self._states = req_states
        self._vocab_size = config.vocab_size
        self._askers = Askers(config.max_num_reqs)
        self._counters = Askers(config.max_num_reqs)  # those for whom it matters how often
        self._factors = StagedTable(config.max_num_reqs, 3, torch.float32, req_states.device)
        self._scratch_AV = torch.zeros((0, config.vocab_size), device=req_states.device)  # zeros between two calls

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        repetition = sampling_params.repetition_penalty
        frequency, presence = sampling_params.frequency_penalty, sampling_params.presence_penalty
        is_counter = self._counters.mark(req_idx, frequency != 0 or presence != 0)
        if not self._askers.mark(req_idx, is_counter or repetition != 1):
            return False
        self._factors.put(req_idx, (repetition, frequency, presence))
        return True

    def apply_staged_writes(self) -> None:
        self._factors.flush()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        rows_A = self._askers.find(ctx)
        if rows_A is None:
            return logits
        history = History(self._states, ctx, rows_A)
        places_L = torch.arange(self._askers.max_len(ctx) + history.num_drafts, device=logits.device)
        tokens_AL = history.at(places_L.minimum(history.ends_A1 - 1))  # beyond its end a row repeats its last token
        repetition_A1, frequency_A1, presence_A1 = self._factors.lines(history.rows_A, 3).T.unsqueeze(2)
        before_AL = read_scores(logits, rows_A, tokens_AL)
        scores_AL = torch.where(before_AL > 0, before_AL / repetition_A1, before_AL * repetition_A1)
        scores_AL = scores_AL.clamp_(max=MAX_SCORE)  # a tiny penalty takes a score beyond all numbers
        scores_AL = torch.where(before_AL == torch.inf, before_AL, scores_AL)  # a row that is broken stays so
        if self._counters.find(ctx) is not None:
            is_output_AL = (places_L >= history.starts_A1) & (places_L < history.ends_A1)
            counts_AL = self._count(tokens_AL, is_output_AL)
            scores_AL = scores_AL - frequency_A1 * counts_AL - presence_A1 * (counts_AL > 0)
        write_scores(logits, rows_A, tokens_AL, scores_AL)
        return logits

    def _count(self, tokens_AL: Tensor, is_output_AL: Tensor) -> Tensor:
        """Return how often the token of each place is in the row's output: [A, L] float32, exact up to 2**24."""
        if len(self._scratch_AV) < len(tokens_AL):
            self._scratch_AV = torch.zeros((len(tokens_AL), self._vocab_size), device=tokens_AL.device)
        counts_AV = self._scratch_AV[: len(tokens_AL)].scatter_add_(1, tokens_AL, is_output_AL.float())
        counts_AL = counts_AV.gather(1, tokens_AL)
        counts_AV.scatter_(1, tokens_AL, 0.0)
        return counts_AL
