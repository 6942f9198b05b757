"""Attention over KV pages in plain torch: gather the pages, then two products around a softmax.

Queries that share a KV head are packed into the query length, so that keys and values are never repeated.
What belongs together in one call is decided in `gpu_worker/runner/inputs.py`.

Shapes: B = sequences, Q = new tokens of each, L = padded context, K = KV heads, G = query heads per KV head,
H = K * G, D = head dimension, T = tokens of the step.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.attention.groups import AttentionGroup, AttentionShape
from gpu_worker.kv.cache import KVCache

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # queries, keys, values, mask -> [N, M, D]

MAX_FUSED_SCORES = 3000  # below it the fused kernel is the faster one in bfloat16
TILE_TOKENS = 128  # longer sums are cut at places that depend on their length
QUERIES_AT_A_TIME = 4  # others are summed in another order: fewer, and what threads leave of a product that is alone
MIN_CONTEXT = 16  # and so are products of fewer than 12 columns


class PagedAttention:
    """Attention of one model on one device. Stateless; one thread at a time."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._shape = shape
        self._attend: Attend = _tiled if dtype == torch.float32 else _fastest

    def run(self, layer: int, q_TF: Tensor, groups: Sequence[AttentionGroup], cache: KVCache) -> Tensor:
        """Let every new token look at its sequence so far. q_TF: [T, H * D]; returns the same shape."""
        outs = [self._run_group(layer, q_TF[group.start : group.end], group, cache) for group in groups]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _run_group(self, layer: int, q_TF: Tensor, group: AttentionGroup, cache: KVCache) -> Tensor:
        shape, batch = self._shape, group.num_sequences * self._shape.num_kv_heads
        keys, values = cache.read(layer, group.heads, q_TF.dtype)
        q_BQKGD = q_TF.view(group.num_sequences, -1, shape.num_kv_heads, shape.group_size, shape.head_dim)
        q_NMD = q_BQKGD.transpose(1, 2).reshape(batch, -1, shape.head_dim)  # N = B * K, M = Q * G
        keys_NLD, values_NLD = keys.view(batch, -1, shape.head_dim), values.view(batch, -1, shape.head_dim)
        out_NMD = self._attend(q_NMD, keys_NLD, values_NLD, group.mask)
        out_BKQF = out_NMD.reshape(group.num_sequences, shape.num_kv_heads, -1, shape.group_size * shape.head_dim)
        return out_BKQF.transpose(1, 2).reshape(q_TF.shape)


def _tiled(q_NMD: Tensor, keys_NLD: Tensor, values_NLD: Tensor, mask_NML: Tensor) -> Tensor:
    """float32's way: a query gets the same bits whatever the batch, the padding and the chunk that it comes in.

    The products behind it sum one element's terms in order as long as rows come by QUERIES_AT_A_TIME and there are
    MIN_CONTEXT columns and at most TILE_TOKENS terms; so the context is summed in tiles, and the tiles in order. The
    weights are summed by a product with ones, which has the same order. A lone decode at a context of 128 takes 98 us,
    fused 33 us.
    """
    num_queries = q_NMD.shape[1]
    num_missing = -num_queries % QUERIES_AT_A_TIME
    q_NMD = F.pad(q_NMD, (0, 0, 0, num_missing))
    if mask_NML.shape[1] > 1:
        mask_NML = F.pad(mask_NML, (0, 0, 0, num_missing))
    if (num_slots := keys_NLD.shape[1]) < MIN_CONTEXT:  # blocks are smaller than that
        keys_NLD, values_NLD = (F.pad(each, (0, 0, 0, MIN_CONTEXT - num_slots)) for each in (keys_NLD, values_NLD))
        mask_NML = F.pad(mask_NML, (0, MIN_CONTEXT - num_slots), value=-torch.inf)
    weights_NML = torch.bmm(q_NMD, keys_NLD.transpose(1, 2)).mul_(q_NMD.shape[-1] ** -0.5).add_(mask_NML)
    weights_NML.sub_(weights_NML.amax(-1, keepdim=True)).exp_()
    ones_NLO = values_NLD.new_ones(len(values_NLD), TILE_TOKENS, 8)  # a single column would be summed in another order
    out_NMD, total_NMO = torch.zeros_like(q_NMD), q_NMD.new_zeros(*q_NMD.shape[:2], 8)
    for start in range(0, keys_NLD.shape[1], TILE_TOKENS):
        tile_NML = weights_NML[:, :, start : start + TILE_TOKENS]
        out_NMD += torch.bmm(tile_NML, values_NLD[:, start : start + TILE_TOKENS])
        total_NMO += torch.bmm(tile_NML, ones_NLO[:, : tile_NML.shape[2]])
    return out_NMD.div_(total_NMO[:, :, :1])[:, :num_queries]


def _fastest(q_NMD: Tensor, keys_NLD: Tensor, values_NLD: Tensor, mask_NML: Tensor) -> Tensor:
    """The other dtypes' way: whichever of the two is faster for so many scores."""
    num_scores = q_NMD.shape[0] * q_NMD.shape[1] * keys_NLD.shape[1]
    attend = _fused if num_scores < MAX_FUSED_SCORES else _products
    return attend(q_NMD, keys_NLD, values_NLD, mask_NML)


def _products(q_NMD: Tensor, keys_NLD: Tensor, values_NLD: Tensor, mask_NML: Tensor) -> Tensor:
    """Two matrix products and a softmax. bfloat16's way on CPUs: per layer, one thread, a context of 512 takes
    207 us for 8 sequences against 436 us fused, a prefill of 128 takes 250 us against 498 us. (A lone decode at a
    context of 128 takes 41 us against 25 us.)"""
    scores_NML = torch.baddbmm(mask_NML, q_NMD, keys_NLD.transpose(1, 2), alpha=q_NMD.shape[-1] ** -0.5)
    return torch.bmm(scores_NML.softmax(-1), values_NLD)


def _fused(q_NMD: Tensor, keys_NLD: Tensor, values_NLD: Tensor, mask_NML: Tensor) -> Tensor:
    """torch's fused kernel."""
    return F.scaled_dot_product_attention(
        q_NMD.unsqueeze(1), keys_NLD.unsqueeze(1), values_NLD.unsqueeze(1), attn_mask=mask_NML.unsqueeze(1)
    ).squeeze(1)
