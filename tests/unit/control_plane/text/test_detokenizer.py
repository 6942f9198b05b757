"""Text that arrives token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from control_plane.text.detokenizer import Detokenizer
from control_plane.text.model import TextModel
from plugins.types import TokenId
from tests.unit.control_plane.text.byte_level import MERGED, VOCAB_SIZE, bundle, byte, merged

MODEL = TextModel.from_bundle(bundle())
CONTINUATION = byte(0xA9)  # a byte that begins no character
SOME_TEXT = "\U0001f469\u200d\U0001f469\u200d\U0001f467 ok \u010f\u00e1bel \ud55c\uad6d\uc5b4 \U0001f1eb\U0001f1f7 中文"


def tokens_of(data: bytes) -> list[TokenId]:
    return [byte(value) for value in data]


def stream(token_ids: list[TokenId]) -> list[str]:
    detokenizer = MODEL.detokenizer()
    return [detokenizer.push([token_id]) for token_id in token_ids] + [detokenizer.flush()]


def test_a_character_is_given_out_when_its_last_byte_has_come() -> None:
    assert stream(tokens_of("é!".encode())) == ["", "é", "!", ""]


def test_no_piece_of_valid_text_contains_a_replacement_character() -> None:
    pieces = stream(tokens_of(SOME_TEXT.encode()))

    assert "".join(pieces) == SOME_TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_off_by_the_end_is_flushed_as_a_replacement_character() -> None:
    assert stream(tokens_of(b"a\xf0\x9f")) == ["a", "", "", "\ufffd"]


def test_a_second_flush_gives_nothing() -> None:
    detokenizer = MODEL.detokenizer()
    detokenizer.push(tokens_of(b"\xf0"))

    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")


def test_a_real_replacement_character_at_the_end_is_not_lost() -> None:
    assert "".join(stream([merged("hello"), merged("\ufffd")])) == "hello\ufffd"


@pytest.mark.parametrize("text", [" Paris is", "Paris", "  two spaces", "\n\n x", " "])
def test_spaces_are_neither_lost_nor_doubled(text: str) -> None:
    assert "".join(stream(list(MODEL.encode(text)))) == text


def test_special_tokens_have_no_text_and_hold_nothing_up() -> None:
    assert stream([TokenId(1), merged("hello"), TokenId(2)]) == ["", "hello", "", ""]


def test_a_special_token_between_the_bytes_of_a_character_does_not_break_it() -> None:
    first, second = tokens_of("é".encode())

    assert stream([first, TokenId(0), second]) == ["", "", "é", ""]


def test_endless_rubbish_is_given_out_before_it_piles_up() -> None:
    pieces = stream([CONTINUATION] * 100)

    assert "".join(pieces) == "\ufffd" * 100
    assert max(len(piece) for piece in pieces) == 15


def test_a_character_that_begins_in_rubbish_becomes_whole() -> None:
    token_ids = [CONTINUATION] * 13 + tokens_of("\U0001f600".encode())

    assert "".join(stream(token_ids)) == "\ufffd" * 13 + "\U0001f600"


@given(
    st.lists(
        st.one_of(
            st.integers(0, VOCAB_SIZE - 1),
            st.sampled_from([merged(text) for text in MERGED]),
            st.integers(0x80, 0xFF).map(byte),
        ),
        max_size=60,
    ),
    st.integers(1, 5),
)
def test_the_pieces_of_any_tokens_join_to_what_decode_gives(token_ids: list[int], width: int) -> None:
    ids = [TokenId(token_id) for token_id in token_ids]
    detokenizer = MODEL.detokenizer()

    pieces = [detokenizer.push(ids[start : start + width]) for start in range(0, len(ids), width)]

    assert "".join(pieces) + detokenizer.flush() == MODEL.decode(ids)


@given(st.text(max_size=30))
def test_the_pieces_of_any_text_join_to_the_text(text: str) -> None:
    assert "".join(stream(tokens_of(text.encode()))) == text


def test_a_decoder_that_takes_text_back_ends_no_stream() -> None:
    # Byte fallback reads a run of bytes as a whole: a wrong byte takes back the characters before it.
    vocabulary = {"a": 0} | {f"<0x{value:02X}>": value + 1 for value in range(256)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(tokenizer, frozenset())
    letter, rubbish = [TokenId(value + 1) for value in "中".encode()], TokenId(0xFF + 1)

    pieces = [
        detokenizer.push(letter),
        detokenizer.push([rubbish]),
        detokenizer.push([TokenId(0)]),
        detokenizer.flush(),
    ]

    assert pieces == ["中", "", "\ufffda", ""]


def test_rubbish_that_cannot_be_cut_is_given_out_whole() -> None:
    tokenizer = Tokenizer(BPE(vocab={"▁\ufffd": 0}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()  # leaves the first space out, so that no two parts make the whole
    detokenizer = Detokenizer(tokenizer, frozenset())

    assert detokenizer.push([TokenId(0)] * 16) == "\ufffd" + " \ufffd" * 15
    assert detokenizer.flush() == ""


def test_the_first_space_of_a_sentencepiece_text_is_left_out_once() -> None:
    tokenizer = Tokenizer(BPE(vocab={"▁a": 0, "▁b": 1}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    detokenizer = Detokenizer(tokenizer, frozenset())

    pieces = [detokenizer.push([TokenId(token_id)]) for token_id in (0, 1, 0)]

    assert pieces == ["a", " b", " a"]
