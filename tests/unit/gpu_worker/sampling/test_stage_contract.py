"""What every built-in stage keeps of the logits-processor contract, with one row that asks beside those that do not."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.types import SamplingLimits
from tests.unit.gpu_worker.sampling.tables import Tables, apply, take

PROMPT, OUTPUT = (3, 4, 5, 3), (6, 7, 6)
ASKS: Mapping[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": (6, 9)},
    "logit_bias": {"logit_bias": {6: 1.5, 30: -2.0}},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (8,)},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -0.7},
    "bad_words": {"bad_word_ids": ((9,), (7, 6, 10), (11, 12))},
}
NAMES = ("allowed_token_ids", "logit_bias", "min_tokens", "penalties", "bad_words")
every_ask = pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())


def random_logits(num_rows: int) -> Tensor:
    logits = torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(5)) * 3
    logits[:, 0] = -0.0  # bits that adding nothing would change
    return logits


def filled_tables() -> Tables:
    tables = Tables()
    for row in range(8):
        tables.put(row, PROMPT, OUTPUT)
    return tables


def bits(logits: Tensor) -> Tensor:
    return logits.contiguous().view(torch.int32)


@every_ask
def test_an_asker_is_accepted_by_one_stage_and_changed(ask: dict[str, Any]) -> None:
    tables = filled_tables()
    stages = tables.stages()

    answers = take(stages, 1, **ask)
    changed = apply(stages, random_logits(1), tables.context(1))

    assert [stage.name for stage in stages] == list(NAMES)
    assert sum(answers) == 1
    assert not torch.equal(changed, random_logits(1))


@every_ask
def test_rows_that_did_not_ask_are_left_bit_for_bit(ask: dict[str, Any]) -> None:
    tables = filled_tables()
    stages = tables.stages()
    take(stages, 0)
    take(stages, 5, **ask)
    take(stages, 6)

    changed = apply(stages, random_logits(3), tables.context(6, 5, 0))

    assert torch.equal(bits(changed)[[0, 2]], bits(random_logits(3))[[0, 2]])


@every_ask
def test_an_asker_alone_gets_the_scores_it_gets_in_any_place_of_a_batch(ask: dict[str, Any]) -> None:
    tables = filled_tables()
    stages = tables.stages()
    take(stages, 0, logit_bias={1: 3.0}, repetition_penalty=2.0, bad_word_ids=((1,), (2, 3)), allowed_token_ids=(1, 2))
    take(stages, 5, **ask)
    take(stages, 6, frequency_penalty=1.0, min_tokens=20, stop_token_ids=(1, 3, 4))

    together = apply(stages, random_logits(4), tables.context(6, 0, 5, 3))

    alone = apply(stages, random_logits(4)[2:3], tables.context(5))
    assert torch.equal(bits(alone), bits(together[2:3]))


@every_ask
def test_the_next_occupant_of_a_row_inherits_nothing(ask: dict[str, Any]) -> None:
    tables = filled_tables()
    stages = tables.stages()
    take(stages, 1, **ask)

    answers = take(stages, 1)
    changed = apply(stages, random_logits(2), tables.context(1, 2))

    assert answers == [False] * 5
    assert torch.equal(bits(changed), bits(random_logits(2)))


@every_ask
def test_a_longer_list_of_the_last_occupant_leaves_nothing_to_a_shorter_one(ask: dict[str, Any]) -> None:
    tables = filled_tables()
    stages, fresh = tables.stages(), tables.stages()
    take(
        stages,
        1,
        allowed_token_ids=tuple(range(20)),
        logit_bias=dict.fromkeys(range(20), 5.0),
        min_tokens=50,
        stop_token_ids=tuple(range(12, 20)),
        bad_word_ids=tuple((7, 6, token) for token in range(12, 20)),
        repetition_penalty=5.0,
        frequency_penalty=2.0,
        presence_penalty=2.0,
    )

    take(stages, 1, **ask)
    take(fresh, 1, **ask)

    ctx = tables.context(1)
    assert torch.equal(apply(stages, random_logits(1), ctx), apply(fresh, random_logits(1), ctx))


@every_ask
def test_a_row_that_comes_back_with_its_output_goes_on_as_if_it_had_stayed(ask: dict[str, Any]) -> None:
    tables = filled_tables()
    stayed, back = tables.stages(), tables.stages()
    tables.put(1, PROMPT, OUTPUT[:1])
    take(stayed, 1, **ask)
    tables.put(1, PROMPT, OUTPUT)
    take(back, 1, **ask)

    ctx = tables.context(1)

    assert torch.equal(apply(stayed, random_logits(1), ctx), apply(back, random_logits(1), ctx))


@every_ask
def test_behind_a_draft_the_scores_are_those_behind_the_same_token_if_it_were_known(ask: dict[str, Any]) -> None:
    tables = filled_tables()
    stages = tables.stages()
    take(stages, 1, **ask)
    take(stages, 4, **ask)
    drafts = tables.context_of_drafts((2, (9,)), (1, (7, 6)), (4, (11,)), (3, ()))
    logits = random_logits(8)

    together = apply(stages, logits.clone(), drafts)

    assert drafts.expanded_idx_mapping.tolist() == [2, 2, 1, 1, 1, 4, 4, 3]
    for place, row, output in [
        (2, 1, OUTPUT),
        (3, 1, (*OUTPUT, 7)),
        (4, 1, (*OUTPUT, 7, 6)),
        (5, 4, OUTPUT),
        (6, 4, (*OUTPUT, 11)),
    ]:
        tables.put(row, PROMPT, output)
        alone = apply(stages, logits[place : place + 1].clone(), tables.context(row))
        assert torch.equal(alone, together[place : place + 1])
    assert torch.equal(bits(together[[0, 1, 7]]), bits(logits[[0, 1, 7]]))


@every_ask
def test_rows_in_the_middle_of_their_prompt_are_tolerated(ask: dict[str, Any]) -> None:
    tables = filled_tables()
    stages = tables.stages()
    tables.put(1, PROMPT)
    take(stages, 1, **ask)
    whole = tables.context(1)
    ctx = type(whole)(
        expanded_idx_mapping=whole.idx_mapping,
        expanded_local_pos=whole.expanded_local_pos,
        idx_mapping=whole.idx_mapping,
        idx_mapping_np=whole.idx_mapping_np,
        input_ids=torch.tensor([4]),
        pos=torch.tensor([1]),
        seq_lens_upper_bound_np=whole.seq_lens_upper_bound_np - 2,
    )

    changed = apply(stages, random_logits(1), ctx)

    assert changed.shape == (1, 32)
    assert not changed.isnan().any()


@every_ask
def test_logits_that_do_not_lie_in_one_piece_are_changed_alike(ask: dict[str, Any]) -> None:
    tables = filled_tables()
    stages = tables.stages()
    take(stages, 1, **ask)
    wide = torch.cat((random_logits(2), torch.full((2, 7), 50.0)), 1)

    changed = apply(stages, wide[:, :32], tables.context(1, 2))

    assert torch.equal(changed, apply(stages, random_logits(2), tables.context(1, 2)))
    assert torch.equal(wide[:, 32:], torch.full((2, 7), 50.0))


def test_what_is_as_long_as_the_limits_fits_and_what_is_longer_is_told() -> None:
    """What admission lets through never fails here."""
    tables = Tables(vocab_size=2000)
    tables.put(0, PROMPT, OUTPUT)
    limits = SamplingLimits()
    stages = tables.stages(limits)

    answers = take(
        stages,
        0,
        allowed_token_ids=tuple(range(limits.max_allowed_token_ids)),
        logit_bias=dict.fromkeys(range(limits.max_logit_bias), 1.0),
        min_tokens=1,
        stop_token_ids=tuple(range(100, 100 + limits.max_stop_token_ids)),
        bad_word_ids=tuple((token,) * 8 for token in range(limits.max_bad_words)),
        presence_penalty=1.0,
    )
    apply(stages, torch.zeros(1, 2000), tables.context(0))

    assert answers == [True] * 5
    with pytest.raises(ValueError, match="1025 numbers do not fit; a row holds 1 to 1024"):
        take(stages, 0, allowed_token_ids=tuple(range(limits.max_allowed_token_ids + 1)))
