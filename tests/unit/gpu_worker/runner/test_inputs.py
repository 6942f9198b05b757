"""Every tensor of a step, for steps small enough to check by hand."""

from collections.abc import Sequence

import torch

from gpu_worker.attention.groups import AttentionShape
from gpu_worker.runner.inputs import StepInputs, build_inputs
from gpu_worker.runner.row_table import RowTable
from plugins.types import Admission, Chunk, Row, TokenId
from tests.unit.gpu_worker.tiny import admission, chunk

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_kv_heads=2, group_size=3, head_dim=8, block_size=4)
HIDDEN = float("-inf")


def table_of(*admitted: Admission, num_blocks: int = 100) -> RowTable:
    table = RowTable(
        max_sequences=8,
        max_model_len=256,
        vocab_size=96,
        num_blocks=num_blocks,
        block_size=4,
        eos_token_ids=(TokenId(2),),
        device=CPU,
    )
    table.admit(admitted)
    return table


def inputs_of(table: RowTable, chunks: Sequence[Chunk]) -> StepInputs:
    return build_inputs(chunks, table, SHAPE, torch.float32, CPU)


def test_a_chunk_in_the_middle_of_a_prompt_reads_its_tokens_and_samples_nothing() -> None:
    table = table_of(admission(3, (10, 11, 12, 13, 14, 15, 16), num_cached_tokens=2, blocks=[5, 9]))

    inputs = inputs_of(table, [chunk(3, 4)])

    assert inputs.token_ids.tolist() == [12, 13, 14, 15]
    assert inputs.positions.tolist() == [2, 3, 4, 5]
    assert inputs.sampled_rows.tolist() == []
    assert inputs.logits_indices.tolist() == []


def test_a_token_is_written_to_its_slot_of_each_head_of_its_block() -> None:
    table = table_of(admission(3, (10, 11, 12, 13, 14), num_cached_tokens=3, blocks=[5, 9]))

    inputs = inputs_of(table, [chunk(3, 2)])

    assert inputs.write_slots.tolist() == [
        (5 * 2 + 0) * 4 + 3,  # token 3: block 5, head 0, slot 3
        (5 * 2 + 1) * 4 + 3,  # head 1
        (9 * 2 + 0) * 4 + 0,  # token 4: block 9, slot 0
        (9 * 2 + 1) * 4 + 0,
    ]


def test_a_chunk_that_ends_with_the_known_tokens_samples_at_its_last() -> None:
    decode = admission(0, (1, 2, 3), num_cached_tokens=2, blocks=[0])
    prompt = admission(1, (4, 5, 6, 7), blocks=[1])
    table = table_of(decode, prompt)

    inputs = inputs_of(table, [chunk(1, 4), chunk(0, 1)])

    assert inputs.rows.tolist() == [0, 1]
    assert inputs.token_ids.tolist() == [3, 4, 5, 6, 7]
    assert inputs.sampled_rows.tolist() == [0, 1]
    assert inputs.logits_indices.tolist() == [0, 4]
    assert inputs.sampling.positions.tolist() == [3, 4]
    assert inputs.context.idx_mapping.tolist() == [0, 1]
    assert inputs.context.input_ids.tolist() == [3, 7]
    assert inputs.context.pos.tolist() == [2, 3]
    assert inputs.context.seq_lens_upper_bound_np.tolist() == [3, 4]


def test_a_chunk_sees_its_context_and_not_what_follows_each_token() -> None:
    table = table_of(admission(0, (1, 2, 3), num_cached_tokens=1, blocks=[7]))

    (group,) = inputs_of(table, [chunk(0, 2)]).groups

    first, second = [0.0, 0.0, HIDDEN, HIDDEN], [0.0, 0.0, 0.0, HIDDEN]
    assert (group.start, group.end, group.num_sequences) == (0, 2, 1)
    assert group.heads.tolist() == [14, 15]
    assert group.mask.tolist() == [[first, first, first, second, second, second]] * 2


def test_decodes_of_similar_length_attend_together_padded_with_the_null_block() -> None:
    short = admission(0, (1, 2, 3), num_cached_tokens=2, blocks=[7])
    longer = admission(1, (1, 2, 3, 4, 5), num_cached_tokens=4, blocks=[8, 9])
    table = table_of(short, longer, num_blocks=50)

    (group,) = inputs_of(table, [chunk(1, 1), chunk(0, 1)]).groups

    assert (group.start, group.end, group.num_sequences) == (0, 2, 2)
    assert group.heads.tolist() == [14, 100, 15, 101, 16, 18, 17, 19]
    assert group.mask.tolist() == [
        [[0.0, 0.0, 0.0, HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN]],
        [[0.0, 0.0, 0.0, HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN]],
        [[0.0, 0.0, 0.0, 0.0, 0.0, HIDDEN, HIDDEN, HIDDEN]],
        [[0.0, 0.0, 0.0, 0.0, 0.0, HIDDEN, HIDDEN, HIDDEN]],
    ]


def test_padding_names_no_block_of_the_owner_before() -> None:
    table = table_of(admission(0, (1,) * 9, blocks=[20, 21, 22]), num_blocks=50)
    table.release([Row(0)])
    short = admission(0, (1, 2, 3), num_cached_tokens=2, blocks=[7])
    longer = admission(1, (1, 2, 3, 4, 5), num_cached_tokens=4, blocks=[8, 9])
    table.admit([short, longer])

    (group,) = inputs_of(table, [chunk(0, 1), chunk(1, 1)]).groups

    assert group.heads.tolist() == [14, 100, 15, 101, 16, 18, 17, 19]


def test_a_decode_whose_padding_would_cost_more_than_a_call_attends_alone() -> None:
    short = [admission(row, (1, 2), num_cached_tokens=1, blocks=[row]) for row in range(3)]
    long = admission(7, (1,) * 200, num_cached_tokens=199, blocks=range(10, 60))
    table = table_of(*short, long)

    groups = inputs_of(table, [chunk(7, 1), *(chunk(row, 1) for row in range(3))]).groups

    assert [(group.start, group.end, group.num_sequences) for group in groups] == [(0, 3, 3), (3, 4, 1)]


def test_chunks_of_different_sizes_attend_apart() -> None:
    sizes = {0: 3, 1: 1, 2: 2}
    table = table_of(*(admission(row, (9,) * size, blocks=[row]) for row, size in sizes.items()))

    inputs = inputs_of(table, [chunk(row, size) for row, size in sizes.items()])

    assert inputs.rows.tolist() == [1, 2, 0]
    assert [(group.start, group.end) for group in inputs.groups] == [(0, 1), (1, 3), (3, 6)]


def test_sampling_parameters_follow_their_rows() -> None:
    warm = admission(2, (1, 2, 3), blocks=[0], temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**63 + 5)
    greedy = admission(5, (1, 2), blocks=[1])
    table = table_of(warm, greedy)

    sampling = inputs_of(table, [chunk(2, 3), chunk(5, 2)]).sampling

    assert sampling.temperature.tolist() == [0.0, 0.5]
    assert sampling.top_k.tolist() == [0, 7]
    assert sampling.top_p.tolist() == [1.0, 0.25]
    assert sampling.min_p.tolist() == [0.0, 0.125]
    assert sampling.seeds.tolist() == [0, 2**63 + 5]
