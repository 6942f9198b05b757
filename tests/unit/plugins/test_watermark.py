"""The watermark and its detector."""

import random
from typing import Any

import pytest
import torch

from plugins.builtin.green_list import green_tokens, is_green, key_of, threshold_of
from plugins.builtin.watermark import Watermark
from plugins.builtin.watermark_detector import Detection, detect
from plugins.conformance.logits_driver import VOCAB_SIZE, Subject, Tables
from plugins.types import Row, SamplingParams
from tests.unit.plugins.one_row import RULED_OUT, scores

SECRET = "a key of these tests"
SECTION = {"key": SECRET}
GREEN = [
    3,
    5,
    7,
    19,
    21,
    22,
    23,
    25,
    32,
    34,
    35,
    51,
    55,
    57,
    58,
    59,
    60,
    61,
    62,
]  # of 64 tokens, those that are green after token 5 at a quarter


def written(num_tokens: int, seed: int, args: dict[str, Any]) -> list[int]:
    """Sample from scores that are drawn anew for each token."""
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    for _ in range(num_tokens):
        before = 2 * torch.randn((1, VOCAB_SIZE), generator=generator)
        after = scores(Watermark, args, output[-5:], section=SECTION, before=before)
        output.append(int(torch.multinomial(torch.softmax(after[0], dim=0), 1, generator=generator)))
    return output


def test_the_hash_has_its_published_values() -> None:
    """Whoever changes them cannot tell the marks that were made before."""
    key = key_of(SECRET)

    found = [token_id for token_id in range(64) if is_green(key, 5, token_id, threshold_of(0.25))]

    assert key == (2793133750, 38179615)
    assert found == GREEN


def test_one_token_and_all_tokens_are_hashed_to_the_same_bits() -> None:
    key, threshold = key_of(SECRET), threshold_of(0.3)
    draw = random.Random(0)
    previous = [0, 1, 49151, 2**31 - 1, *(draw.randrange(2**31) for _ in range(6))]

    found = green_tokens(key, torch.tensor(previous), torch.full((len(previous),), threshold), 5000)

    one_by_one = [[is_green(key, before, token_id, threshold) for token_id in range(5000)] for before in previous]
    assert found.tolist() == one_by_one


def test_a_share_gamma_of_the_tokens_is_green_after_each() -> None:
    previous = torch.arange(200)

    found = green_tokens(key_of(SECRET), previous, torch.full((200,), threshold_of(0.25)), 20_000)

    shares = found.float().mean(dim=1)
    assert abs(float(shares.mean()) - 0.25) < 0.001  # 2 million draws: the standard error is 0.0003
    assert float((shares - 0.25).abs().max()) < 0.0125  # four of theirs: 0.0031 each


def test_green_tokens_after_the_last_token_get_delta_and_others_nothing() -> None:
    found = scores(Watermark, {"watermark": True, "watermark_delta": 1.5}, (5,), section=SECTION)[0, :64]

    assert [int(each) for each in (found == 1.5).nonzero().flatten()] == GREEN
    assert int((found == 0).sum()) == 64 - len(GREEN)


def test_what_is_ruled_out_stays_so() -> None:
    before = torch.full((1, VOCAB_SIZE), RULED_OUT)

    assert scores(Watermark, {"watermark": True}, (5,), section=SECTION, before=before).equal(before)


def test_marked_text_is_told_from_other_text() -> None:
    marked = detect(written(200, 1, {"watermark": True}), SECRET, 0.25, VOCAB_SIZE)
    plain = detect(written(200, 1, {}), SECRET, 0.25, VOCAB_SIZE)
    other_key = detect(written(200, 1, {"watermark": True}), "another key", 0.25, VOCAB_SIZE)

    assert marked.z_score > 4
    assert marked.p_value < 1e-4
    assert abs(plain.z_score) < 3
    assert abs(other_key.z_score) < 3


def test_unmarked_texts_are_spread_as_the_test_supposes() -> None:
    draw = random.Random(7)
    z_scores = [detect([draw.randrange(50_000) for _ in range(300)], SECRET, 0.25, 50_000).z_score for _ in range(400)]

    mean = sum(z_scores) / 400
    variance = sum((each - mean) ** 2 for each in z_scores) / 399
    assert abs(mean) < 0.2  # four standard errors
    assert 0.75 < variance < 1.3


def test_each_pair_of_neighbours_counts_once() -> None:
    once = detect([5, 6, 7], SECRET, 0.25, VOCAB_SIZE)

    assert detect([5, 6, 7, 5, 6, 7, 5], SECRET, 0.25, VOCAB_SIZE).num_scored == 3
    assert once.num_scored == 2


@pytest.mark.parametrize("token_ids", [(), (5,)], ids=["empty", "one token"])
def test_a_text_without_pairs_says_nothing(token_ids: tuple[int, ...]) -> None:
    assert detect(token_ids, SECRET, 0.25, VOCAB_SIZE) == Detection(0, 0, 0.0, 0.5)


@pytest.mark.parametrize(
    ("token_ids", "gamma", "complaint"),
    [
        ([1, 2], 0.0, "gamma is 0.0; it must be above 0 and below 1"),
        ([1, 2], 1.0, "gamma is 1.0; it must be above 0 and below 1"),
        ([1, 500], 0.25, "token 500 is not within"),
        ([-1], 0.25, "token -1 is not within"),
    ],
)
def test_what_cannot_be_scored_is_refused(token_ids: list[int], gamma: float, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        detect(token_ids, SECRET, gamma, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"watermark": 1}, "watermark is 1; it must be true or false"),
        ({"watermark": True, "watermark_gamma": 0.05}, "watermark_gamma is 0.05; it must be a number from 0.1 to 0.9"),
        ({"watermark": True, "watermark_delta": 10.5}, "watermark_delta is 10.5; it must be a number from 0.0 to 10.0"),
        ({"watermark": True, "watermark_delta": "2"}, "watermark_delta is '2'; it must be a number from 0.0 to 10.0"),
        ({"watermark_delta": 1.0}, "watermark_gamma and watermark_delta say nothing without watermark"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(args: dict[str, Any], complaint: str) -> None:
    """B085."""
    with pytest.raises(ValueError) as refused:
        Watermark.validate_params(SamplingParams(extra_args=args))

    assert complaint in str(refused.value)
    assert "123456" not in str(refused.value)


@pytest.mark.parametrize("args", [{}, {"watermark": False}, {"watermark": True, "watermark_delta": 0}], ids=str)
def test_who_asks_for_no_mark_is_declined(args: dict[str, Any]) -> None:
    processor = Subject(Watermark, (), SECTION).build(Tables())

    assert processor.add_request(Row(0), SamplingParams(extra_args=args)) is False


KEY = 'set {"watermark": {"key": "a secret"}} in plugins.logits_processor_config'


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({}, KEY),
        ({"key": ""}, KEY),
        ({"key": 123456}, KEY),
        ({"secret": "x"}, "secret is no key of watermark's section; key is"),
    ],
    ids=["none", "empty", "a number", "another name"],
)
def test_a_wrong_section_stops_the_start_and_no_secret_is_shown(section: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        Subject(Watermark, (), section).build(Tables())

    assert complaint in str(refused.value)
    assert "123456" not in str(refused.value)
