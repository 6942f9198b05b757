"""A row whose token cannot be chosen yet loses nothing and holds nobody up; one whose scores break fails alone."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.runner.inputs import Ints
from gpu_worker.sampling.pipeline import Bools
from plugins.logits import LogitsContext
from plugins.types import Admission, Row, RowFailure
from tests.unit.gpu_worker.runner.assembled import Change, assemble
from tests.unit.gpu_worker.tiny import OUTPUTS, PROMPTS, admission, chunk, decode, plan, run, tokens_of


class Patience:
    """Grammars that allow everything, but row 0 has to wait so many times more."""

    def __init__(self, num_waits: int = 0) -> None:
        self.num_waits = num_waits

    def admit(self, admission: Admission) -> None:
        return None

    def release(self, rows: Sequence[Row]) -> None:
        return None

    def clear(self) -> None:
        return None

    def close(self) -> None:
        return None

    def begin(self, rows_R: Ints) -> None:
        return None

    def mask(self, logits_RV: Tensor, rows_R: Ints, is_alone: bool) -> tuple[Bools, list[RowFailure]]:
        is_waiting: Bools = (rows_R == 0) & (self.num_waits > 0)
        self.num_waits -= int(is_waiting.any())
        return is_waiting, []


def test_a_row_that_waits_gets_no_token_and_computes_its_last_one_again() -> None:
    runner = assemble(grammars=Patience(2))
    chunks = [chunk(0, 11, range(5)), chunk(1, 2, range(8, 11))]
    admitted = [admission(0, PROMPTS[0]), admission(1, PROMPTS[1])]

    results = [run(runner, plan(*chunks, admitted=admitted))]
    results += [run(runner, plan(chunk(0, 1), chunk(1, 1))) for _ in range(7)]

    assert [tokens_of(result)[0] for result in results[:3]] == [(), (), OUTPUTS[0][:1]]
    assert [(result.counts[result.rows.index(Row(0))], result.finishes, result.failures) for result in results[:2]] == [
        (0, (None, None), ()),
        (0, (None, None), ()),
    ]
    assert sum((tokens_of(result)[0] for result in results), ()) == OUTPUTS[0][:6]
    assert sum((tokens_of(result)[1] for result in results), ()) == OUTPUTS[1]


def test_a_row_that_waits_between_its_tokens_repeats_none() -> None:
    patience = Patience()
    runner = assemble(grammars=patience)
    run(runner, plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0])]))
    first = decode(runner, 0, 2)
    patience.num_waits = 1

    waited = run(runner, plan(chunk(0, 1)))

    assert (waited.rows, waited.counts, waited.token_ids) == ((0,), (0,), ())
    assert (*first, *decode(runner, 0, 5)) == OUTPUTS[0][1:]


def test_a_plan_in_flight_that_counted_on_the_token_chooses_it() -> None:
    runner = assemble(grammars=Patience(1))

    launched = [
        runner.launch(plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0])])),
        runner.launch(plan(chunk(0, 1))),
        runner.launch(plan(chunk(0, 1))),
    ]

    assert [tokens_of(pending.result()) for pending in launched] == [
        {0: ()},
        {0: OUTPUTS[0][:1]},
        {0: OUTPUTS[0][1:2]},
    ]
    assert decode(runner, 0, 6) == OUTPUTS[0][2:]


def test_decode_steps_that_meet_a_waiting_row_give_the_tokens_that_there_was_time_for() -> None:
    patience = Patience()
    runner = assemble(grammars=patience)
    run(runner, plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0])]))
    patience.num_waits = 2

    result = run(runner, plan(chunk(0, 1), decode_steps=7))

    assert result.token_ids == OUTPUTS[0][1:6]
    assert decode(runner, 0, 2) == OUTPUTS[0][6:]


def test_a_token_that_is_computed_again_counts_as_prompt_only_if_it_is() -> None:
    patience = Patience()
    runner = assemble(grammars=patience)
    run(runner, plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0])]))
    decode(runner, 0, 1)
    patience.num_waits = 1

    waiting = runner.launch(plan(chunk(0, 1)))

    assert waiting.num_prompt_tokens == 0


def test_a_row_that_waits_has_no_logprobs_to_tell_yet() -> None:
    runner = assemble(grammars=Patience(1))

    waited = run(runner, plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0], logprobs=1)]))
    chosen = run(runner, plan(chunk(0, 1)))

    assert waited.logprobs == ()
    assert [entry is not None and entry.token_ids[0] for entry in chosen.logprobs] == [OUTPUTS[0][0]]


def nothing_but_nan(scores_V: Tensor) -> None:
    scores_V.fill_(torch.nan)


def nothing_possible(scores_V: Tensor) -> None:
    scores_V.fill_(-torch.inf)


def one_infinite(scores_V: Tensor) -> None:
    scores_V[17] = torch.inf


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("damage", [nothing_but_nan, nothing_possible, one_infinite])
def test_a_row_whose_scores_break_fails_alone_at_that_step(
    damage: Callable[[Tensor], None], temperature: float
) -> None:
    """B092: row 2 at step 4; the others are golden."""
    num_steps = 0

    def fault(logits_RV: Tensor, ctx: LogitsContext) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            damage(logits_RV[int(np.flatnonzero(ctx.idx_mapping_np == 2)[0])])

    runner = assemble(Change(fault))
    admitted = [
        admission(row, prompt, temperature=temperature if row == 2 else 0.0, top_p=0.9)
        for row, prompt in enumerate(PROMPTS)
    ]
    chunks = [chunk(row, len(prompt), range(row * 8, row * 8 + 7)) for row, prompt in enumerate(PROMPTS)]

    results = [run(runner, plan(*chunks, admitted=admitted))]
    results += [run(runner, plan(*(chunk(row, 1) for row in range(4)))) for _ in range(7)]

    assert [[(failure.row, failure.reason) for failure in result.failures] for result in results] == [
        [],
        [],
        [],
        [(2, "LOGITS_NOT_FINITE")],
        [],
        [],
        [],
        [],
    ]
    for row in (0, 1, 3):
        assert sum((tokens_of(result)[row] for result in results), ()) == OUTPUTS[row]
    assert sum(len(tokens_of(result).get(2, ())) for result in results) == 3
