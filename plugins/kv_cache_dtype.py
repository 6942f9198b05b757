"""The KV-cache-dtype hook: what one token's keys and values look like in a block.

Gives geometry without torch, so that both planes can count; reading and writing pages is done in `gpu_worker/kv/`.
"""

from abc import ABC, abstractmethod

from plugins.registry import Registry


class KVCacheDType(ABC):
    """How keys and values are stored. Stateless.

    A page is one block of one layer, laid out [kv head, token, head dim], once for keys and once for values.
    """

    storage: str  # name of the tensor element type that holds the pages, such as bfloat16

    @abstractmethod
    def page_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of one page, in elements of `storage`."""

    @abstractmethod
    def page_bytes(self, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        """Return the bytes of one page, with whatever scales travel with it. A block of a layer has two pages."""


KV_CACHE_DTYPES: Registry[KVCacheDType] = Registry("kv_cache_dtype", KVCacheDType)  # type: ignore[type-abstract]  # a registry's base may be abstract
register_kv_cache_dtype = KV_CACHE_DTYPES.register
