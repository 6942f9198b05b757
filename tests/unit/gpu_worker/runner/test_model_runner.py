"""Whatever a plan does to rows, chunks and blocks, each sequence gets the tokens that it would get alone."""

from collections.abc import Sequence
from typing import Any

import pytest

from gpu_worker.runner.model_runner import ModelRunner
from plugins.errors import InvariantBroken
from plugins.types import BlockCopy, BlockId, FinishReason, StepPlan
from tests.unit.gpu_worker.tiny import (
    BROKEN_TOKEN,
    OUTPUTS,
    PROMPTS,
    admission,
    chunk,
    decode,
    plan,
    run,
    tiny_runner,
    tokens_of,
)


def start(runner: ModelRunner, row: int, prompt: Sequence[int], blocks: Sequence[int], **sampling: Any) -> int:
    """Admit and prefill one sequence; return its first token."""
    result = run(runner, plan(chunk(row, len(prompt), blocks), admitted=[admission(row, prompt, **sampling)]))
    return result.token_ids[0]


def test_a_prompt_in_one_chunk_and_its_decodes_give_the_tokens_of_transformers() -> None:
    runner = tiny_runner()

    first = start(runner, 0, PROMPTS[0], blocks=range(5))

    assert (first, *decode(runner, 0, 7)) == OUTPUTS[0]


def test_a_prompt_in_three_chunks_gives_the_same_tokens() -> None:
    runner = tiny_runner()

    run(runner, plan(chunk(0, 3, range(5)), admitted=[admission(0, PROMPTS[0])]))
    middle = run(runner, plan(chunk(0, 6)))
    last = run(runner, plan(chunk(0, 2)))

    assert middle.rows == ()
    assert last.token_ids + decode(runner, 0, 7) == OUTPUTS[0]


def test_blocks_may_come_one_by_one_and_in_any_order() -> None:
    runner = tiny_runner()

    first = start(runner, 0, PROMPTS[1], blocks=[29])
    tokens = [first]
    for step in range(7):
        new_blocks = {2: [3], 6: [17]}.get(step, [])
        tokens.extend(run(runner, plan(chunk(0, 1, new_blocks))).token_ids)

    assert tuple(tokens) == OUTPUTS[1]


def test_sequences_of_different_lengths_do_not_disturb_each_other() -> None:
    runner = tiny_runner()
    admitted = [admission(row, prompt) for row, prompt in enumerate(PROMPTS)]
    chunks = [chunk(row, len(prompt), range(row * 8, row * 8 + 7)) for row, prompt in enumerate(PROMPTS)]

    results = [run(runner, plan(*chunks, admitted=admitted))]
    results += [run(runner, plan(*(chunk(row, 1) for row in (2, 0, 3, 1)))) for _ in range(7)]

    assert [sum((tokens_of(result)[row] for result in results), ()) for row in range(4)] == list(OUTPUTS)


def test_a_prompt_chunk_and_a_decode_share_a_step() -> None:
    runner = tiny_runner()
    start(runner, 0, PROMPTS[0], blocks=range(5))

    mixed = run(runner, plan(chunk(3, 10, range(8, 15)), chunk(0, 1), admitted=[admission(3, PROMPTS[3])]))
    then = run(runner, plan(chunk(0, 1), chunk(3, 7)))

    assert tokens_of(mixed) == {0: OUTPUTS[0][1:2]}
    assert tokens_of(then) == {0: OUTPUTS[0][2:3], 3: OUTPUTS[3][:1]}


def test_one_long_decode_beside_many_short_ones_changes_no_token() -> None:
    runner = tiny_runner(num_blocks=200, max_sequences=6)
    run(runner, plan(chunk(0, 59, range(15)), admitted=[admission(0, (PROMPTS[3] * 4)[:59])]))
    for row in range(1, 6):
        start(runner, row, PROMPTS[1], blocks=range(row * 20, row * 20 + 3))

    result = run(runner, plan(*(chunk(row, 1) for row in range(6))))

    assert [tokens_of(result)[row] for row in range(1, 6)] == [OUTPUTS[1][1:2]] * 5


