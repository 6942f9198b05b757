"""What each built-in stage does to the scores of a row, by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.gpu_worker.sampling.tables import EOS, Tables, apply, take

INF = float("inf")


def changed(
    scores: dict[int, float] | Tensor, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), **sampling: Any
) -> list[float]:
    """The scores of one row behind all stages; those that are not given are 0."""
    tables = Tables(vocab_size=8)
    tables.put(3, prompt, output)
    stages = tables.stages()
    take(stages, 3, **sampling)
    if isinstance(scores, dict):
        scores = torch.tensor([[scores.get(token, 0.0) for token in range(8)]])
    return apply(stages, scores, tables.context(3))[0].tolist()


def test_only_allowed_tokens_keep_their_scores() -> None:
    result = changed({1: 2.0, 5: -3.0, 6: 9.0}, allowed_token_ids=(5, 1))

    assert result == [-INF, 2.0, -INF, -INF, -INF, -3.0, -INF, -INF]


def test_a_bias_is_added_and_makes_nothing_possible_that_is_not() -> None:
    result = changed({1: 2.0, 5: -INF}, logit_bias={1: -0.5, 5: 100.0, 7: 3.0})

    assert result == [0.0, 1.5, 0.0, 0.0, 0.0, -INF, 0.0, 3.0]


@pytest.mark.parametrize(("num_output", "is_forbidden"), [(0, True), (2, True), (3, False), (4, False)])
def test_stop_tokens_and_the_models_end_wait_for_min_tokens(num_output: int, is_forbidden: bool) -> None:
    result = changed({}, output=(7,) * num_output, min_tokens=3, stop_token_ids=(5,))

    score = -INF if is_forbidden else 0.0
    assert result == [0.0, 0.0, score, 0.0, 0.0, score, 0.0, 0.0]
    assert EOS == 2


def test_an_end_that_does_not_count_is_not_forbidden() -> None:
    result = changed({}, min_tokens=3, stop_token_ids=(5,), ignore_eos=True)

    assert result == [0.0, 0.0, 0.0, 0.0, 0.0, -INF, 0.0, 0.0]


def test_min_tokens_without_anything_that_ends_asks_for_nothing() -> None:
    tables = Tables(vocab_size=8)

    assert take(tables.stages(), 0, min_tokens=3, ignore_eos=True) == [False] * 5


def test_stop_tokens_stay_where_nothing_else_is_left() -> None:
    """B087: min_tokens meets a grammar that is at its end."""
    at_its_end = torch.full((1, 8), -INF)
    at_its_end[0, 2] = 1.5
    not_yet = at_its_end.clone()
    not_yet[0, 4] = -9.0

    ended = changed(at_its_end, min_tokens=64)
    forbidden = changed(not_yet, min_tokens=64)

    assert ended == [-INF, -INF, 1.5, -INF, -INF, -INF, -INF, -INF]
    assert forbidden == [-INF, -INF, -INF, -INF, -9.0, -INF, -INF, -INF]


def test_an_end_beyond_the_vocabulary_that_is_served_is_nobodys() -> None:
    tables = Tables(vocab_size=2)

    assert take(tables.stages(), 0, min_tokens=3, stop_token_ids=(5,)) == [False] * 5


def test_the_repetition_penalty_divides_positive_scores_and_multiplies_the_others_once_each() -> None:
    result = changed({1: 2.0, 3: -2.0, 4: 4.0, 6: 8.0}, prompt=(1, 3, 1), output=(4, 4), repetition_penalty=2.0)

    assert result == [0.0, 1.0, 0.0, -4.0, 2.0, 0.0, 8.0, 0.0]


def test_frequency_and_presence_look_at_the_output_alone() -> None:
    result = changed({}, prompt=(1, 3, 1), output=(4, 3, 4), frequency_penalty=0.25, presence_penalty=1.0)

    assert result == [0.0, 0.0, 0.0, -1.25, -1.5, 0.0, 0.0, 0.0]


def test_penalties_come_in_their_order() -> None:
    result = changed({4: 4.0}, output=(4, 4), repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)

    assert result[4] == 4.0 / 2.0 - 2 * 0.5 - 0.25


def test_counts_of_one_step_are_forgotten_by_the_next() -> None:
    tables = Tables(vocab_size=8)
    tables.put(0, (1,), (4, 4))
    tables.put(1, (1,), (4,))
    stages = tables.stages()
    take(stages, 0, frequency_penalty=1.0)
    take(stages, 1, frequency_penalty=1.0)
    apply(stages, torch.zeros(2, 8), tables.context(0, 1))

    second = apply(stages, torch.zeros(2, 8), tables.context(1, 0))

    assert second[:, 4].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [
        ((), {5}),
        ((6,), {5, 7}),
        ((6, 3), {5, 4}),
        ((3,), {5}),
        ((6, 3, 1), {5}),
    ],
)
def test_a_bad_word_is_forbidden_where_the_output_ends_with_all_of_it_but_the_last(
    output: tuple[int, ...], forbidden: set[int]
) -> None:
    result = changed({}, prompt=(1, 6), output=output, bad_word_ids=((5,), (6, 7), (6, 3, 4)))

    assert {token for token, score in enumerate(result) if score == -INF} == forbidden


def test_two_bad_words_with_one_end_forbid_it_if_either_fits() -> None:
    result = changed({}, output=(3,), bad_word_ids=((6, 7), (3, 7), (1, 7)))

    assert {token for token, score in enumerate(result) if score == -INF} == {7}
