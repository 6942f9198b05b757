"""The text of one output, and what ends it."""

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from control_plane.text.detokenizer import Detokenizer
from control_plane.text.model import TextModel
from control_plane.text.stream import TextStream
from plugins.types import SamplingParams, TokenId
from tests.unit.control_plane.text.byte_level import bundle, byte, merged, tokenizer

MODEL = TextModel.from_bundle(bundle())
END = TokenId(2)  # <|im_end|>


def letters(text: str) -> list[TokenId]:
    """One token per byte."""
    return [byte(value) for value in text.encode()]


def stream(**sampling: Any) -> TextStream:
    return MODEL.stream(SamplingParams(**sampling))


def pieces_of(output: TextStream, token_ids: Sequence[TokenId]) -> list[str]:
    """Push token by token; the text that each one makes certain, then the rest."""
    pieces = []
    for token_id in token_ids:
        ended = output.push([token_id])
        pieces.append(output.take())
        if ended is not None:
            break
    return [*pieces, output.close()]


def test_without_stop_strings_text_is_given_out_as_it_becomes_certain() -> None:
    output = stream()

    assert not output.is_watching
    assert pieces_of(output, [*letters("é!"), merged("hello")]) == ["", "é", "!", "hello", ""]


def test_nothing_is_ended_by_no_stop_strings_or_empty_ones() -> None:
    """B024: an empty text that got past admission ends nothing."""
    assert pieces_of(stream(stop=()), letters("abc")) == ["a", "b", "c", ""]
    assert pieces_of(stream(stop=("",)), letters("abc")) == ["a", "b", "c", ""]


@pytest.mark.parametrize(
    "token_ids",
    [letters("ABC DEF GHI"), [*MODEL.encode("ABC"), *MODEL.encode(" DEF"), *MODEL.encode(" GHI")]],
    ids=["character by character", "words"],
)
def test_no_part_of_a_stop_string_is_given_out(token_ids: list[TokenId]) -> None:
    """B032."""
    output = stream(stop=("DEFGHI", "C D"))

    pieces = pieces_of(output, token_ids)

    assert "".join(pieces) == "AB"
    assert not any("C" in piece for piece in pieces)
    assert output.stop_string == "C D"


def test_the_token_that_completes_a_stop_string_is_the_last_of_the_output() -> None:
    output = stream(stop=("C D",))

    assert output.is_watching
    assert output.push(letters("AB")) is None
    assert output.push(letters("C DEF GHI")) == 3
    assert output.push(letters("JKL")) == 0
    assert output.take() + output.close() == "AB"


def test_text_is_given_out_as_soon_as_it_can_no_longer_begin_a_stop_string() -> None:
    assert pieces_of(stream(stop=("STOP",)), letters("STAY STO")) == ["", "", "STA", "Y", " ", "", "", "", "STO"]


@pytest.mark.parametrize("ending", ["end of sequence", "length", "stop token"])
def test_what_was_held_back_is_given_out_at_the_end(ending: str) -> None:
    """B034."""
    output = stream(stop=("STOP",))
    last = {"end of sequence": [END], "length": [], "stop token": [merged("hello")]}[ending]

    ended = output.push([*letters("a STO"), *last], is_stopped=bool(last))

    assert ended is None
    assert (output.take(), output.close(), output.close()) == ("a ", "STO", "")
    assert output.stop_string is None


def test_a_stop_string_is_kept_if_it_is_asked_for_and_the_text_ends_right_behind_it() -> None:
    output = stream(stop=("ell",), include_stop_str_in_output=True)

    assert output.push([byte(ord("H")), merged("hello"), byte(ord("!"))]) == 2
    assert (output.take(), output.close(), output.stop_string) == ("Hhell", "", "ell")


def test_a_stop_string_may_end_inside_a_token_and_begin_inside_another() -> None:
    output = stream(stop=("lohe",))

    assert output.push([merged("hello"), merged("hello"), merged("is")]) == 2
    assert output.take() + output.close() == "hel"


def test_a_stop_string_of_many_bytes_is_complete_with_the_last_of_them() -> None:
    output = stream(stop=("\U0001f600",))

    assert output.push(letters("x")) is None
    assert [output.push([token_id]) for token_id in letters("\U0001f600")] == [None, None, None, 1]
    assert output.take() + output.close() == "x"


def mixed() -> Tokenizer:
    """E, N, then the four bytes of an emoji, the first of them in one token with D."""
    vocabulary = Tokenizer(BPE(vocab={"E": 0, "N": 1, "D\u00f0": 2, "\u0141": 3, "\u013a": 4, "\u0122": 5}, merges=[]))
    vocabulary.decoder = ByteLevel()
    return vocabulary


def test_a_token_that_ends_a_stop_string_and_begins_a_character_is_the_last() -> None:
    output = TextStream(Detokenizer(mixed(), frozenset()), SamplingParams(stop=("END",)))

    assert output.push([TokenId(index) for index in (0, 1, 2, 3, 4, 5)]) == 3
    assert output.take() + output.close() == ""


