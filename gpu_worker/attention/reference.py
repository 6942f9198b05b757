"""Attention by its definition, in float32, one sequence and one head at a time: the oracle of every kernel.

Knows nothing of pages or batches; slow on purpose.

Shapes: T = new tokens, L = tokens of the context, the new ones last; H = query heads, K = KV heads, D = head dimension.
"""

import torch
from torch import Tensor


def attention(q_THD: Tensor, keys_LKD: Tensor, values_LKD: Tensor) -> Tensor:
    """Return what each new token sees: [T, H, D] float32. Token i of T looks at the first L - T + i + 1."""
    num_new, num_heads, head_dim = q_THD.shape
    num_before = keys_LKD.shape[0] - num_new
    heads_per_kv_head = num_heads // keys_LKD.shape[1]
    out_THD = torch.empty(num_new, num_heads, head_dim)
    for token in range(num_new):
        visible = num_before + token + 1
        for head in range(num_heads):
            keys_VD = keys_LKD[:visible, head // heads_per_kv_head].float()
            values_VD = values_LKD[:visible, head // heads_per_kv_head].float()
            scores_V = keys_VD @ q_THD[token, head].float() / head_dim**0.5
            out_THD[token, head] = torch.softmax(scores_V, dim=0) @ values_VD
    return out_THD