def test_a_row_and_its_blocks_serve_another_sequence_in_the_plan_that_releases_them() -> None:
    runner = tiny_runner()
    start(runner, 0, PROMPTS[3], blocks=range(7))

    result = run(runner, plan(chunk(0, 6, range(7)), admitted=[admission(0, PROMPTS[2])], released=[0]))

    assert result.token_ids + decode(runner, 0, 7) == OUTPUTS[2]


def test_a_preempted_sequence_goes_on_with_the_tokens_it_had() -> None:
    runner = tiny_runner()
    so_far = PROMPTS[0] + OUTPUTS[0][:3]

    result = run(runner, plan(chunk(2, 14, range(6)), admitted=[admission(2, so_far, num_prompt_tokens=11)]))

    assert result.token_ids + decode(runner, 2, 4) == OUTPUTS[0][3:]


def test_copied_blocks_hold_what_the_source_held_when_the_plan_began() -> None:
    runner = tiny_runner()
    start(runner, 0, PROMPTS[3], blocks=[0, 1, 2, 3, 4, 5, 6])
    copies = tuple(BlockCopy(BlockId(source), BlockId(source + 10)) for source in range(4))

    cached = admission(1, PROMPTS[3], num_cached_tokens=16, blocks=[10, 11, 12, 13])
    result = run(runner, plan(chunk(1, 1, [20, 21]), admitted=[cached], released=[0], block_copies=copies))

    assert result.token_ids + decode(runner, 1, 7) == OUTPUTS[3]


def test_two_blocks_can_change_places() -> None:
    runner = tiny_runner()
    start(runner, 0, PROMPTS[3], blocks=[0, 1, 2, 3, 4])
    swap = (BlockCopy(BlockId(0), BlockId(1)), BlockCopy(BlockId(1), BlockId(0)))

    cached = admission(1, PROMPTS[3], num_cached_tokens=16, blocks=[1, 0, 2, 3])
    result = run(runner, plan(chunk(1, 1, [20]), admitted=[cached], released=[0], block_copies=swap))

    assert result.token_ids == OUTPUTS[3][:1]


def test_decode_steps_repeat_the_decode() -> None:
    runner = tiny_runner()
    for row in (0, 1):
        start(runner, row, PROMPTS[row], blocks=range(row * 8, row * 8 + 5))

    result = run(runner, plan(chunk(0, 1), chunk(1, 1), decode_steps=7))

    assert tokens_of(result) == {0: OUTPUTS[0][1:], 1: OUTPUTS[1][1:]}


def test_a_row_that_reaches_its_length_within_decode_steps_stops_there() -> None:
    runner = tiny_runner()
    start(runner, 0, PROMPTS[0], blocks=range(5), max_tokens=3)
    start(runner, 1, PROMPTS[1], blocks=range(8, 12))

    result = run(runner, plan(chunk(0, 1), chunk(1, 1), decode_steps=7))

    assert tokens_of(result) == {0: OUTPUTS[0][1:3], 1: OUTPUTS[1][1:]}
    assert dict(zip(result.rows, result.finishes, strict=True)) == {0: FinishReason.LENGTH, 1: None}


def test_a_stop_token_is_reported_and_ends_the_row() -> None:
    runner = tiny_runner()
    start(runner, 0, PROMPTS[0], blocks=range(5), stop_token_ids=(28,))

    result = run(runner, plan(chunk(0, 1), decode_steps=5))

    assert result.token_ids == (77, 28)
    assert result.finishes == (FinishReason.STOP,)


@pytest.mark.parametrize(("ignore_eos", "finish"), [(False, FinishReason.STOP), (True, None)])
def test_the_models_own_end_stops_a_row_unless_it_is_ignored(ignore_eos: bool, finish: FinishReason | None) -> None:
    runner = tiny_runner(eos_token_id=69)

    result = run(
        runner,
        plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0], ignore_eos=ignore_eos)]),
    )

    assert result.token_ids == (69,)
    assert result.finishes == (finish,)


