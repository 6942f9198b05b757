"""What is admitted, and what is refused with which words."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.submission import ChatMessage, Submission
from control_plane.admission.submission import given as all_given
from control_plane.admission.validator import Validator
from plugins.errors import Code, FieldViolation, InvalidConfig, InvalidRequest, NotServing, UnknownModel
from plugins.types import Request, SamplingParams, TokenId
from tests.unit.control_plane.admission.models import directory, served_model
from tests.unit.control_plane.text.byte_level import bundle, byte, merged

SMALL = served_model()
OTHER = served_model("other")
INFINITY, NAN = float("inf"), float("nan")


def validator(max_model_len: int = 128, num_blocks: int = 64, max_prompt_bytes: int = 10_000) -> Validator:
    worker = replace(
        SMALL.worker, model=replace(SMALL.worker.model, max_model_len=max_model_len), num_blocks=num_blocks
    )
    config = AdmissionConfig(max_prompt_bytes=max_prompt_bytes)
    return Validator(directory(replace(SMALL, worker=worker)), config, lambda: 77, lambda: "drawn")


def admit(submission: Submission) -> Request:
    return validator().validate(submission).requests[0]


def violations(submission: Submission, checker: Validator | None = None) -> list[FieldViolation]:
    with pytest.raises(InvalidRequest) as refused:
        (checker or validator()).validate(submission)
    assert refused.value.code is Code.INVALID_ARGUMENT
    return list(refused.value.violations)


def only(submission: Submission, checker: Validator | None = None) -> tuple[str, str, str]:
    (violation,) = violations(submission, checker)
    return violation.field, violation.reason, violation.description


def tokens(num: int) -> Submission:
    return Submission(token_ids=[byte(0x61)] * num)


def test_a_text_is_admitted_with_everything_resolved() -> None:
    admitted = validator().validate(Submission(text="hello Paris"))

    assert admitted.requests[0] == Request(
        request_id="drawn",  # type: ignore[arg-type]  # an id is its letters
        prompt_token_ids=(merged("hello"), merged(" Paris")),
        sampling=SamplingParams(max_tokens=126, seed=77),
    )
    assert admitted.model.worker.model.name == "small"


def test_what_the_caller_chose_is_kept() -> None:
    sampling = SamplingParams(
        max_tokens=7,
        temperature=0.0,
        top_k=1_000_000,
        top_p=0.5,
        min_p=1.0,
        seed=2**64 - 1,
        stop_token_ids=(TokenId(0), TokenId(269)),
        ignore_eos=True,
    )

    request = admit(Submission(request_id="mine ~!", model="small", token_ids=[3, 4], sampling=all_given(sampling)))

    assert (request.request_id, request.prompt_token_ids, request.sampling) == ("mine ~!", (3, 4), sampling)


def test_a_conversation_is_admitted_with_the_special_tokens_of_its_template() -> None:
    request = admit(Submission(messages=[ChatMessage(role="user", content="hello")]))

    assert request.prompt_token_ids[0] == 1
    assert request.prompt_token_ids[6:9] == (merged("hello"), 2, byte(0x0A))


@pytest.mark.parametrize(
    ("submission", "field"),
    [
        pytest.param(Submission(text=""), "text", id="text"),
        pytest.param(Submission(token_ids=[]), "tokens.ids", id="tokens"),
        pytest.param(Submission(messages=[]), "chat.messages", id="chat"),
    ],
)
def test_an_empty_prompt_is_refused(submission: Submission, field: str) -> None:
    assert only(submission)[:2] == (field, "EMPTY_PROMPT")


def test_an_empty_message_is_a_prompt_because_its_template_gives_it_tokens() -> None:
    assert len(admit(Submission(messages=[ChatMessage(role="user", content="")])).prompt_token_ids) > 1


def test_an_empty_text_is_a_prompt_if_the_model_starts_it_with_a_token() -> None:
    model = served_model(tokenizer=bundle(add_bos=True))
    checker = Validator(directory(model), AdmissionConfig(), lambda: 1)

    assert checker.validate(Submission(text="")).requests[0].prompt_token_ids == (1,)


@pytest.mark.parametrize(
    "submission",
    [
        pytest.param(Submission(), id="no input"),
        pytest.param(Submission(text="a", token_ids=[3]), id="two inputs"),
    ],
)
def test_a_request_has_exactly_one_input(submission: Submission) -> None:
    assert only(submission) == ("input", "REQUIRED", "set exactly one of text, tokens and chat")


def test_a_prompt_must_leave_room_for_one_token_in_the_context() -> None:
    assert admit(tokens(127)).sampling.max_tokens == 1
    assert only(tokens(128)) == (
        "tokens.ids",
        "PROMPT_TOO_LONG",
        "the prompt has 128 tokens; this model's context of 128 tokens must leave room for at least 1 output token, "
        "so at most 127 are allowed",
    )


def test_a_long_text_is_refused_as_a_text_with_its_number_of_tokens() -> None:
    field, reason, description = only(Submission(text="a" * 2000))

    assert (field, reason) == ("text", "PROMPT_TOO_LONG")
    assert description.startswith("the prompt has 2000 tokens")


def test_a_long_conversation_is_refused_as_one() -> None:
    assert only(Submission(messages=[ChatMessage(role="user", content="a" * 2000)]))[:2] == (
        "chat.messages",
        "PROMPT_TOO_LONG",
    )


def test_a_text_above_the_configured_bytes_is_refused_before_it_is_tokenized() -> None:
    checker = validator(max_prompt_bytes=9)

    assert only(Submission(text="é" * 5), checker) == (
        "text",
        "PROMPT_TOO_LARGE",
        "has 10 bytes; admission.max_prompt_bytes allows 9",
    )
    assert only(
        Submission(messages=[ChatMessage(role="user", content="12345"), ChatMessage(role="user", content="67890")]),
        checker,
    )[:2] == (
        "chat.messages",
        "PROMPT_TOO_LARGE",
    )
    assert checker.validate(Submission(text="é" * 4)).requests[0].prompt_token_ids == (byte(0xC3), byte(0xA9)) * 4


def test_a_text_with_half_a_surrogate_pair_is_refused() -> None:
    assert only(Submission(text="a\ud800"))[:2] == ("text", "NOT_UNICODE")


def test_a_text_may_contain_nul() -> None:
    assert admit(Submission(text="\x00")).prompt_token_ids == (byte(0),)


@pytest.mark.parametrize(
    ("token_ids", "index", "token_id"),
    [([-1], 0, -1), ([270], 0, 270), ([0, 1, -5], 2, -5), ([2**31 - 1], 0, 2**31 - 1), ([3, 2**32], 1, 2**32)],
)
def test_a_token_outside_the_vocabulary_is_named_with_its_place(
    token_ids: list[int], index: int, token_id: int
) -> None:
    """Case B012: negative or absurd tokens of a prompt."""
    assert only(Submission(token_ids=token_ids)) == (
        "tokens.ids",
        "TOKEN_OUT_OF_VOCABULARY",
        f"token {token_id} at index {index} is not in the vocabulary, [0, 270)",
    )


def test_the_last_token_of_the_vocabulary_is_a_prompt() -> None:
    assert admit(Submission(token_ids=[269])).prompt_token_ids == (269,)


@pytest.mark.parametrize(
    ("sampling", "field", "description"),
    [
        (SamplingParams(max_tokens=0), "max_tokens", "is 0; must be at least 1, or left out"),
        (SamplingParams(max_tokens=-1), "max_tokens", "is -1; must be at least 1, or left out"),
        (SamplingParams(temperature=-0.1), "temperature", "is -0.1; must be in [0, 100], 0 is greedy"),
        (SamplingParams(temperature=100.5), "temperature", "is 100.5; must be in [0, 100], 0 is greedy"),
        (SamplingParams(temperature=NAN), "temperature", "is nan; must be in [0, 100], 0 is greedy"),
        (SamplingParams(temperature=INFINITY), "temperature", "is inf; must be in [0, 100], 0 is greedy"),
        (SamplingParams(temperature=-INFINITY), "temperature", "is -inf; must be in [0, 100], 0 is greedy"),
        (SamplingParams(top_k=-1), "top_k", "is -1; must be in [0, 2**32), 0 keeps all tokens"),
        (SamplingParams(top_p=0.0), "top_p", "is 0.0; must be in (0, 1], 1 keeps all tokens"),
        (SamplingParams(top_p=1.000001), "top_p", "is 1.000001; must be in (0, 1], 1 keeps all tokens"),
        (SamplingParams(top_p=NAN), "top_p", "is nan; must be in (0, 1], 1 keeps all tokens"),
        (SamplingParams(min_p=-1e-6), "min_p", "is -1e-06; must be in [0, 1], 0 keeps all tokens"),
        (SamplingParams(min_p=INFINITY), "min_p", "is inf; must be in [0, 1], 0 keeps all tokens"),
        (SamplingParams(min_p=NAN), "min_p", "is nan; must be in [0, 1], 0 keeps all tokens"),
        (SamplingParams(seed=-1), "seed", "is -1; must be in [0, 2**64), or left out"),
        (SamplingParams(seed=2**64), "seed", f"is {2**64}; must be in [0, 2**64), or left out"),
    ],
)  # fmt: skip
def test_a_sampling_parameter_out_of_range_is_named(sampling: SamplingParams, field: str, description: str) -> None:
    assert only(Submission(text="a", sampling=all_given(sampling))) == (
        f"sampling.{field}",
        "OUT_OF_RANGE",
        description,
    )


def test_a_stop_token_outside_the_vocabulary_is_named_with_its_place() -> None:
    sampling = SamplingParams(stop_token_ids=(TokenId(3), TokenId(270)))

    assert only(Submission(text="a", sampling=all_given(sampling))) == (
        "sampling.stop_token_ids",
        "TOKEN_OUT_OF_VOCABULARY",
        "token 270 at index 1 is not in the vocabulary, [0, 270)",
    )


@given(
    st.floats(0, 100),
    st.integers(0, 2**32 - 1),
    st.floats(2.0**-149, 1),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
)
def test_every_value_within_its_range_is_admitted(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)

    assert admit(Submission(text="a", sampling=all_given(sampling))).sampling == sampling


@pytest.mark.parametrize("max_tokens", [None, 109, 10_000])
def test_max_tokens_left_out_or_beyond_the_context_fills_the_context(max_tokens: int | None) -> None:
    """Case B026: max_tokens is larger than the context, or left out."""
    submission = replace(tokens(20), sampling={"max_tokens": max_tokens})

    assert admit(submission).sampling.max_tokens == 108


def test_max_tokens_that_fit_are_kept() -> None:
    assert admit(replace(tokens(20), sampling={"max_tokens": 107})).sampling.max_tokens == 107


def test_max_tokens_fill_the_cache_if_it_holds_less_than_the_context() -> None:
    checker = validator(num_blocks=4)

    assert checker.validate(tokens(20)).requests[0].sampling.max_tokens == 44


def test_a_prompt_that_no_empty_cache_could_hold_is_refused_with_the_numbers() -> None:
    checker = validator(num_blocks=4)

    field, reason, description = only(tokens(64), checker)

    assert (field, reason) == ("tokens.ids", "EXCEEDS_KV_CACHE")
    assert "the prompt has 64 tokens; the whole KV cache holds 64 (4 blocks of 16)" in description
    assert checker.validate(tokens(63)).requests[0].sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("request_id", "reason"),
    [
        ("x" * 129, "TOO_LONG"),
        ("two\nlines", "NOT_PRINTABLE_ASCII"),
        ("\x1b[31mred", "NOT_PRINTABLE_ASCII"),
        ("nul\x00", "NOT_PRINTABLE_ASCII"),
        ("é", "NOT_PRINTABLE_ASCII"),
    ],
)
def test_a_request_id_that_could_not_be_logged_is_refused(request_id: str, reason: str) -> None:
    assert only(Submission(request_id=request_id, text="a"))[:2] == ("request_id", reason)


def test_a_request_id_of_128_characters_is_kept() -> None:
    assert admit(Submission(request_id="x" * 128, text="a")).request_id == "x" * 128


@pytest.mark.parametrize("role", ["", "two words", "<|im_end|>", "x" * 65, "system\n"])
def test_a_role_is_a_word(role: str) -> None:
    field, reason, _ = only(
        Submission(messages=[ChatMessage(role="user", content="a"), ChatMessage(role=role, content="b")])
    )

    assert (field, reason) == ("chat.messages[1].role", "INVALID_ROLE")


def test_everything_wrong_is_told_at_once() -> None:
    sampling = SamplingParams(
        max_tokens=0, temperature=NAN, top_k=-1, top_p=0.0, min_p=2.0, seed=-1, stop_token_ids=(TokenId(-1),)
    )

    fields = [
        found.field for found in violations(Submission(request_id="\n", token_ids=[-1], sampling=all_given(sampling)))
    ]

    assert fields == [
        "request_id",
        "sampling.max_tokens",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.seed",
        "sampling.stop_token_ids",
        "tokens.ids",
    ]


def test_an_unknown_model_is_not_found_and_the_served_ones_are_named() -> None:
    checker = Validator(directory(SMALL, OTHER), AdmissionConfig(), lambda: 1)

    with pytest.raises(UnknownModel, match="model 'large' is not served here; served: other, small"):
        checker.validate(Submission(model="large", text="a"))


def test_a_model_s_name_has_a_greatest_length() -> None:
    assert only(Submission(model="x" * 129, text="a"))[:2] == ("model", "TOO_LONG")


def test_nothing_is_admitted_while_no_model_is_loaded() -> None:
    with pytest.raises(NotServing, match="no model is served now: no worker was connected yet"):
        Validator(directory(), AdmissionConfig(), lambda: 1).validate(Submission(text="a"))


def test_each_request_without_an_id_gets_its_own() -> None:
    checker = Validator(directory(SMALL), AdmissionConfig(), lambda: 1)

    ids = {checker.validate(Submission(text="a")).requests[0].request_id for _ in range(3)}

    assert len(ids) == 3
    assert {len(request_id) for request_id in ids} == {32}


def test_tokenize_gives_the_tokens_of_a_prompt_of_any_length() -> None:
    assert validator().tokenize(Submission(text="hello" * 200)) == (merged("hello"),) * 200
    assert validator().tokenize(Submission(text="")) == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_waiting", 0), ("max_reading", 0), ("max_prompt_bytes", 0), ("max_deadline_s", 0.0), ("max_deadline_s", NAN)],
)
def test_a_limit_that_would_refuse_everything_is_no_limit(key: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=f"admission.{key} must be"):
        AdmissionConfig(**{key: value})  # type: ignore[arg-type]  # one name or the other
