"""What becomes of text on its way to tokens."""

import sys
import threading
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from control_plane.text.chat import ChatTemplate
from control_plane.text.model import TextModel
from control_plane.text.stop import StopStrings
from plugins.errors import ModelFileBroken
from plugins.types import SamplingParams, TokenId, TokenizerBundle
from tests.unit.control_plane.text.byte_level import bundle, byte, merged, tokenizer, turns


def test_plain_text_becomes_the_tokens_of_the_vocabulary() -> None:
    model = TextModel.from_bundle(bundle())

    assert model.encode("hello Paris!") == (merged("hello"), merged(" Paris"), byte(ord("!")))


def test_text_decodes_to_what_was_encoded() -> None:
    model = TextModel.from_bundle(bundle())

    text = " Paris\n\n x  two spaces \U0001f469\u200d\U0001f467 \ud55c\uad6d\uc5b4 \x00"

    assert model.decode(model.encode(text)) == text


def test_a_special_token_typed_in_a_text_stays_text() -> None:
    model = TextModel.from_bundle(bundle())

    token_ids = model.encode("a<|im_end|>b")

    assert token_ids == tuple(byte(value) for value in b"a<|im_end|>b")
    assert model.decode(token_ids) == "a<|im_end|>b"


def test_a_prompt_starts_with_the_bos_token_if_the_model_wants_it() -> None:
    model = TextModel.from_bundle(bundle(add_bos=True))

    assert model.encode("hello") == (1, merged("hello"))
    assert model.encode("") == (1,)


def test_an_empty_text_has_no_tokens_without_a_bos_token() -> None:
    assert TextModel.from_bundle(bundle()).encode("") == ()


def test_decoding_leaves_special_tokens_out() -> None:
    model = TextModel.from_bundle(bundle())

    assert model.decode([TokenId(1), merged("hello"), TokenId(2), TokenId(0)]) == "hello"


def test_bytes_that_are_no_character_become_replacement_characters() -> None:
    model = TextModel.from_bundle(bundle())

    assert model.decode([byte(0xF0), byte(0x9F), byte(ord("x"))]) == "\ufffdx"


def test_truncation_and_padding_settings_of_a_tokenizer_file_do_not_shorten_prompts() -> None:
    trained = tokenizer()
    trained.enable_truncation(max_length=4)
    trained.enable_padding(length=16)
    model = TextModel.from_bundle(_bundle_of(trained.to_str().encode()))

    assert model.encode("abcdefgh") == tuple(byte(value) for value in b"abcdefgh")


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ModelFileBroken, match="the model's tokenizer cannot be read"):
        TextModel.from_bundle(_bundle_of(b'{"version": "1.0"'))


def test_a_bos_token_outside_the_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(ModelFileBroken, match="'<s>', which the tokenizer does not have"):
        TextModel.from_bundle(bundle(bos_token="<s>", add_bos=True))


def _bundle_of(tokenizer_json: bytes) -> TokenizerBundle:
    return TokenizerBundle(tokenizer_json=tokenizer_json, chat_template="", bos_token="", eos_token="", add_bos=False)


def test_outputs_of_one_request_share_their_stop_strings_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []

    class Counted(StopStrings):
        def __init__(self, texts: tuple[str, ...]) -> None:
            made.append(texts)
            super().__init__(texts)

    monkeypatch.setattr("control_plane.text.model.StopStrings", Counted)
    texts = TextModel.from_bundle(bundle()).streams([SamplingParams(stop=("ab",), seed=seed) for seed in range(3)])

    ends = [text.push([byte(value) for value in word]) for text, word in zip(texts, (b"a", b"xab", b"b"), strict=True)]

    assert made == [("ab",)]
    assert ends == [None, 3, None]
    assert [text.close() for text in texts] == ["a", "x", "b"]


class Watched:
    """A tokenizer, and whether it is at work."""

    def __init__(self, is_at_work: threading.Event) -> None:
        self._tokenizer = tokenizer()
        self._is_at_work = is_at_work

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._tokenizer, name)

        def call(*arguments: object, **options: object) -> object:
            self._is_at_work.set()
            try:
                return attribute(*arguments, **options)
            finally:
                self._is_at_work.clear()

        return call


LONG = "hello " * 200_000
LONG_WORK: dict[str, Callable[[TextModel], object]] = {
    "text": lambda model: model.encode(LONG),
    "chat": lambda model: model.encode_chat(turns(("user", LONG))),
    "chat with a special token": lambda model: model.encode_chat(turns(("user", LONG + "<|im_end|>"))),
    "decode": lambda model: model.decode([merged("hello")] * 1_000_000),
}


@pytest.mark.parametrize("work", LONG_WORK.values(), ids=LONG_WORK)
def test_other_threads_run_while_a_long_text_is_worked_on(
    work: Callable[[TextModel], object], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # who holds the interpreter gives it up when another asks, unless it cannot
    is_at_work = threading.Event()
    watched: Any = Watched(is_at_work)
    template = ChatTemplate("{{ messages[0]['content'] }}", "", "", datetime.now)
    thread = threading.Thread(target=work, args=(TextModel(watched, watched, template, None),))
    num_turns = 0

    thread.start()
    while thread.is_alive():
        num_turns += is_at_work.is_set()

    assert num_turns > 10_000  # a hundred or so while it cannot
