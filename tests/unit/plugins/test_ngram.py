"""The n-gram breaker."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from plugins.builtin.ngram import NgramRepetitionBreaker
from plugins.conformance.logits_driver import VOCAB_SIZE
from plugins.types import SamplingParams
from tests.unit.plugins.one_row import RULED_OUT, ruled_out, scores

PAIRS = {"no_repeat_ngram_size": 2}
TRIPLES = {"no_repeat_ngram_size": 3}


@pytest.mark.parametrize(
    ("args", "output", "banned"),
    [
        (PAIRS, (), []),
        (PAIRS, (7,), []),
        (PAIRS, (7, 8), []),
        (PAIRS, (7, 7), [7]),
        (PAIRS, (7, 8, 7), [8]),
        (PAIRS, (7, 8, 7, 9, 7), [8, 9]),
        (PAIRS, (7, 8, 9), []),
        (TRIPLES, (7, 8, 7), []),
        (TRIPLES, (1, 2, 3, 1, 2), [3]),
        (TRIPLES, (1, 2, 3, 4, 2), []),
        (TRIPLES, (1, 2, 3, 1, 2, 4, 1, 2), [3, 4]),
        ({"no_repeat_ngram_size": 16}, (*range(20, 36), *range(20, 35)), [35]),
        ({"no_repeat_ngram_size": 16}, (*range(20, 34), *range(20, 34)), []),
    ],
)
def test_what_would_complete_an_n_gram_again_is_ruled_out(
    args: dict[str, Any], output: tuple[int, ...], banned: list[int]
) -> None:
    assert ruled_out(scores(NgramRepetitionBreaker, args, output)[0]) == banned


def completions(output: Sequence[int], size: int, window: int) -> list[int]:
    """The same by search: each place where the last tokens stand, and what comes after them."""
    recent = list(output[-window:])
    runs = [recent[start : start + size] for start in range(len(recent) - size + 1)]
    return sorted({run[-1] for run in runs if run[:-1] == recent[len(recent) - size + 1 :]})


@pytest.mark.parametrize("seed", range(40))
def test_a_search_finds_the_same(seed: int) -> None:
    draw = random.Random(seed)
    output = [draw.choice((7, 8, 9)) for _ in range(draw.randint(0, 40))]
    size, window = draw.randint(2, 6), draw.randint(2, 45)

    found = scores(NgramRepetitionBreaker, {"no_repeat_ngram_size": size, "no_repeat_window": window}, output)

    assert ruled_out(found[0]) == completions(output, size, window)


@pytest.mark.parametrize(
    ("window", "banned"), [(5, [8]), (4, []), (2, []), (4096, [8])], ids=["just in", "just out", "least", "most"]
)
def test_only_n_grams_within_the_window_count(window: int, banned: list[int]) -> None:
    args = {**PAIRS, "no_repeat_window": window}

    assert ruled_out(scores(NgramRepetitionBreaker, args, (7, 8, 3, 4, 7))[0]) == banned


def test_the_prompt_does_not_count() -> None:
    found = scores(NgramRepetitionBreaker, PAIRS, (7,), prompt=(7, 8, 7, 7))

    assert ruled_out(found[0]) == []


def test_an_n_gram_does_not_reach_from_the_prompt_into_the_output() -> None:
    found = scores(NgramRepetitionBreaker, PAIRS, (8, 7), prompt=(7,))

    assert ruled_out(found[0]) == []


def test_drafts_count() -> None:
    found = scores(NgramRepetitionBreaker, PAIRS, (7, 8), (7, 8, 3))

    assert [ruled_out(row) for row in found] == [[], [8], [7], []]


def test_a_row_in_which_nothing_else_could_be_chosen_is_left_as_it_is() -> None:
    before = torch.full((1, VOCAB_SIZE), RULED_OUT)
    before[0, 8] = 1.5

    assert scores(NgramRepetitionBreaker, PAIRS, (7, 8, 7), before=before).equal(before)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"no_repeat_ngram_size": 1}, "no_repeat_ngram_size is 1; it must be a whole number from 2 to 16"),
        ({"no_repeat_ngram_size": 17}, "no_repeat_ngram_size is 17; it must be a whole number from 2 to 16"),
        ({"no_repeat_ngram_size": 2.5}, "no_repeat_ngram_size is 2.5; it must be a whole number from 2 to 16"),
        ({"no_repeat_ngram_size": True}, "no_repeat_ngram_size is True; it must be a whole number from 2 to 16"),
        ({"no_repeat_ngram_size": None}, "no_repeat_ngram_size is None; it must be a whole number from 2 to 16"),
        ({**PAIRS, "no_repeat_window": 1}, "no_repeat_window is 1; it must be a whole number from 2 to 4096"),
        ({**PAIRS, "no_repeat_window": 4097}, "no_repeat_window is 4097; it must be a whole number from 2 to 4096"),
        ({"no_repeat_window": 9}, "no_repeat_window says nothing without no_repeat_ngram_size"),
    ],
)
def test_what_cannot_be_meant_is_refused(args: dict[str, Any], complaint: str) -> None:
    """B085."""
    with pytest.raises(ValueError) as refused:
        NgramRepetitionBreaker.validate_params(SamplingParams(extra_args=args))

    assert str(refused.value) == complaint
