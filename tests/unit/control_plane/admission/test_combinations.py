"""Parameters that are each right: together, with the prompt's length, and for several outputs."""

from dataclasses import replace
from typing import Any

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.submission import Submission
from plugins.errors import FieldViolation, InvalidRequest
from plugins.noise import child_seed
from plugins.types import SamplingLimits
from tests.unit.control_plane.admission.asking import INFINITY, NAN, SMALL, admitted, only, refused, validator
from tests.unit.control_plane.text.byte_level import byte


def queue_limit(asked_s: float | None, config: AdmissionConfig | None = None) -> float:
    submission = Submission(token_ids=[3], max_queue_time_s=asked_s)
    return validator(config=config).validate(submission).max_queue_s


def wrong(submission: Submission) -> list[FieldViolation]:
    with pytest.raises(InvalidRequest) as raised:
        validator().validate(submission)
    return list(raised.value.violations)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    """Case B017: (min, max) = (5, 4) raised inside the sampler; (4, 4) and (0, 4) are admitted as they are."""
    assert only(min_tokens=5, max_tokens=4) == (
        "sampling.min_tokens",
        "OUT_OF_RANGE",
        "is 5; must be in [0, 4], which is max_tokens",
    )
    for min_tokens in (4, 0):
        sampling = admitted(min_tokens=min_tokens, max_tokens=4)
        assert (sampling.min_tokens, sampling.max_tokens) == (min_tokens, 4)


def test_min_tokens_below_0_is_refused() -> None:
    """Case B017: (-1, 4)."""
    assert only(min_tokens=-1, max_tokens=4)[:2] == ("sampling.min_tokens", "OUT_OF_RANGE")


@pytest.mark.parametrize("max_tokens", [None, 2**31 - 1])
def test_min_tokens_above_the_room_is_refused_with_both_numbers(max_tokens: int | None) -> None:
    """Case B017: a huge minimum without a maximum, or with one that is cut."""
    assert only(prompt=20, min_tokens=2**31 - 1, max_tokens=max_tokens) == (
        "sampling.min_tokens",
        "OUT_OF_RANGE",
        "is 2147483647; a prompt of 20 tokens leaves room for 108",
    )
    assert admitted(prompt=20, min_tokens=108, max_tokens=max_tokens).max_tokens == 108


def test_equal_outputs_are_not_made_several_times() -> None:
    assert only(n=2, temperature=0)[:2] == ("sampling.n", "CONFLICT")
    assert only(n=2, temperature=NAN)[0] == "sampling.temperature"  # and nothing about n


def test_a_model_that_is_greedy_by_default_makes_one_output() -> None:
    greedy = replace(SMALL.worker.model.default_sampling, temperature=0.0)
    model = replace(SMALL, worker=replace(SMALL.worker, model=replace(SMALL.worker.model, default_sampling=greedy)))

    assert only(validator(model), n=2)[:2] == ("sampling.n", "CONFLICT")
    assert admitted(validator(model), temperature=0.5).temperature == 0.5


def test_stop_strings_need_text() -> None:
    assert only(stop=["END"], detokenize=False)[:2] == ("sampling.stop", "CONFLICT")


def test_chosen_tokens_are_told_of_only_with_log_probabilities() -> None:
    assert only(logprob_token_ids=[3])[:2] == ("sampling.logprob_token_ids", "CONFLICT")
    assert only(logprob_token_ids=[3], logprobs=99)[0] == "sampling.logprobs"  # and nothing else
    assert admitted(logprob_token_ids=[3], logprobs=0).logprob_token_ids == (3,)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"allowed_token_ids": [byte(0x61)], "bad_words": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [byte(0x61), byte(0x62)], "bad_words": ["b", "ba"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 1}, "allowed_token_ids"),
    ],
)
def test_a_request_that_could_be_left_without_a_token_is_refused(sampling: dict[str, Any], field: str) -> None:
    assert only(**sampling)[:2] == (f"sampling.{field}", "CONFLICT")


@pytest.mark.parametrize(
    "sampling",
    [
        {"allowed_token_ids": [byte(0x61), byte(0x62)], "bad_words": ["a"]},
        {"allowed_token_ids": [2]},
        {"allowed_token_ids": [2], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [2, 5], "min_tokens": 1},
        {"allowed_token_ids": [5], "stop_token_ids": [5]},
        {"bad_words": ["a"], "min_tokens": 1},
    ],
)
def test_a_request_that_always_has_a_token_left_is_admitted(sampling: dict[str, Any]) -> None:
    assert admitted(**sampling).max_tokens == 127