def test_max_tokens_counts_from_the_prompt_also_after_a_preemption() -> None:
    runner = tiny_runner()
    resumed = admission(0, PROMPTS[0] + OUTPUTS[0][:3], num_prompt_tokens=11, max_tokens=4)

    result = run(runner, plan(chunk(0, 14, range(5)), admitted=[resumed]))

    assert result.token_ids == OUTPUTS[0][3:4]
    assert result.finishes == (FinishReason.LENGTH,)


def test_a_full_context_ends_a_row() -> None:
    runner = tiny_runner(max_model_len=13)
    start(runner, 0, PROMPTS[0], blocks=range(4), max_tokens=None)

    result = run(runner, plan(chunk(0, 1)))

    assert result.token_ids == OUTPUTS[0][1:2]
    assert result.finishes == (FinishReason.LENGTH,)


def test_a_plan_launched_behind_the_token_that_fills_the_context_computes_nothing() -> None:
    runner = tiny_runner(max_model_len=13, max_sequences=1)
    start(runner, 0, PROMPTS[0], blocks=range(4), max_tokens=None)

    filling = runner.launch(plan(chunk(0, 1)))
    behind = runner.launch(plan(chunk(0, 1)))

    assert tokens_of(filling.result()) == {0: OUTPUTS[0][1:2]}
    assert tokens_of(behind.result()) == {0: ()}


def test_a_plan_that_names_a_finished_row_skips_it() -> None:
    runner = tiny_runner()
    start(runner, 0, PROMPTS[0], blocks=range(5), stop_token_ids=(69,))
    start(runner, 1, PROMPTS[1], blocks=range(8, 12))

    result = run(runner, plan(chunk(0, 1, [6]), chunk(1, 1)))

    assert tokens_of(result) == {0: (), 1: OUTPUTS[1][1:2]}
    assert result.finishes == (None, None)


def test_a_plan_launched_before_the_result_that_ends_a_row_reports_nothing_of_it() -> None:
    runner = tiny_runner()
    first = runner.launch(plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0], stop_token_ids=(69,))]))
    second = runner.launch(plan(chunk(0, 1)))

    results = [first.result(), second.result()]

    assert [tokens_of(result) for result in results] == [{0: (69,)}, {0: ()}]
    assert [result.finishes for result in results] == [(FinishReason.STOP,), (None,)]


def test_a_result_read_after_its_row_changed_hands_is_not_taken_for_the_new_owners() -> None:
    runner = tiny_runner()
    start(runner, 0, PROMPTS[0], blocks=range(5))
    of_old = runner.launch(plan(chunk(0, 1)))
    of_new = runner.launch(
        plan(chunk(0, 2, range(8, 11)), admitted=[admission(0, PROMPTS[1], stop_token_ids=(77,))], released=[0])
    )

    results = [of_old.result(), of_new.result()]

    assert [tokens_of(result) for result in results] == [{0: ()}, {0: OUTPUTS[1][:1]}]
    assert decode(runner, 0, 7) == OUTPUTS[1][1:]


def test_a_row_whose_scores_are_not_numbers_fails_alone() -> None:
    runner = tiny_runner(is_broken=True)
    admitted = [admission(0, (4, BROKEN_TOKEN, 6)), admission(1, PROMPTS[1])]

    result = run(runner, plan(chunk(0, 3, [0]), chunk(1, 2, [8, 9, 10]), admitted=admitted))

    assert tokens_of(result) == {1: OUTPUTS[1][:1]}
    assert [(failure.row, failure.reason) for failure in result.failures] == [(0, "LOGITS_NOT_FINITE")]
    assert decode(runner, 1, 7) == OUTPUTS[1][1:]


