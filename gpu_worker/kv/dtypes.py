"""The KV-cache dtypes that come with the worker: keys and values kept as plain numbers.

Says element type and geometry; where pages live is the business of `gpu_worker/kv/cache.py`.
"""

from plugins.kv_cache_dtype import KVCacheDType, register_kv_cache_dtype


class _PlainDType(KVCacheDType):
    """Elements as they are, with no scales."""

    element_bytes: int

    def page_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_kv_heads, block_size, head_dim)

    def page_bytes(self, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        return num_kv_heads * block_size * head_dim * self.element_bytes


@register_kv_cache_dtype("bfloat16")
class BFloat16(_PlainDType):
    storage = "bfloat16"
    element_bytes = 2


@register_kv_cache_dtype("float32")
class Float32(_PlainDType):
    storage = "float32"
    element_bytes = 4
