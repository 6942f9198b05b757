"""The stage that keeps an output from ending before it has its `min_tokens`."""

import torch
from torch import Tensor

from gpu_worker.sampling.row_state import Askers, StagedTable, TokenLists
from gpu_worker.sampling.scores import read_scores, write_scores
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingLimits, SamplingParams


class MinTokens(LogitsProcessor):
    """Forbids every token that would end the output too early: stop tokens, and the model's own if they count.

    Where nothing else is allowed they stay: a grammar that is at its end wins.
    """

    name = "min_tokens"
    extra_arg_names = ()

    def __init__(self, config: ProcessorConfig, req_states: RequestStates, limits: SamplingLimits) -> None:
        num_rows, device = config.max_num_reqs, req_states.device
        self._states = req_states
        self._vocab_size = config.vocab_size
        self._eos_token_ids = tuple(config.eos_token_ids)
        self._askers = Askers(num_rows)
        self._stops = TokenLists(num_rows, limits.max_stop_token_ids + len(self._eos_token_ids), device)
        self._min_tokens = StagedTable(num_rows, 1, torch.int64, device)

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        stops = set(sampling_params.stop_token_ids)
        if not sampling_params.ignore_eos:
            stops.update(self._eos_token_ids)
        token_ids = sorted(token_id for token_id in stops if token_id < self._vocab_size)
        self._stops.drop(req_idx)
        if not self._askers.mark(req_idx, sampling_params.min_tokens > 0 and bool(token_ids)):
            return False
        self._stops.put(req_idx, token_ids)
        self._min_tokens.put(req_idx, (sampling_params.min_tokens,))
        return True

    def apply_staged_writes(self) -> None:
        self._stops.flush()
        self._min_tokens.flush()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        rows_A = self._askers.find(ctx)
        if rows_A is None:
            return logits
        states_A = ctx.expanded_idx_mapping.index_select(0, rows_A)
        ends_A = self._states.prompt_len.index_select(0, states_A) + self._min_tokens.lines(states_A, 1).squeeze(1)
        is_early_A = ctx.pos.index_select(0, rows_A) + 1 < ends_A
        if logits.device.type == "cpu" and not is_early_A.any():  # elsewhere to ask would be to wait
            return logits
        token_ids_AK = self._stops.read(states_A, ctx)
        before_AK = read_scores(logits, rows_A, token_ids_AK)
        after_AK = before_AK.masked_fill(is_early_A.unsqueeze(1), -torch.inf)
        write_scores(logits, rows_A, token_ids_AK, after_AK)
        is_empty_A = logits.index_select(0, rows_A).amax(-1) == -torch.inf
        write_scores(logits, rows_A, token_ids_AK, torch.where(is_empty_A.unsqueeze(1), before_AK, after_AK))
        return logits