def test_a_small_vocabulary_is_not_banned_as_a_whole() -> None:
    worker = replace(SMALL.worker, sampling_limits=SamplingLimits(max_bad_words=1000))
    tiny = replace(SMALL, worker=replace(worker, model=replace(worker.model, vocab_size=36)))
    words = [chr(code) for code in range(33)]  # all that it has beside three special tokens, which are its ends

    assert only(validator(tiny), bad_words=words, stop_token_ids=[0, 1], min_tokens=1)[:2] == (
        "sampling.bad_words",
        "CONFLICT",
    )


def test_log_probabilities_of_a_long_prompt_are_refused_with_the_numbers() -> None:
    """Case B021: the whole vocabulary at each place of the prompt exhausted the memory."""
    checker = validator(config=AdmissionConfig(max_prompt_logprobs=600))

    assert admitted(checker, prompt=100, prompt_logprobs=5).prompt_logprobs == 5
    assert only(checker, prompt=101, prompt_logprobs=5) == (
        "sampling.prompt_logprobs",
        "TOO_MANY",
        "is 5 for a prompt of 101 tokens; 101 x 6 is more than the 600 that are allowed "
        "(admission.max_prompt_logprobs)",
    )


@pytest.mark.parametrize("value", [-1, 270, 1000])
def test_log_probabilities_of_the_whole_vocabulary_are_refused(value: int) -> None:
    """Case B021: all that is above the cap, for the prompt and for the output."""
    assert only(prompt_logprobs=value)[:2] == ("sampling.prompt_logprobs", "OUT_OF_RANGE")
    assert only(logprobs=value)[:2] == ("sampling.logprobs", "OUT_OF_RANGE")


def test_what_the_prompt_has_no_room_for_is_told_with_what_is_wrong_by_itself() -> None:
    found = refused(prompt=127, min_tokens=2, top_p=2.0)

    assert [name for name, _, _ in found] == ["sampling.top_p", "sampling.min_tokens"]


def test_several_outputs_are_requests_with_noise_of_their_own() -> None:
    submission = Submission(request_id="mine", token_ids=[3, 4], sampling={"n": 3, "seed": 9, "prompt_logprobs": 1})

    first, *others = validator().validate(submission).requests

    assert [each.request_id for each in (first, *others)] == ["mine", "mine·1", "mine·2"]
    assert [each.sampling.seed for each in (first, *others)] == [child_seed(9, index) for index in range(3)]
    assert [each.sampling.prompt_logprobs for each in (first, *others)] == [1, None, None]
    assert {each.sibling_of for each in others} == {"mine"}
    assert first.sibling_of is None


def test_a_seed_is_drawn_for_those_who_give_none_and_shared_out_to_the_outputs() -> None:
    requests = validator().validate(Submission(token_ids=[3], sampling={"n": 2})).requests

    assert [each.sampling.seed for each in requests] == [child_seed(77, 0), child_seed(77, 1)]


def test_the_time_in_the_queue_is_the_caller_s_if_it_is_less_than_the_server_s() -> None:
    config = AdmissionConfig(max_queue_s=10.0)

    assert [queue_limit(asked_s, config) for asked_s in (None, 2.5, 11.0, 1e300)] == [10.0, 2.5, 10.0, 10.0]


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INFINITY, -INFINITY])
def test_a_time_in_the_queue_is_a_number_above_0(value: float) -> None:
    (violation,) = wrong(Submission(token_ids=[3], max_queue_time_s=value))

    assert (violation.field, violation.reason) == ("max_queue_time_s", "OUT_OF_RANGE")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_queue_time_s", "soon"),
        ("priority", 1.0),
        ("priority", "high"),
        ("priority", True),
        ("cache_salt", b"salt"),
        ("tenant", 5),
        ("request_id", 5),
    ],
)
def test_what_stands_beside_the_sampling_has_its_type_too(field: str, value: Any) -> None:
    (violation,) = wrong(replace(Submission(token_ids=[3]), **{field: value}))

    assert violation.field.endswith(field)
    assert violation.reason == "WRONG_TYPE"


def test_whoever_wants_the_prompt_told_gets_it_told() -> None:
    assert validator().validate(Submission(token_ids=[3], echo=True)).echo
    assert not validator().validate(Submission(token_ids=[3])).echo
