"""Pages by hand: where a head's slots lie, and what copying and clearing touch."""

import pytest
import torch

from gpu_worker.device.memory import DeviceMemory
from gpu_worker.kv.cache import KVCache
from gpu_worker.kv.dtypes import BFloat16, Float32
from plugins.kv_cache_dtype import KV_CACHE_DTYPES, KVCacheDType
from plugins.types import BlockCopy, BlockId

FLOAT32 = torch.float32


def make_cache(dtype: KVCacheDType | None = None) -> KVCache:
    return KVCache(
        DeviceMemory(torch.device("cpu")),
        dtype or Float32(),
        num_layers=2,
        num_blocks=3,
        block_size=2,
        num_kv_heads=2,
        head_dim=4,
    )


def test_a_head_reads_back_its_own_slots_of_one_layer() -> None:
    cache = make_cache()
    cache.clear_blocks([BlockId(1)])
    slots = torch.tensor([(1 * 2 + 0) * 2 + 1, (1 * 2 + 1) * 2 + 1])  # block 1, slot 1, both heads

    cache.write(0, slots, torch.tensor([[1.0] * 4, [2.0] * 4]), torch.tensor([[3.0] * 4, [4.0] * 4]))

    keys, values = cache.read(0, torch.tensor([2, 3]), FLOAT32)
    untouched, _ = cache.read(1, torch.tensor([2, 3]), FLOAT32)
    assert keys.tolist() == [[0.0] * 4 + [1.0] * 4, [0.0] * 4 + [2.0] * 4]
    assert values.tolist() == [[0.0] * 4 + [3.0] * 4, [0.0] * 4 + [4.0] * 4]
    assert untouched.tolist() == [[0.0] * 8, [0.0] * 8]


def test_the_null_block_is_zeros() -> None:
    cache = make_cache()

    keys, values = cache.read(1, torch.tensor([cache.null_block * 2, cache.null_block * 2 + 1]), FLOAT32)

    assert keys.tolist() == values.tolist() == [[0.0] * 8, [0.0] * 8]


def test_a_copy_carries_every_layer_and_leaves_the_source() -> None:
    cache = make_cache()
    cache.clear_blocks([BlockId(0), BlockId(2)])
    for layer in (0, 1):
        cache.write(layer, torch.tensor([0]), torch.full((1, 4), 5.0 + layer), torch.full((1, 4), 7.0 + layer))

    cache.copy_blocks([BlockCopy(BlockId(0), BlockId(2))])

    for layer in (0, 1):
        keys, values = cache.read(layer, torch.tensor([0, 4]), FLOAT32)
        assert keys[:, :4].tolist() == [[5.0 + layer] * 4] * 2
        assert values[:, :4].tolist() == [[7.0 + layer] * 4] * 2


@pytest.mark.parametrize(("name", "element_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_the_bytes_of_a_page_are_those_of_its_tensor(name: str, element_bytes: int) -> None:
    dtype = KV_CACHE_DTYPES.get(name)()

    cache = make_cache(dtype)

    assert dtype.page_bytes(2, 2, 4) == 16 * element_bytes
    assert cache.num_bytes == 2 * 2 * (3 + 1) * 16 * element_bytes  # layers, keys and values, blocks and zeros


def test_a_cache_may_keep_less_than_the_model_computes() -> None:
    cache = make_cache(BFloat16())

    cache.write(0, torch.tensor([0]), torch.full((1, 4), 1.0 + 2**-12), torch.zeros(1, 4))

    keys, _ = cache.read(0, torch.tensor([0]), FLOAT32)
    assert keys.dtype == FLOAT32
    assert keys[0, :4].tolist() == [1.0] * 4