def test_text_that_was_read_ahead_of_an_incomplete_character_is_given_out_once() -> None:
    output = TextStream(Detokenizer(mixed(), frozenset()), SamplingParams(stop=("ENDED",)))

    pieces = pieces_of(output, [TokenId(index) for index in (2, 3, 4, 5, 0, 1, 2, 3)])

    assert pieces == ["D", "", "", "\U0001f600", "", "", "", "", "END\ufffd"]


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 2), (2, 2), (3, 4), (4, 4), (5, None)])
def test_a_stop_string_counts_if_it_is_complete_with_token_min_tokens_or_later(
    min_tokens: int, expected: int | None
) -> None:
    output = stream(stop=("ab",), min_tokens=min_tokens)

    assert output.push(letters("abab")) == expected
    assert output.take() + output.close() == "abab"[: expected - 2 if expected else 4]


def test_a_stop_string_that_did_not_count_may_lend_its_end_to_one_that_does() -> None:
    output = stream(stop=("aa",), min_tokens=3)

    assert output.push(letters("aaa")) == 3
    assert output.take() + output.close() == "a"


def test_a_stop_token_has_text_only_if_what_ends_the_output_is_kept() -> None:
    left_out, kept = stream(), stream(include_stop_str_in_output=True)

    for output in (left_out, kept):
        output.push([merged("hello"), merged("is")], is_stopped=True)

    assert left_out.take() + left_out.close() == "hello"
    assert kept.take() + kept.close() == "hellois"


def test_a_stop_string_before_a_stop_token_ends_the_output() -> None:
    output = stream(stop=("lo",))

    assert output.push([merged("hello"), END], is_stopped=True) == 1
    assert output.take() + output.close() == "hel"


def test_a_stop_string_in_the_text_of_a_stop_token_that_is_kept_ends_the_text() -> None:
    output = stream(stop=("lo",), include_stop_str_in_output=True, skip_special_tokens=False)

    assert output.push([byte(ord("x")), merged("hello")], is_stopped=True) == 2
    assert output.take() + output.close() == "xhello"


def test_special_tokens_have_text_if_they_are_not_skipped() -> None:
    skipped, shown = stream(), stream(skip_special_tokens=False)

    for output in (skipped, shown):
        output.push([TokenId(1), merged("hello"), END])

    assert skipped.take() + skipped.close() == "hello"
    assert shown.take() + shown.close() == "<|im_start|>hello<|im_end|>"


def test_a_shown_special_token_may_complete_a_stop_string() -> None:
    output = stream(stop=("lo<|im_end|>",), skip_special_tokens=False)

    assert output.push([merged("hello"), END, merged("is")]) == 2
    assert output.take() + output.close() == "hel"


def test_an_output_without_text_decodes_nothing() -> None:
    output = TextStream(Breaking(at_token=1), SamplingParams(detokenize=False))

    assert not output.is_watching
    assert output.push([merged("hello")]) is None
    assert (output.take(), output.close(), output.stop_string) == ("", "", None)


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character() -> None:
    assert pieces_of(stream(), [byte(ord("a")), byte(0xF0), byte(0x9F)])[-1] == "\ufffd"
    assert pieces_of(stream(stop=("b",)), [byte(ord("a")), byte(0xF0), byte(0x9F)])[-1] == "\ufffd"


def test_a_stop_string_that_only_the_end_completes_ends_the_text() -> None:
    output = stream(stop=("a\ufffd",))

    assert output.push([byte(ord("a")), byte(0xF0)]) is None
    assert output.close() == ""
    assert output.stop_string == "a\ufffd"


@pytest.mark.parametrize("text", [" Paris is", "Paris", "  two spaces", "\n\n x"])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_spaces_are_neither_lost_nor_doubled(text: str, stop: tuple[str, ...]) -> None:
    """B038."""
    token_ids = MODEL.encode(text)
    whole = stream(stop=stop)
    whole.push(token_ids)

    assert "".join(pieces_of(stream(stop=stop), token_ids)) == text
    assert whole.close() == text
    assert MODEL.decode(token_ids) == text


def test_a_tokenizer_that_breaks_ends_its_own_stream_alone() -> None:
    """B030."""
    token_ids = letters("abcdefgh")
    broken = TextStream(Breaking(at_token=5), SamplingParams(stop=("never",)))
    others = [stream(stop=("never",)) for _ in range(7)]

    for token_id in token_ids[:4]:
        broken.push([token_id])
        for output in others:
            output.push([token_id])
    with pytest.raises(RuntimeError, match="invalid prefix"):
        broken.push([token_ids[4]])
    for output in others:
        output.push(token_ids[4:])

    assert broken.take() == "abcd"
    assert [output.close() for output in others] == ["abcdefgh"] * 7


class Breaking(Detokenizer):
    """Fails at one token, counted from 1."""

    def __init__(self, at_token: int) -> None:
        super().__init__(tokenizer(), frozenset())
        self._num_left = at_token

    def push(self, token_ids: Sequence[TokenId]) -> str:
        self._num_left -= len(token_ids)
        if self._num_left <= 0:
            raise RuntimeError("invalid prefix encountered while decoding")
        return super().push(token_ids)
