"""How much of a prompt is scored at a time, and for whom."""

import torch
from torch import Tensor

from gpu_worker.attention.groups import AttentionShape
from gpu_worker.runner.inputs import build_inputs
from gpu_worker.runner.row_table import RowTable
from gpu_worker.sampling.prompt_logprobs import PromptScorer
from plugins.types import Row
from tests.unit.gpu_worker.tiny import admission, chunk

SHAPE = AttentionShape(num_kv_heads=2, group_size=3, head_dim=8, block_size=4)
CPU = torch.device("cpu")


class CountingHead:
    """Scores that make the token of a hidden state the likeliest; keeps account of how many there were at once."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def __call__(self, hidden_AE: Tensor) -> Tensor:
        self.num_rows.append(len(hidden_AE))
        return torch.nn.functional.one_hot(hidden_AE[:, 0].long(), 96).float() * 9


def table_of_one(prompt: list[int]) -> RowTable:
    table = RowTable(
        max_sequences=4, max_model_len=256, vocab_size=96, num_blocks=90, block_size=4, eos_token_ids=(), device=CPU
    )
    table.admit([admission(1, prompt, blocks=range(60)), admission(2, prompt, blocks=range(60))])
    return table


def test_no_more_than_64_places_are_scored_at_once() -> None:
    prompt = [index % 90 for index in range(200)]
    table, head = table_of_one(prompt), CountingHead()
    scorer = PromptScorer(head, table.token_ids_at)
    scorer.admit([admission(1, prompt, prompt_logprobs=1), admission(2, prompt)])
    inputs = build_inputs([chunk(2, 200), chunk(1, 200)], table, SHAPE, torch.float32, CPU)
    hidden_TE = inputs.token_ids.unsqueeze(1)

    (columns,) = scorer.tell(hidden_TE, inputs)

    told = columns.read()
    assert head.num_rows == [64, 64, 64, 7]
    assert told is not None
    assert (told.row, told.start, len(told.places)) == (1, 1, 199)
    assert [place.token_ids for place in told.places] == [(prompt[i], prompt[i - 1]) for i in range(1, 200)]


def test_a_row_that_was_released_or_has_another_owner_is_not_scored() -> None:
    prompt = [5, 6, 7]
    table, head = table_of_one(prompt), CountingHead()
    scorer = PromptScorer(head, table.token_ids_at)
    asks = [admission(1, prompt, prompt_logprobs=1), admission(2, prompt, prompt_logprobs=1)]
    inputs = build_inputs([chunk(2, 3), chunk(1, 3)], table, SHAPE, torch.float32, CPU)

    scorer.admit(asks)
    scorer.release([Row(1)])
    scorer.admit([admission(2, prompt)])
    told = scorer.tell(inputs.token_ids.unsqueeze(1), inputs)
    scorer.admit(asks)
    scorer.clear()

    assert told == scorer.tell(inputs.token_ids.unsqueeze(1), inputs) == ()
    assert head.num_rows == []
