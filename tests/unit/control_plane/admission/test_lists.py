"""Lists of tokens and texts, and biases: types, sizes, members."""

import time
from dataclasses import replace
from typing import Any

import pytest
from tokenizers.normalizers import Replace, Sequence

from control_plane.engine.served import ServedModel
from tests.unit.control_plane.admission.asking import INFINITY, NAN, SMALL, admitted, only, validator
from tests.unit.control_plane.admission.models import served_model
from tests.unit.control_plane.text.byte_level import bundle, byte, merged, tokenizer


def dropping(character: str) -> ServedModel:
    """A model whose tokenizer drops a character and every space."""
    small = tokenizer()
    small.normalizer = Sequence([Replace(character, ""), Replace(" ", "")])
    return served_model(tokenizer=replace(bundle(), tokenizer_json=small.to_str().encode()))


def with_vocabulary(vocab_size: int) -> ServedModel:
    """A model that cannot choose the last tokens of its tokenizer."""
    worker = SMALL.worker
    return replace(SMALL, worker=replace(worker, model=replace(worker.model, vocab_size=vocab_size)))


TOKEN_LISTS = {"stop_token_ids": 128, "allowed_token_ids": 1024, "logprob_token_ids": 128}


def fields(name: str, value: Any) -> dict[str, Any]:
    """A list, with what else it needs."""
    return {name: value, "logprobs": 0} if name == "logprob_token_ids" else {name: value}


@pytest.mark.parametrize(("name", "most"), TOKEN_LISTS.items())
def test_a_list_of_tokens_has_at_most_what_the_worker_has_room_for(name: str, most: int) -> None:
    assert len(getattr(admitted(**fields(name, [3] * most)), name)) == most
    assert only(**fields(name, [3] * (most + 1))) == (
        f"sampling.{name}",
        "TOO_MANY",
        f"has {most + 1} tokens; at most {most} are allowed",
    )


@pytest.mark.parametrize("name", TOKEN_LISTS)
def test_the_last_token_of_the_vocabulary_may_be_listed_and_the_next_may_not(name: str) -> None:
    assert getattr(admitted(**fields(name, [0, 269])), name) == (0, 269)
    assert only(**fields(name, [3, 270])) == (
        f"sampling.{name}",
        "TOKEN_OUT_OF_VOCABULARY",
        "token 270 at index 1 is not in the vocabulary, [0, 270)",
    )


@pytest.mark.parametrize("name", TOKEN_LISTS)
@pytest.mark.parametrize("token_id", [-1, 2**31 - 1, 2**64, pytest.param(10**5000, id="huge")])
def test_a_token_far_from_the_vocabulary_is_refused(name: str, token_id: int) -> None:
    assert only(**fields(name, [token_id]))[:2] == (f"sampling.{name}", "TOKEN_OUT_OF_VOCABULARY")


@pytest.mark.parametrize("name", TOKEN_LISTS)
@pytest.mark.parametrize("value", ["abc", b"abc", 5, None, {3: 4}, {3, 4}, [3.0], ["3"], [True], [None]])
def test_a_list_of_tokens_is_a_list_of_whole_numbers(name: str, value: Any) -> None:
    assert only(**fields(name, value))[:2] == (f"sampling.{name}", "WRONG_TYPE")


def test_a_list_that_its_owner_may_change_is_copied() -> None:
    mine = [5, 6]
    bias = {7: 1.0}

    sampling = admitted(stop_token_ids=mine, logit_bias=bias)
    mine.append(-1)
    bias[-1] = NAN

    assert (sampling.stop_token_ids, sampling.logit_bias) == ((5, 6), {7: 1.0})


@pytest.mark.parametrize("token_id", [-1, 270, 2**31 - 1])
def test_a_bias_of_a_token_outside_the_vocabulary_names_it(token_id: int) -> None:
    """Case B008: an id outside the vocabulary took the engine down."""
    assert only(logit_bias={5: 1.0, token_id: 5.0}) == (
        "sampling.logit_bias",
        "TOKEN_OUT_OF_VOCABULARY",
        f"token {token_id} is not in the vocabulary, [0, 270)",
    )


def test_the_last_token_of_the_vocabulary_may_have_a_bias() -> None:
    """Case B008: V - 1 is served."""
    assert admitted(logit_bias={269: 5.0}).logit_bias == {269: 5.0}


@pytest.mark.parametrize("bias", [NAN, INFINITY, -INFINITY, 100.001, -101, pytest.param(10**5000, id="huge")])
def test_a_bias_is_finite_and_within_its_range(bias: float) -> None:
    field, reason, description = only(logit_bias={3: bias})

    assert (field, reason) == ("sampling.logit_bias", "OUT_OF_RANGE")
    assert description.startswith("of token 3 is ")


@pytest.mark.parametrize("value", [[3], "abc", 5, None, {"3": 1.0}, {3.0: 1.0}, {True: 1.0}, {3: "1"}, {3: None}])
def test_biases_map_whole_numbers_to_numbers(value: Any) -> None:
    assert only(logit_bias=value)[:2] == ("sampling.logit_bias", "WRONG_TYPE")


