"""Sequences that attend together: what one call of an attention kernel works on.

A value and its shapes; `gpu_worker/runner/inputs.py` makes it, the kernels beside this file read it.
"""

from dataclasses import dataclass

from torch import Tensor

from plugins.model_loader import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention needs to know of a model and its cache. K = KV heads, G = query heads per KV head."""

    num_kv_heads: int
    group_size: int
    head_dim: int
    block_size: int

    @classmethod
    def of(cls, config: ModelConfig, block_size: int) -> "AttentionShape":
        return cls(
            num_kv_heads=config.num_key_value_heads,
            group_size=config.num_attention_heads // config.num_key_value_heads,
            head_dim=config.head_dim,
            block_size=block_size,
        )


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """B sequences with Q new tokens each, whose contexts are padded to L slots (P blocks).

    Their tokens are [start, end) of the step, sequence after sequence. A sequence's own tokens are in the
    cache before it attends.
    """

    start: int
    end: int  # start + B * Q
    num_sequences: int  # B
    heads: Tensor  # [B * K * P] int64: rows of KVCache.read, ordered by sequence, KV head, block
    mask: Tensor  # [B * K, Q * G or 1, L] in the model's dtype: 0 where a query may look, else -inf
