"""Log-probabilities that a plan tells: of chosen tokens and of prompts. Expected values are transformers' answers."""

import math
from typing import Any

import pytest
import torch

from plugins.types import LogprobsMode, PromptLogprobs, StepResult, TokenLogprobs
from tests.unit.gpu_worker.runner.assembled import assemble
from tests.unit.gpu_worker.tiny import (
    BROKEN_TOKEN,
    FIRST_TOKEN_LOGPROBS,
    OUTPUTS,
    PROMPT_LOGPROBS,
    PROMPTS,
    admission,
    chunk,
    plan,
    run,
    tiny_runner,
)

TOLERANCE = 2e-4  # the expected values have four digits behind the point


def check(entry: TokenLogprobs | None, expected: tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]) -> None:
    assert entry is not None
    assert (entry.token_ids, entry.ranks) == (expected[0], expected[2])
    assert entry.logprobs == pytest.approx(expected[1], abs=TOLERANCE)


def prompt_of(*results: StepResult) -> list[tuple[int, TokenLogprobs]]:
    """The places that were told, in the order of telling."""
    parts: list[PromptLogprobs] = [part for result in results for part in result.prompt_logprobs]
    assert all(part.row == 0 for part in parts)
    return [(part.start + index, entry) for part in parts for index, entry in enumerate(part.places)]


def check_prompt(told: list[tuple[int, TokenLogprobs]]) -> None:
    assert [place for place, _ in told] == list(range(1, 11))
    for (_, entry), expected in zip(told, PROMPT_LOGPROBS, strict=True):
        check(entry, expected)


def test_a_row_that_asks_is_told_of_its_token_and_the_likeliest_ones() -> None:
    runner = tiny_runner()

    result = run(runner, plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0], logprobs=3)]))

    assert len(result.logprobs) == 1
    check(result.logprobs[0], FIRST_TOKEN_LOGPROBS)


def test_each_token_of_a_plan_has_an_entry_and_who_did_not_ask_has_none() -> None:
    runner = tiny_runner()
    for row in (0, 1):
        admitted = [admission(row, PROMPTS[row], logprobs=1 if row == 0 else None)]
        run(runner, plan(chunk(row, len(PROMPTS[row]), range(row * 8, row * 8 + 5)), admitted=admitted))

    result = run(runner, plan(chunk(1, 1), chunk(0, 1), decode_steps=3))

    assert result.rows == (1, 0)
    assert [entry and entry.token_ids[0] for entry in result.logprobs] == [None, None, None, *OUTPUTS[0][1:4]]
    assert [entry.ranks for entry in result.logprobs if entry is not None] == [(1, 1)] * 3


def test_a_plan_of_which_nobody_asks_tells_nothing() -> None:
    runner = tiny_runner()

    result = run(runner, plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0])]))

    assert (result.logprobs, result.prompt_logprobs) == ((), ())


def test_every_place_of_a_prompt_but_the_first_is_told() -> None:
    runner = tiny_runner()

    result = run(runner, plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0], prompt_logprobs=2)]))

    check_prompt(prompt_of(result))
    assert result.token_ids == OUTPUTS[0][:1]


@pytest.mark.parametrize("lengths", [(3, 6, 2), (1,) * 11, (10, 1)])
def test_a_chunk_tells_of_the_place_behind_its_last_token(lengths: tuple[int, ...]) -> None:
    runner = tiny_runner()
    admitted = [admission(0, PROMPTS[0], prompt_logprobs=2)]

    results = [run(runner, plan(chunk(0, lengths[0], range(5)), admitted=admitted))]
    results += [run(runner, plan(chunk(0, length))) for length in lengths[1:]]

    check_prompt(prompt_of(*results))
    assert [place for place, _ in prompt_of(results[0])] == list(range(1, min(lengths[0], 10) + 1))


def test_a_row_that_comes_back_is_told_again_of_what_is_computed_again_and_of_no_output() -> None:
    runner = tiny_runner()
    run(runner, plan(chunk(0, 4, range(5)), admitted=[admission(0, PROMPTS[0], prompt_logprobs=2)]))
    back = admission(0, PROMPTS[0] + OUTPUTS[0][:3], num_prompt_tokens=11, prompt_logprobs=2)

    result = run(runner, plan(chunk(0, 14, range(5)), admitted=[back], released=[0]))

    check_prompt(prompt_of(result))
    assert result.token_ids == OUTPUTS[0][3:4]