def test_biases_are_counted_before_they_are_read() -> None:
    assert only(logit_bias=dict.fromkeys(range(1025), NAN)) == (
        "sampling.logit_bias",
        "TOO_MANY",
        "has 1025 tokens; at most 1024 are allowed",
    )


@pytest.mark.parametrize(("stop", "index"), [([""], 0), (["END", ""], 1)])
def test_an_empty_stop_string_is_refused(stop: list[str], index: int) -> None:
    """Case B024: an empty stop string matched at once, so replies were empty."""
    assert only(stop=stop) == ("sampling.stop", "EMPTY", f"text at index {index} is empty; leave it out")


def test_no_stop_strings_are_as_good_as_none_given() -> None:
    """Case B024."""
    assert admitted(stop=[]) == admitted()


def test_stop_strings_have_a_greatest_number_and_a_greatest_length() -> None:
    assert admitted(stop=["x" * 256] * 16).stop == ("x" * 256,) * 16
    assert only(stop=["x"] * 17) == ("sampling.stop", "TOO_MANY", "has 17 texts; at most 16 are allowed")
    assert only(stop=["a", "x" * 257]) == (
        "sampling.stop",
        "TOO_LONG",
        "text at index 1 has 257 characters; at most 256 are allowed",
    )


@pytest.mark.parametrize("name", ["stop", "bad_words"])
@pytest.mark.parametrize("value", ["END", b"END", 5, None, {"END": 1}, [5], [None], [b"END"]])
def test_a_list_of_texts_is_one(name: str, value: Any) -> None:
    assert only(**{name: value})[:2] == (f"sampling.{name}", "WRONG_TYPE")


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_half_a_surrogate_pair_is_no_text(name: str) -> None:
    broken: Any = ["\ud800"]

    assert only(**{name: broken}) == (f"sampling.{name}", "NOT_UNICODE", "text at index 0 is not valid Unicode")


def test_a_stop_string_may_have_nul() -> None:
    assert admitted(stop=["\x00"]).stop == ("\x00",)


def test_a_bad_word_is_turned_into_tokens_as_it_is_and_with_a_space_before_it() -> None:
    sampling = admitted(bad_words=["Paris", " Paris", "hello"])

    assert sampling.bad_words == ("Paris", " Paris", "hello")
    assert sampling.bad_word_ids == (
        (byte(0x50), merged("ar"), merged("is")),
        (merged(" Paris"),),
        (merged("hello"),),
        (byte(0x20), merged("hello")),
    )


@pytest.mark.parametrize("word", [" ", "\t", "\x00", "\u200b"])
def test_a_bad_word_of_odd_characters_is_held_back(word: str) -> None:
    """Case B019: a space or a control character gave an empty list of tokens, and an index error."""
    assert tuple(map(byte, word.encode())) in admitted(bad_words=[word]).bad_word_ids


def test_an_empty_bad_word_is_refused_with_its_index() -> None:
    """Case B019."""
    assert only(bad_words=["a", ""]) == ("sampling.bad_words", "EMPTY", "text at index 1 is empty; leave it out")


def test_a_bad_word_without_tokens_is_refused_with_its_index() -> None:
    """Case B019: its tokenizer drops the characters that it has."""
    checker = validator(dropping("\u200b"))

    assert only(checker, bad_words=["a", "\u200b"]) == (
        "sampling.bad_words",
        "EMPTY",
        "text at index 1 has no tokens; leave it out",
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["x" * 100_000], "TOO_LONG"), (["word"] * 10_000, "TOO_MANY"), (["x" * 256] * 10_000, "TOO_MANY")],
)
def test_too_much_is_refused_before_it_is_tokenized(words: list[str], reason: str) -> None:
    """Case B019: limits are enforced in less than 50 ms."""
    started_s = time.perf_counter()

    assert only(bad_words=words)[:2] == ("sampling.bad_words", reason)

    assert time.perf_counter() - started_s < 0.05


def test_bad_words_are_counted_as_tokens_too() -> None:
    words = [f"{number:03}" for number in range(65)]

    assert len(admitted(bad_words=words[:64]).bad_word_ids) == 128
    assert only(bad_words=words) == (
        "sampling.bad_words",
        "TOO_MANY",
        "as tokens, with and without a space before them, they are 130 sequences; at most 128 are allowed",
    )


def test_bad_words_have_a_greatest_number_of_tokens_together() -> None:
    assert only(bad_words=["x" * 256, "y" * 256]) == (
        "sampling.bad_words",
        "TOO_LONG",
        "have 1026 tokens together; at most 1024 are allowed",
    )


def test_a_way_to_write_a_bad_word_that_no_output_can_have_is_left_out() -> None:
    assert admitted(validator(with_vocabulary(merged("hello"))), bad_words=["hello"]).bad_word_ids == ()
