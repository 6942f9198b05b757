"""The stage that adds a row's `logit_bias` to its scores."""

import torch
from torch import Tensor

from gpu_worker.sampling.row_state import Askers, StagedTable, TokenLists
from gpu_worker.sampling.scores import add_scores
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingLimits, SamplingParams


class LogitBias(LogitsProcessor):
    """Adds to the scores of some tokens. What is -inf stays -inf."""

    name = "logit_bias"
    extra_arg_names = ()

    def __init__(self, config: ProcessorConfig, req_states: RequestStates, limits: SamplingLimits) -> None:
        num_rows, max_tokens, device = config.max_num_reqs, limits.max_logit_bias, req_states.device
        self._askers = Askers(num_rows)
        self._tokens = TokenLists(num_rows, max_tokens, device)
        self._amounts = StagedTable(num_rows, max_tokens, torch.float32, device)
        self._max_tokens = max_tokens

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        bias = sampling_params.logit_bias
        self._tokens.drop(req_idx)
        if not self._askers.mark(req_idx, bool(bias)):
            return False
        self._tokens.put(req_idx, tuple(bias))
        filling = (0.0,) * (self._max_tokens - len(bias))  # nothing is added where the list of tokens is filled up
        self._amounts.put(req_idx, (*bias.values(), *filling))
        return True

    def apply_staged_writes(self) -> None:
        self._tokens.flush()
        self._amounts.flush()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        rows_A = self._askers.find(ctx)
        if rows_A is None:
            return logits
        states_A = ctx.expanded_idx_mapping.index_select(0, rows_A)
        token_ids_AK = self._tokens.read(states_A, ctx)
        add_scores(logits, rows_A, token_ids_AK, self._amounts.lines(states_A, token_ids_AK.shape[1]))
        return logits
