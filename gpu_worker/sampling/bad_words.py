"""The stage that keeps a row's `bad_words` out of its output.

A word is a run of tokens: its last one is forbidden wherever the output ends with all the others. Which runs of tokens
write a word is the business of admission.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.sampling.history import History
from gpu_worker.sampling.row_state import Askers, TokenLists
from gpu_worker.sampling.scores import add_scores, read_scores, write_scores
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingLimits, SamplingParams


class BadWords(LogitsProcessor):
    """Forbids the tokens that would complete a word. All words of a row are compared at once, token by token.

    Where a grammar leaves nothing else they stay: the grammar wins.

    Shapes: A = rows of logits of askers, T = parts: tokens of a row's words but the last ones, W = its words.
    """

    name = "bad_words"
    extra_arg_names = ()

    def __init__(self, config: ProcessorConfig, req_states: RequestStates, limits: SamplingLimits) -> None:
        num_rows, device = config.max_num_reqs, req_states.device
        max_words, max_parts = limits.max_bad_words, limits.max_bad_word_tokens
        self._states = req_states
        self._askers = Askers(num_rows)
        self._held = Askers(num_rows)  # those that a grammar holds too; without one admission leaves every row a token
        self._last_tokens = TokenLists(num_rows, max_words, device)
        self._words = TokenLists(num_rows, max_words, device)  # 0, 1, 2...: which word the last token is of
        self._part_tokens = TokenLists(num_rows, max_parts, device)
        self._part_distances = TokenLists(num_rows, max_parts, device)  # back from the place that is chosen; 0: no part
        self._part_words = TokenLists(num_rows, max_parts, device)

    @property
    def _lists(self) -> Sequence[TokenLists]:
        return (self._last_tokens, self._words, self._part_tokens, self._part_distances, self._part_words)

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        words = sampling_params.bad_word_ids
        for each in self._lists:
            each.drop(req_idx)
        self._held.mark(req_idx, bool(words and sampling_params.grammar))
        if not self._askers.mark(req_idx, bool(words)):
            return False
        parts: list[tuple[int, int, int]] = [
            (token_id, len(word) - 1 - place, index)
            for index, word in enumerate(words)
            for place, token_id in enumerate(word[:-1])
        ] or [(0, 0, 0)]
        tokens, distances, part_words = zip(*parts, strict=True)
        self._last_tokens.put(req_idx, [word[-1] for word in words])
        self._words.put(req_idx, range(len(words)))
        self._part_tokens.put(req_idx, tokens)
        self._part_distances.put(req_idx, distances)
        self._part_words.put(req_idx, part_words)
        return True

    def apply_staged_writes(self) -> None:
        for each in self._lists:
            each.flush()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        rows_A = self._askers.find(ctx)
        if rows_A is None:
            return logits
        history = History(self._states, ctx, rows_A)
        last_AW, words_AW, tokens_AT, distances_AT, part_words_AT = (
            each.read(history.rows_A, ctx) for each in self._lists
        )
        places_AT = history.ends_A1 - distances_AT
        is_there_AT = (history.at(places_AT) == tokens_AT) & (places_AT >= history.starts_A1)
        is_missing_AT = (~is_there_AT & (distances_AT > 0)).int()
        num_missing_AW = torch.zeros_like(words_AW, dtype=torch.int32).scatter_add_(1, part_words_AT, is_missing_AT)
        is_bad_AW = num_missing_AW.gather(1, words_AW) == 0
        before_AW = read_scores(logits, rows_A, last_AW)
        add_scores(logits, rows_A, last_AW, torch.where(is_bad_AW, -torch.inf, 0.0))
        if self._held.find(ctx) is not None:
            is_empty_A = logits.index_select(0, rows_A).amax(-1) == -torch.inf
            after_AW = read_scores(logits, rows_A, last_AW)
            write_scores(logits, rows_A, last_AW, torch.where(is_empty_A.unsqueeze(1), before_AW, after_AW))
        return logits
