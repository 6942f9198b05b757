"""What stands before each row of logits: the row's tokens so far, then the drafts that are fed before it.

Read from the device's tables, where every token is from the moment it is chosen; what follows from the tokens is the
business of the stages.

Shapes: A = the rows of logits meant, R = all of them, X = places.
"""

import torch
from torch import Tensor

from plugins.logits import LogitsContext, RequestStates


class History:
    """The tokens before some rows of logits. Drafts count as output. Lives for one call of `apply`."""

    def __init__(self, states: RequestStates, ctx: LogitsContext, rows_A: Tensor) -> None:
        self.rows_A = ctx.expanded_idx_mapping.index_select(0, rows_A)  # in the worker's tables
        self._token_ids_NL = states.all_token_ids
        self._known_A1 = states.total_len.index_select(0, self.rows_A).long().unsqueeze(1)
        self.starts_A1 = states.prompt_len.index_select(0, self.rows_A).long().unsqueeze(1)  # of the output
        self.ends_A1 = self._known_A1
        self.num_drafts = 0  # at most
        self._drafts_AR: Tensor | None = None
        if ctx.expanded_idx_mapping is not ctx.idx_mapping:
            local_A1 = ctx.expanded_local_pos.index_select(0, rows_A).unsqueeze(1)
            self.ends_A1 = self._known_A1 + local_A1
            self.num_drafts = len(ctx.expanded_local_pos)
            self._drafts_AR = _drafts(ctx, self.rows_A, local_A1)

    def at(self, places_AX: Tensor) -> Tensor:
        """Return the tokens at some places: [A, X] int64. A place outside [0, ends) gets any token."""
        max_len = self._token_ids_NL.shape[1]
        known_AX = places_AX.minimum(self._known_A1 - 1).clamp_(min=0).add_(self.rows_A.unsqueeze(1) * max_len)
        tokens_AX = self._token_ids_NL.reshape(-1).index_select(0, known_AX.view(-1)).view(known_AX.shape).long()
        if self._drafts_AR is None:
            return tokens_AX
        columns_AX = (places_AX - self._known_A1 + 1).clamp_(0, self._drafts_AR.shape[1] - 1)
        return torch.where(places_AX >= self._known_A1, self._drafts_AR.gather(1, columns_AX), tokens_AX)


def _drafts(ctx: LogitsContext, rows_A: Tensor, local_A1: Tensor) -> Tensor:
    """Return the drafts up to each row, [A, R]: column i is the draft at local place i; column 0 means nothing."""
    local_R = ctx.expanded_local_pos
    is_before_AR = (ctx.expanded_idx_mapping == rows_A.unsqueeze(1)) & (local_R <= local_A1)
    columns_AR = torch.where(is_before_AR, local_R, 0)
    drafts_AR = torch.zeros_like(columns_AR)
    return drafts_AR.scatter_(1, columns_AR, ctx.input_ids.expand_as(columns_AR))
