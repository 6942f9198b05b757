"""What each row of a step has said so far, drafts included.

Reads the worker's tables; what follows from a history is the business of the processor that asks.
"""

from typing import TYPE_CHECKING

from plugins.builtin.staged_rows import Chosen
from plugins.logits import LogitsContext, RequestStates

if TYPE_CHECKING:
    from torch import Tensor

NO_TOKEN = -1  # stands where the output has not begun


def output_history(states: RequestStates, ctx: LogitsContext, chosen: Chosen, width: int) -> "Tensor":
    """Return the last `width` tokens of output before each row's next token: [K, width] int64.

    The last column is the token that was fed. NO_TOKEN stands before the output's first token. The rows of a request
    lie side by side, so a draft is the input of a row before: the tables hold what is committed, and no drafts.
    """
    import torch

    device = ctx.pos.device
    steps_back = torch.arange(width - 1, -1, -1, device=device)
    places = ctx.pos[chosen.rows, None] - steps_back  # [K, width]
    req_idx = chosen.req_idx[:, None]
    max_place = states.all_token_ids.shape[1] - 1
    committed = states.all_token_ids[req_idx, places.clamp(0, max_place)].long()
    drafts = ctx.input_ids[(chosen.rows[:, None] - steps_back).clamp(min=0)]
    tokens = torch.where(places < states.total_len[req_idx], committed, drafts)
    return tokens.masked_fill(places < states.prompt_len[req_idx], NO_TOKEN)


def longest_output(states: RequestStates, ctx: LogitsContext) -> int:
    """Return a number of tokens that no row's output exceeds, drafts included. Does not wait for the device."""
    num_drafts = len(ctx.expanded_idx_mapping) - len(ctx.idx_mapping_np)  # of all requests together
    longest = int(ctx.seq_lens_upper_bound_np.max(initial=1)) + num_drafts
    return min(longest, int(states.all_token_ids.shape[1]))
