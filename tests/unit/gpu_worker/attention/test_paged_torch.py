"""Paged attention equals attention by its definition, whatever the batch."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gpu_worker.attention import reference
from gpu_worker.attention.groups import AttentionGroup, AttentionShape
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


@pytest.mark.parametrize("block_size", [4, 16, 48])
def test_float32_gives_a_query_the_same_bits_whatever_comes_with_it(block_size: int) -> None:
    """The last 40 of 300 tokens: in one chunk, in chunks of any size, and beside longer and shorter neighbours."""
    shape = AttentionShape(num_kv_heads=2, group_size=3, head_dim=16, block_size=block_size)
    generator = torch.Generator().manual_seed(2)
    num_row_blocks = -(-700 // block_size)
    cache = KVCache(
        DeviceMemory(CPU), Float32(), num_layers=1, num_blocks=3 * num_row_blocks, block_size=block_size,
        num_kv_heads=2, head_dim=16,
    )  # fmt: skip
    lengths = {0: 300, 1: 700, 2: 20}
    for row, length in lengths.items():
        for block in range(row * num_row_blocks, (row + 1) * num_row_blocks):
            cache.clear_blocks([BlockId(block)])
        keys, values = (torch.randn(length, 2, 16, generator=generator) for _ in "kv")
        for position in range(length):
            block = row * num_row_blocks + position // block_size
            heads = torch.tensor([block * 2, block * 2 + 1])
            cache.write(0, heads * block_size + position % block_size, keys[position], values[position])
    queries = torch.randn(40, 6 * 16, generator=generator)

    def attend(start: int, end: int, others: list[int]) -> Tensor:
        """Queries [start, end) of row 0, with one decode of each of the others."""
        table = RowTable(
            max_sequences=3, max_model_len=701, vocab_size=9, num_blocks=3 * num_row_blocks, block_size=block_size,
            eos_token_ids=(), device=CPU,
        )  # fmt: skip
        spans = {0: (260 + start, 260 + end)} | {row: (lengths[row] - 1, lengths[row]) for row in others}
        for row, (first, last) in spans.items():
            blocks = range(row * num_row_blocks, row * num_row_blocks - (-last // block_size))
            table.admit([admission(row, (1,) * last, num_cached_tokens=first, blocks=blocks)])
        chunks = [chunk(row, last - first) for row, (first, last) in spans.items()]
        inputs = build_inputs(chunks, table, shape, torch.float32, CPU)
        place = inputs.rows.tolist().index(0)
        offset = int(inputs.num_tokens[:place].sum())
        q = torch.zeros(len(inputs.token_ids), 6 * 16)
        q[offset : offset + end - start] = queries[start:end]
        return PagedAttention(shape, torch.float32).run(0, q, inputs.groups, cache)[offset : offset + end - start]

    whole = attend(0, 40, [])
    cuts = [(0, 1), (1, 3), (3, 6), (6, 10), (10, 40), (39, 40)]

    for others in ([], [1], [2], [1, 2]):
        for start, end in cuts:
            assert torch.equal(attend(start, end, others), whole[start:end]), (start, end, others)


@pytest.mark.parametrize("num_queries", [1, 7])
def test_float32_gives_a_query_the_same_bits_however_little_its_context_is_padded(num_queries: int) -> None:
    """Blocks of 4 and 8 tokens: a product of fewer than 12 columns would be summed in another order."""
    shape = AttentionShape(num_kv_heads=1, group_size=3, head_dim=64, block_size=4)
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(1, 64, 64, generator=generator) for _ in "kv")
    queries = torch.randn(num_queries, 3 * 64, generator=generator)

    def attend(num_slots: int, num_known: int) -> Tensor:
        """Queries that look at `num_known` slots, of which there are more."""
        mask = torch.zeros(1, 1, num_slots)
        mask[:, :, num_known:] = -torch.inf
        cache = Slots(keys[:, :num_slots], values[:, :num_slots])
        group = AttentionGroup(0, num_queries, num_sequences=1, heads=torch.zeros(1, dtype=torch.int64), mask=mask)
        return PagedAttention(shape, torch.float32).run(0, queries, [group], cache)  # type: ignore[arg-type]  # reads

    for num_known in range(1, 12):
        padded = attend(64, num_known)
        for num_slots in range(num_known, 33):
            assert torch.equal(attend(num_slots, num_known), padded), (num_known, num_slots)


def test_float32_gives_a_lone_head_the_same_bits_with_several_threads(two_threads: None) -> None:
    """A product that is alone is cut for the threads, and what is left beside fours was summed in another order."""
    shape = AttentionShape(num_kv_heads=1, group_size=3, head_dim=64, block_size=16)
    generator = torch.Generator().manual_seed(4)
    cache = Slots(*(torch.randn(1, 208, 64, generator=generator) for _ in "kv"))
    queries = torch.randn(40, 3 * 64, generator=generator)

    def attend(start: int, end: int) -> Tensor:
        mask = torch.zeros(1, 1, 208)
        group = AttentionGroup(0, end - start, num_sequences=1, heads=torch.zeros(1, dtype=torch.int64), mask=mask)
        return PagedAttention(shape, torch.float32).run(0, queries[start:end], [group], cache)  # type: ignore[arg-type]  # reads

    whole = attend(0, 40)
    for size in (1, 2, 3, 5, 6, 9):
        assert torch.equal(attend(0, size), whole[:size]), size


@dataclass
class Slots:
    """A cache of one row, which is read as a whole."""

    keys: Tensor
    values: Tensor

    def read(self, layer: int, heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.keys, self.values