def test_a_plan_launched_before_a_failure_is_known_reports_nothing_of_the_row() -> None:
    runner = tiny_runner(is_broken=True)
    failing = runner.launch(plan(chunk(0, 1, [0]), admitted=[admission(0, (BROKEN_TOKEN,))]))
    behind = runner.launch(plan(chunk(0, 1)))

    results = [failing.result(), behind.result()]

    assert [len(result.failures) for result in results] == [1, 0]
    assert tokens_of(results[1]) == {0: ()}


def test_the_blocks_of_a_failed_row_bring_nothing_to_their_next_owner() -> None:
    runner = tiny_runner(is_broken=True)
    broken = (BROKEN_TOKEN,) * 12
    run(runner, plan(chunk(0, 12, [0, 1, 2]), admitted=[admission(0, broken)]))

    result = run(runner, plan(chunk(0, 2, [0, 1, 2]), admitted=[admission(0, PROMPTS[1])], released=[0]))

    assert result.token_ids + decode(runner, 0, 7) == OUTPUTS[1]


def test_prompt_tokens_are_those_that_were_known_at_admission() -> None:
    runner = tiny_runner()

    prefill = runner.launch(plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0])]))
    step = runner.launch(plan(chunk(0, 1)))

    assert (prefill.num_prompt_tokens, step.num_prompt_tokens) == (11, 0)


def test_after_a_reset_every_row_is_free() -> None:
    runner = tiny_runner()
    start(runner, 0, PROMPTS[0], blocks=range(5))

    runner.reset()

    assert runner.num_rows == 0
    assert start(runner, 0, PROMPTS[1], blocks=range(5)) == OUTPUTS[1][0]


PREFILL = chunk(0, 2, [0, 1])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (plan(chunk(0, 65, range(20))), "65 tokens; at most 64"),
        (plan(chunk(0, 1), decode_steps=0), "0 decode steps"),
        (plan(chunk(0, 2), decode_steps=2), "not made of decodes"),
        (plan(chunk(1, 1)), "row 1 is in a chunk, but holds no sequence"),
        (plan(chunk(4, 1)), "row 4 is in a chunk, but holds no sequence"),
        (plan(chunk(-1, 1)), "row -1 is in a chunk, but holds no sequence"),
        (plan(chunk(0, 1), chunk(0, 1)), "two chunks"),
        (plan(chunk(0, 2)), "a chunk of 2 does not fit"),
        (plan(chunk(0, 0)), "a chunk of 0 does not fit"),
        (plan(chunk(0, 1, [32])), "blocks are in [0, 32)"),
        (plan(chunk(0, 1, range(15))), "a full context has 16"),
        (plan(released=[1]), "row 1 is released, but holds no sequence"),
        (plan(block_copies=(BlockCopy(BlockId(0), BlockId(32)),)), "copies block 0 to 32"),
        (plan(admitted=[admission(0, (1, 2))]), "holds a sequence already"),
        (plan(admitted=[admission(4, (1, 2))]), "rows are in [0, 4)"),
        (plan(admitted=[admission(1, ())]), "admitted with 0 tokens"),
        (plan(admitted=[admission(1, range(64))]), "admitted with 64 tokens"),
        (plan(admitted=[admission(1, (1, 96))]), "outside [0, 96)"),
        (plan(admitted=[admission(1, (1, 2), num_cached_tokens=2, blocks=[5])]), "2 of 2 tokens cached"),
        (plan(admitted=[admission(1, range(9), num_cached_tokens=5, blocks=[5])]), "in blocks for 4"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_with_the_numbers(broken: StepPlan, message: str) -> None:
    runner = tiny_runner()
    run(runner, plan(PREFILL, admitted=[admission(0, PROMPTS[1])]))

    with pytest.raises(InvariantBroken) as caught:
        runner.launch(broken)

    assert message in str(caught.value)


def test_a_chunk_that_its_blocks_do_not_cover_is_refused() -> None:
    runner = tiny_runner()

    with pytest.raises(InvariantBroken, match="blocks for 4 tokens; its chunk ends at 5"):
        runner.launch(plan(chunk(0, 5, [0]), admitted=[admission(0, PROMPTS[0])]))
