"""Which tokens can be served: those that the tokenizer knows."""

import json

import pytest

from gpu_worker.loading.dummy_loader import byte_tokenizer
from gpu_worker.loading.vocabulary import served_vocab_size
from plugins.errors import ModelFileBroken
from plugins.types import TokenizerBundle

ADDED = {
    "id": 2,
    "content": "<|end|>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


def bundle(document: object) -> TokenizerBundle:
    data = json.dumps(document).encode()
    return TokenizerBundle(tokenizer_json=data, chat_template="", bos_token="", eos_token="", add_bos=False)


def word_level(vocabulary: dict[str, int], added: list[object]) -> object:
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"},
    }


@pytest.mark.parametrize(("vocab_size", "served"), [(336, 272), (272, 272), (100, 100)])
def test_a_token_is_served_if_both_model_and_tokenizer_have_it(vocab_size: int, served: int) -> None:
    """B102."""
    assert served_vocab_size(vocab_size, byte_tokenizer()) == served


def test_added_tokens_and_those_beyond_a_gap_are_served() -> None:
    assert served_vocab_size(64, bundle(word_level({"a": 0, "b": 1}, [ADDED]))) == 3
    assert served_vocab_size(64, bundle(word_level({"a": 0, "b": 9}, []))) == 10


@pytest.mark.parametrize("document", [{}, word_level({}, [])])
def test_a_tokenizer_that_cannot_be_read_or_knows_nothing_is_told(document: object) -> None:
    with pytest.raises(ModelFileBroken, match="tokenizer"):
        served_vocab_size(64, bundle(document))
