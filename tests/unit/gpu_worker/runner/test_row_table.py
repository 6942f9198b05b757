"""What logits processors see of the rows: the table is their RequestStates."""

import numpy as np
import torch

from gpu_worker.runner.row_table import RowTable
from plugins.logits import RequestStates
from plugins.types import Row, TokenId
from tests.unit.gpu_worker.tiny import admission


def make_table() -> RowTable:
    return RowTable(
        max_sequences=3,
        max_model_len=8,
        vocab_size=96,
        num_blocks=4,
        block_size=4,
        eos_token_ids=(TokenId(2),),
        device=torch.device("cpu"),
    )


def test_processors_see_tokens_and_lengths_of_a_resumed_sequence() -> None:
    table = make_table()
    states: RequestStates = table

    table.admit([admission(1, (7, 8, 9), num_prompt_tokens=2)])

    assert states.all_token_ids[1, :3].tolist() == [7, 8, 9]
    assert [states.prompt_len[1], states.prefill_len[1], states.total_len[1]] == [2, 3, 3]
    assert (states.max_num_reqs, states.vocab_size, states.device) == (3, 96, torch.device("cpu"))


def test_an_appended_token_lengthens_its_row_alone() -> None:
    table = make_table()
    table.admit([admission(0, (7, 8)), admission(2, (5,))])

    table.append(np.array([2]), torch.tensor([33]), np.array([False]))

    assert table.all_token_ids[2, :2].tolist() == [5, 33]
    assert table.total_len.tolist() == [2, 0, 2]
    assert table.prefill_len.tolist() == [2, 0, 1]


def test_a_released_row_does_not_go_on_and_a_new_owner_is_somebody_else() -> None:
    table = make_table()
    table.admit([admission(0, (7, 8))])
    before = int(table.occupancy[0])

    table.release([Row(0)])
    goes_on_after_release = table.goes_on(Row(0), before)
    table.admit([admission(0, (5,))])

    assert not goes_on_after_release
    assert not table.goes_on(Row(0), before)
    assert table.goes_on(Row(0), before + 1)
    assert table.num_occupied == 1
