"""The keys and values of all cached tokens, in pages.

Reads, writes, copies and clears pages by index; who owns which block is the control plane's business, and which
index belongs to which token that of `gpu_worker/runner/inputs.py`.

Shapes: B = blocks, K = KV heads, S = slots of a block, D = head dimension, N = any number of indices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.device.dtypes import torch_dtype
from gpu_worker.device.memory import DeviceMemory
from plugins.kv_cache_dtype import KVCacheDType
from plugins.types import BlockCopy, BlockId


class KVCache:
    """Pages of every layer, laid out [block, KV head, slot, head dimension]. The device thread alone calls it.

    One block more than `num_blocks` exists: `null_block`, which is zeros for ever and stands in where a
    sequence has no block.
    Invariant: a slot that no token has written since its block was handed out holds zeros, so that reading past
    a sequence's end under a mask can bring no NaN from an earlier owner.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        dtype: KVCacheDType,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self.num_blocks = num_blocks
        self.null_block = num_blocks
        page = dtype.page_shape(block_size, num_kv_heads, head_dim)
        self._pages = memory.allocate(
            "kv_cache", "pages", (num_layers, 2, num_blocks + 1, *page), torch_dtype(dtype.storage)
        )
        self._pages[:, :, self.null_block] = 0
        # A head's part of a page is contiguous: reading moves [S * D] rows, writing moves [D] rows.
        self._heads = [
            (keys_BKSD.view(-1, block_size * head_dim), values_BKSD.view(-1, block_size * head_dim))
            for keys_BKSD, values_BKSD in self._pages
        ]
        self._slots = [
            (keys_BKSD.view(-1, head_dim), values_BKSD.view(-1, head_dim)) for keys_BKSD, values_BKSD in self._pages
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, those of the null block included."""
        return self._pages.numel() * self._pages.element_size()

    def write(self, layer: int, slots_N: Tensor, keys_ND: Tensor, values_ND: Tensor) -> None:
        """Store keys and values. `slots_N[i]` is `(block * K + head) * S + slot`."""
        cached_keys, cached_values = self._slots[layer]
        cached_keys.index_copy_(0, slots_N, keys_ND.to(cached_keys.dtype))
        cached_values.index_copy_(0, slots_N, values_ND.to(cached_values.dtype))

    def read(self, layer: int, heads_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gather keys and values, each [N, S * D]. `heads_N[i]` is `block * K + head`."""
        cached_keys, cached_values = self._heads[layer]
        return cached_keys.index_select(0, heads_N).to(dtype), cached_values.index_select(0, heads_N).to(dtype)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, all at once: a source that is also a destination is read before it is written."""
        if copies:
            sources = self._pages[:, :, [copy.source for copy in copies]]
            self._pages[:, :, [copy.destination for copy in copies]] = sources

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Fill blocks that get a new owner with zeros. A block of 16 tokens of a 135M model takes 0.05 to 0.08 ms."""
        if blocks:
            self._pages[:, :, list(blocks)] = 0
