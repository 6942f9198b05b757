"""Paged attention equals attention by its definition, whatever the batch."""

import pytest
import torch
from torch import Tensor

from gpu_worker.attention import reference
from gpu_worker.attention.groups import AttentionShape
from gpu_worker.attention.paged_torch import PagedAttention
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.kv.cache import KVCache
from gpu_worker.kv.dtypes import BFloat16, Float32
from gpu_worker.runner.inputs import build_inputs
from gpu_worker.runner.row_table import RowTable
from plugins.types import BlockId
from tests.unit.gpu_worker.tiny import admission, chunk

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_kv_heads=2, group_size=3, head_dim=16, block_size=4)
# float32: another order of sums. bfloat16 has 8 bits: scores, weights and output are each rounded once.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
BATCHES = {
    "one decode": [(9, 1)],
    "decodes of different lengths": [(1, 1), (30, 1), (17, 1), (16, 1)],
    "a whole prompt": [(11, 11)],
    "a chunk behind cached tokens": [(23, 7)],
    "decodes, chunks and prompts": [(50, 1), (3, 3), (21, 8), (2, 1), (40, 8)],
    "enough queries and keys for bfloat16's other kernel": [(120, 60), (100, 1), (99, 1)],
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_each_token_sees_what_the_definition_says(batch: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """A batch is a list of sequences: context length, and how many of its last tokens are new."""
    generator = torch.Generator().manual_seed(1)
    cache = KVCache(
        DeviceMemory(CPU),
        Float32() if dtype == torch.float32 else BFloat16(),
        num_layers=2,
        num_blocks=300,
        block_size=4,
        num_kv_heads=2,
        head_dim=16,
    )
    table = RowTable(
        max_sequences=8, max_model_len=128, vocab_size=9, num_blocks=300, block_size=4, eos_token_ids=(), device=CPU
    )
    contexts: list[tuple[Tensor, Tensor]] = []
    for row, (length, num_new) in enumerate(batch):
        blocks = range(row * 40 + 39, row * 40 + 39 - -(-length // 4), -1)
        table.admit([admission(row, (1,) * length, num_cached_tokens=length - num_new, blocks=blocks)])
        cache.clear_blocks([BlockId(block) for block in blocks])
        keys, values = (torch.randn(length, 2, 16, generator=generator).to(dtype) for _ in "kv")
        contexts.append((keys, values))
        for position in range(length):
            heads = torch.tensor([blocks[position // 4] * 2, blocks[position // 4] * 2 + 1])
            cache.write(1, heads * 4 + position % 4, keys[position], values[position])
    chunks = [chunk(row, num_new) for row, (_, num_new) in enumerate(batch)]
    inputs = build_inputs(chunks, table, SHAPE, dtype, CPU)
    q = torch.randn(len(inputs.token_ids), 6 * 16, generator=generator).to(dtype)

    out = PagedAttention(SHAPE, dtype).run(1, q, inputs.groups, cache)

    start = 0
    for row, num_new in zip(inputs.rows.tolist(), inputs.num_tokens.tolist(), strict=True):
        keys, values = contexts[row]
        expected = reference.attention(q[start : start + num_new].view(num_new, 6, 16), keys, values)
        actual = out[start : start + num_new].view(num_new, 6, 16).float()
        torch.testing.assert_close(actual, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        start += num_new
    assert start == len(out)
