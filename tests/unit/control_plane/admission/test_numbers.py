"""The numbers and switches of SamplingParams: types, ranges, and values that are none."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.submission import Submission
from tests.unit.control_plane.admission.asking import INFINITY, NAN, admitted, only, refused, validator

WHOLE = ["n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "stream_interval"]
REAL = [
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]
SWITCHES = ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"]


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("n", 1, 128),
        ("min_tokens", 0, 127),
        ("temperature", 0, 100),
        ("temperature", 0.0, 100.0),
        ("top_k", 0, 2**32 - 1),
        ("top_p", 1e-6, 1),
        ("min_p", 0, 1),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2.0, 2.0),
        ("repetition_penalty", 1e-6, 100),
        ("seed", 0, 2**64 - 1),
        ("logprobs", 0, 20),
        ("prompt_logprobs", 0, 20),
        ("stream_interval", 1, 1024),
    ],
)
def test_the_ends_of_a_range_are_admitted(field: str, low: Any, high: Any) -> None:
    for value in (low, high):
        if field == "n":
            assert len(validator().validate(Submission(token_ids=[3], sampling={"n": value})).requests) == value
        else:
            assert getattr(admitted(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value", "description"),
    [
        ("n", 0, "is 0; must be in [1, 128]"),
        ("n", 129, "is 129; must be in [1, 128]"),
        ("min_tokens", -1, "is -1; must be at least 0"),
        ("top_k", 2**32, "is 4294967296; must be in [0, 2**32), 0 keeps all tokens"),
        ("presence_penalty", -2.000001, "is -2.000001; must be in [-2, 2], 0 changes nothing"),
        ("frequency_penalty", 2.000001, "is 2.000001; must be in [-2, 2], 0 changes nothing"),
        ("repetition_penalty", 0, "is 0; must be in (0, 100], 1 changes nothing"),
        ("repetition_penalty", 100.5, "is 100.5; must be in (0, 100], 1 changes nothing"),
        ("logprobs", -1, "is -1; must be in [0, 20], or left out"),
        ("logprobs", 21, "is 21; must be in [0, 20], or left out"),
        ("prompt_logprobs", 21, "is 21; must be in [0, 20], or left out"),
        ("stream_interval", 0, "is 0; must be in [1, 1024]"),
        ("stream_interval", 1025, "is 1025; must be in [1, 1024]"),
        ("logprobs_mode", 3, "is 3; must be one of RAW (1), PROCESSED (2)"),
    ],
)
def test_a_value_beyond_the_ends_is_refused_with_the_range(field: str, value: Any, description: str) -> None:
    assert only(**{field: value}) == (f"sampling.{field}", "OUT_OF_RANGE", description)


def test_a_number_too_long_to_be_written_down_is_told_by_its_length() -> None:
    assert only(seed=10**5000)[2] == "is a number of 16610 bits; must be in [0, 2**64), or left out"
    assert only(temperature=10**5000)[2] == "is a number of 16610 bits; must be in [0, 100], 0 is greedy"


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_a_temperature_that_is_no_number_is_refused(value: float) -> None:
    """Case B001: a non-finite temperature passes a one-sided check."""
    assert only(temperature=value)[:2] == ("sampling.temperature", "OUT_OF_RANGE")


def absent(field: str) -> dict[str, Any]:
    """A field that says None."""
    return {field: None}


RANGES = {
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


@pytest.mark.parametrize("field", ["top_p", "repetition_penalty"])
def test_a_number_that_is_0_for_the_sampler_is_not_above_0(field: str) -> None:
    value: Any = 5e-324

    assert only(**{field: value})[:2] == (f"sampling.{field}", "OUT_OF_RANGE")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(RANGES)), st.data())
def test_no_float_outside_its_range_passes(field: str, data: st.DataObject) -> None:
    """Case B002: NaN in top_p, min_p and the penalties; so are the infinities, and what is just beyond an end."""
    low, high = RANGES[field]
    beyond = st.floats(max_value=low, exclude_max=True) | st.floats(min_value=high, exclude_min=True)
    edges = st.sampled_from([NAN, -NAN, INFINITY, -INFINITY, low - 1e-6, high + 1e-6])
    value: Any = data.draw(edges | beyond)

    assert only(**{field: value})[:2] == (f"sampling.{field}", "OUT_OF_RANGE")


@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize("value", [1.0, NAN, "1", True, [1], b"1"])
def test_a_whole_number_is_nothing_else(field: str, value: Any) -> None:
    assert only(**{field: value})[:2] == (f"sampling.{field}", "WRONG_TYPE")


@pytest.mark.parametrize("field", REAL)
@pytest.mark.parametrize("value", ["0.5", False, None, [0.5], 1j])
def test_a_number_is_nothing_else(field: str, value: Any) -> None:
    assert only(**{field: value})[:2] == (f"sampling.{field}", "WRONG_TYPE")


@pytest.mark.parametrize("field", SWITCHES)
@pytest.mark.parametrize("value", [0, 1.0, "true", None])
def test_a_switch_is_true_or_false(field: str, value: Any) -> None:
    assert only(**{field: value})[:2] == (f"sampling.{field}", "WRONG_TYPE")


@pytest.mark.parametrize("field", ["n", "min_tokens", "top_k", "stream_interval"])
def test_a_number_that_always_has_a_value_is_not_none(field: str) -> None:
    assert only(**absent(field)) == (f"sampling.{field}", "WRONG_TYPE", "is None; must be a whole number")


@pytest.mark.parametrize("field", ["max_tokens", "seed", "logprobs", "prompt_logprobs"])
def test_a_number_that_may_be_left_out_may_be_none(field: str) -> None:
    assert admitted(**absent(field)) == admitted()


def test_the_type_of_a_value_is_told_and_not_the_value() -> None:
    assert only(temperature="a secret") == (
        "sampling.temperature",
        "WRONG_TYPE",
        "is of type str; must be a number",
    )


@pytest.mark.parametrize("value", ["RAW", None, 1.0, True])
def test_a_mode_of_log_probabilities_is_one_of_its_kind(value: Any) -> None:
    assert only(logprobs_mode=value)[:2] == ("sampling.logprobs_mode", "WRONG_TYPE")


@pytest.mark.parametrize("top_k", [270, 271, 2**32 - 1])
def test_a_top_k_of_the_whole_vocabulary_or_more_is_admitted(top_k: int) -> None:
    """Case B005: 0 is off, so is the whole vocabulary; what is below 0 is refused."""
    assert admitted(top_k=top_k).top_k == top_k
    assert [only(top_k=value)[1] for value in (-1, -2)] == ["OUT_OF_RANGE", "OUT_OF_RANGE"]


def test_the_operator_says_how_many_outputs_a_request_may_have() -> None:
    checker = validator(config=AdmissionConfig(max_n=2))

    assert only(checker, n=3) == ("sampling.n", "OUT_OF_RANGE", "is 3; must be in [1, 2]")


def test_more_outputs_than_a_tenant_may_ever_have_are_refused_for_good() -> None:
    checker = validator(config=AdmissionConfig(max_tenant_requests=3))

    assert only(checker, n=4) == ("sampling.n", "OUT_OF_RANGE", "is 4; must be in [1, 3]")
    assert len(checker.validate(Submission(token_ids=[3], sampling={"n": 3})).requests) == 3


def test_everything_wrong_is_told_at_once_in_the_order_of_the_fields() -> None:
    wrong: dict[str, Any] = {
        "stream_interval": 0,
        "extra_args": 5,
        "logit_bias": {270: 1.0},
        "stop": [""],
        "ignore_eos": 1,
        "frequency_penalty": NAN,
        "n": "two",
    }

    assert [(field, reason) for field, reason, _ in refused(**wrong)] == [
        ("sampling.n", "WRONG_TYPE"),
        ("sampling.frequency_penalty", "OUT_OF_RANGE"),
        ("sampling.stop", "EMPTY"),
        ("sampling.ignore_eos", "WRONG_TYPE"),
        ("sampling.logit_bias", "TOKEN_OUT_OF_VOCABULARY"),
        ("sampling.stream_interval", "OUT_OF_RANGE"),
        ("sampling.extra_args", "WRONG_TYPE"),
    ]
