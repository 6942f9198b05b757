"""The stage that leaves a row its `allowed_token_ids` and forbids all others."""

import torch
from torch import Tensor

from gpu_worker.sampling.row_state import Askers, TokenLists
from gpu_worker.sampling.scores import read_scores, write_scores
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingLimits, SamplingParams


class AllowedTokens(LogitsProcessor):
    """Sets every score to -inf but those of the allowed tokens."""

    name = "allowed_token_ids"
    extra_arg_names = ()

    def __init__(self, config: ProcessorConfig, req_states: RequestStates, limits: SamplingLimits) -> None:
        self._askers = Askers(config.max_num_reqs)
        self._allowed = TokenLists(config.max_num_reqs, limits.max_allowed_token_ids, req_states.device)

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self._allowed.drop(req_idx)
        if not self._askers.mark(req_idx, bool(sampling_params.allowed_token_ids)):
            return False
        self._allowed.put(req_idx, sampling_params.allowed_token_ids)
        return True

    def apply_staged_writes(self) -> None:
        self._allowed.flush()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        rows_A = self._askers.find(ctx)
        if rows_A is None:
            return logits
        token_ids_AK = self._allowed.read(ctx.expanded_idx_mapping.index_select(0, rows_A), ctx)
        scores_AK = read_scores(logits, rows_A, token_ids_AK)
        logits.index_fill_(0, rows_A, -torch.inf)
        write_scores(logits, rows_A, token_ids_AK, scores_AK)
        return logits