def test_the_places_behind_cached_tokens_are_told() -> None:
    runner = tiny_runner()
    run(runner, plan(chunk(1, 11, range(5)), admitted=[admission(1, PROMPTS[0])]))
    cached = admission(0, PROMPTS[0], num_cached_tokens=8, blocks=range(2), prompt_logprobs=2)

    result = run(runner, plan(chunk(0, 3, [9]), admitted=[cached]))

    assert [place for place, _ in prompt_of(result)] == [9, 10]
    check(prompt_of(result)[0][1], PROMPT_LOGPROBS[8])


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    runner = tiny_runner()

    result = run(runner, plan(chunk(0, 1, [0]), admitted=[admission(0, (5,), prompt_logprobs=2)]))

    assert result.prompt_logprobs == ()


def test_rows_that_do_not_ask_are_not_scored_beside_one_that_does() -> None:
    runner = tiny_runner()
    admitted = [admission(1, PROMPTS[3]), admission(0, PROMPTS[0], prompt_logprobs=2)]

    result = run(runner, plan(chunk(1, 17, range(8, 14)), chunk(0, 11, range(5)), admitted=admitted))

    check_prompt(prompt_of(result))


def test_a_prompt_whose_scores_are_not_finite_fails_its_row() -> None:
    runner = tiny_runner(is_broken=True)
    admitted = [admission(0, (4, BROKEN_TOKEN, 6, 7), prompt_logprobs=1), admission(1, PROMPTS[1], prompt_logprobs=1)]

    result = run(runner, plan(chunk(0, 3, [0]), chunk(1, 2, [8, 9, 10]), admitted=admitted))

    assert [(failure.row, failure.reason) for failure in result.failures] == [(0, "LOGITS_NOT_FINITE")]
    assert [part.row for part in result.prompt_logprobs] == [1]
    assert result.token_ids == OUTPUTS[1][:1]


def test_what_was_computed_for_a_former_owner_of_the_row_is_told_nobody() -> None:
    runner = tiny_runner()
    of_old = runner.launch(plan(chunk(0, 4, range(5)), admitted=[admission(0, PROMPTS[0], prompt_logprobs=2)]))
    runner.launch(plan(chunk(0, 2, range(8, 11)), admitted=[admission(0, PROMPTS[1])], released=[0]))

    assert of_old.result().prompt_logprobs == ()


def test_a_forbidden_token_is_impossible_only_where_processed_scores_are_told() -> None:
    runner = assemble()
    forbid: dict[str, Any] = {"bad_word_ids": ((69,),), "logprob_token_ids": (69,), "logprobs": 0}

    raw = run(runner, plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0], **forbid)]))
    processed = run(
        runner,
        plan(
            chunk(1, 11, range(8, 13)),
            admitted=[admission(1, PROMPTS[0], logprobs_mode=LogprobsMode.PROCESSED, **forbid)],
        ),
    )

    assert raw.token_ids == processed.token_ids == (15,)
    check(raw.logprobs[0], ((15, 69), (-2.9658, -2.0833), (2, 1)))
    assert processed.logprobs[0] is not None
    assert (processed.logprobs[0].token_ids, processed.logprobs[0].ranks) == ((15, 69), (1, 96))
    assert processed.logprobs[0].logprobs == pytest.approx(
        (-2.9658 - math.log(1 - math.exp(-2.0833)), -math.inf), abs=TOLERANCE
    )


def test_logprobs_survive_run_ahead() -> None:
    runner = tiny_runner()
    first = runner.launch(plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0], logprobs=0)]))
    second = runner.launch(plan(chunk(0, 1)))

    entries = [*first.result().logprobs, *second.result().logprobs]

    assert [entry and entry.token_ids for entry in entries] == [(69,), (77,)]
    assert torch.tensor([entry.logprobs[0] for entry in entries if entry is not None]).isfinite().all()
