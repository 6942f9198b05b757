"""The tokenizer made from a GGUF's metadata gives the ids that transformers' conversion of the same GGUF gives.

One difference is meant. transformers 5.24 does not know `tokenizer.ggml.pre` smollm and splits text as GPT-2 does;
the tokenizer.json that SmolLM2's authors publish takes digits one by one first, and then splits as GPT-2 does.
It shows in runs of spaces before a digit. The expected ids are those of transformers' conversion with the published
way of splitting; on text without digits also those of the conversion as it is.
"""

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from gpu_worker.loading.embedded import embedded_model
from gpu_worker.loading.gguf_file import GgufFile, read_gguf
from gpu_worker.loading.gguf_tokenizer import tokenizer_bundle
from plugins.errors import ModelFileBroken
from tests.unit.gpu_worker.loading.tiny_files import write_gguf

CORPUS = (Path(__file__).parent / "corpus.txt").read_text(encoding="utf-8").split("\n")
PIECES = st.sampled_from(["  ", "\n", "\t", " the", "1", "'s", "<|im_end|>", "é", "漢", "\u200d", "😀"])
LETTERS = st.characters(exclude_categories=["Cs"])  # half a surrogate pair is no text
TEXTS = st.lists(PIECES | LETTERS).map("".join) | st.text(LETTERS)


@pytest.fixture(scope="module")
def smollm2() -> GgufFile:
    return read_gguf(embedded_model())


@pytest.fixture(scope="module")
def ours(smollm2: GgufFile) -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_bundle(smollm2).tokenizer_json)


@pytest.fixture(scope="module")
def theirs_as_is(smollm2: GgufFile) -> Tokenizer:
    return _their_conversion(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2: GgufFile) -> Tokenizer:
    converted = _their_conversion(smollm2)
    converted.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return converted


def test_every_line_of_the_corpus_has_the_same_ids_and_reads_back_the_same(ours: Tokenizer, theirs: Tokenizer) -> None:
    expected = [theirs.encode(line, add_special_tokens=False).ids for line in CORPUS]

    ids = [ours.encode(line, add_special_tokens=False).ids for line in CORPUS]

    assert len(CORPUS) > 250
    assert ids == expected
    assert [ours.decode(line, skip_special_tokens=False) for line in ids] == CORPUS


def test_the_corpus_as_one_text_has_the_same_ids(ours: Tokenizer, theirs: Tokenizer) -> None:
    text = "\n".join(CORPUS) + "\n\n\n" + "\r\n".join(CORPUS)

    ids = ours.encode(text, add_special_tokens=False).ids

    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert len(ids) > 10_000


def test_text_without_digits_has_the_ids_of_transformers_as_it_is(ours: Tokenizer, theirs_as_is: Tokenizer) -> None:
    lines = [line for line in CORPUS if not any(unicodedata.category(letter).startswith("N") for letter in line)]

    ids = [ours.encode(line, add_special_tokens=False).ids for line in lines]

    assert len(lines) > 100
    assert ids == [theirs_as_is.encode(line, add_special_tokens=False).ids for line in lines]


def test_special_tokens_typed_in_text_stay_text_when_asked_for(ours: Tokenizer, theirs: Tokenizer) -> None:
    lines = [line for line in CORPUS if "<" in line]
    ours.encode_special_tokens = theirs.encode_special_tokens = True

    try:
        ids = [ours.encode(line, add_special_tokens=False).ids for line in lines]
        expected = [theirs.encode(line, add_special_tokens=False).ids for line in lines]
    finally:
        ours.encode_special_tokens = theirs.encode_special_tokens = False

    assert ids == expected
    assert all(token_id > 16 for line in ids for token_id in line)  # 0 to 16 are the special tokens


@given(text=TEXTS)
def test_any_text_has_the_same_ids_which_read_back_the_same(ours: Tokenizer, theirs: Tokenizer, text: str) -> None:
    """Not always the text itself: this vocabulary lacks byte F1, with which U+40000 begins, and both drop it."""
    ids = ours.encode(text, add_special_tokens=False).ids

    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def test_known_texts_have_the_ids_of_the_published_tokenizer(ours: Tokenizer) -> None:
    tokens = [ours.encode(text).tokens for text in ("Hello  42 worlds", "<|im_start|>user", "x²")]

    assert tokens == [
        ["Hello", "ĠĠ", "4", "2", "Ġworlds"],
        ["<|im_start|>", "user"],
        ["x", "Â²"],
    ]


def test_template_and_special_tokens_come_from_the_metadata(smollm2: GgufFile) -> None:
    bundle = tokenizer_bundle(smollm2)

    assert bundle.bos_token == "<|im_start|>"
    assert bundle.eos_token == "<|im_end|>"
    assert bundle.add_bos is False
    assert bundle.chat_template.startswith("{% for message in messages %}{% if loop.first")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_other_known_ways_of_splitting_give_the_ids_of_transformers(smollm2: GgufFile, pre: str) -> None:
    """A whole word that is a token stays whole in Llama 3's published tokenizer; transformers leaves that out."""
    file = GgufFile(smollm2.path, {**smollm2.metadata, "tokenizer.ggml.pre": pre}, smollm2.tensors)
    document = json.loads(_their_conversion(file).to_str())
    document["model"]["ignore_merges"] = pre == "llama-bpe"
    expected = Tokenizer.from_str(json.dumps(document))

    tokenizer = Tokenizer.from_buffer(tokenizer_bundle(file).tokenizer_json)

    assert [tokenizer.encode(line, add_special_tokens=False).ids for line in CORPUS] == [
        expected.encode(line, add_special_tokens=False).ids for line in CORPUS
    ]


def test_starcoder_splits_as_smollm_does(tmp_path: Path) -> None:
    named = {
        pre: write_gguf(tmp_path / f"{pre}.gguf", metadata={"tokenizer.ggml.pre": pre})
        for pre in ("smollm", "starcoder")
    }

    bundles = {pre: tokenizer_bundle(read_gguf(path)) for pre, path in named.items()}

    assert bundles["starcoder"] == bundles["smollm"]


def test_a_llama_3_prompt_starts_with_bos_unless_the_metadata_says_otherwise(tmp_path: Path) -> None:
    silent = write_gguf(tmp_path / "silent.gguf", metadata={"tokenizer.ggml.pre": "llama-bpe"})
    metadata = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    against = write_gguf(tmp_path / "against.gguf", metadata=metadata)

    add_bos = [tokenizer_bundle(read_gguf(path)).add_bos for path in (silent, against)]

    assert add_bos == [True, False]


def test_a_user_defined_token_is_matched_whole_and_is_not_special(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "own.gguf", metadata={"tokenizer.ggml.token_type": [3, 1, 1, 4, 1, 1]})

    tokenizer = Tokenizer.from_buffer(tokenizer_bundle(read_gguf(path)).tokenizer_json)

    assert tokenizer.encode("cabc").ids == [5, 3, 5]
    assert tokenizer.decode([5, 3, 0]) == "cab"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"tokenizer.ggml.pre": "tekken"},
            r"tokenizer\.ggml\.pre 'tekken' is not supported; supported: gpt-2, llama-bpe",
        ),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.model 'llama' is not supported; supported: gpt2"),
        ({"tokenizer.ggml.token_type": [3, 1]}, r"6 tokens have 2 entries in tokenizer\.ggml\.token_type"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a", "ab", "c", "d"]}, "1 tokens of the vocabulary occur twice"),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"tokenizer\.ggml\.tokens is not an array of str"),
        ({"tokenizer.ggml.merges": ["a c"]}, "merge 'a c' does not join two tokens into a third"),
        ({"tokenizer.ggml.merges": ["a"]}, "merge 'a' does not join two tokens into a third"),
        ({"tokenizer.ggml.bos_token_id": 9}, r"tokenizer\.ggml\.bos_token_id is 9, not in \[0, 6\)"),
    ],
)
def test_a_tokenizer_that_is_not_known_or_damaged_is_refused(
    tmp_path: Path, metadata: dict[str, object], message: str
) -> None:
    file = read_gguf(write_gguf(tmp_path / "odd.gguf", metadata=metadata))

    with pytest.raises(ModelFileBroken, match=message):
        tokenizer_bundle(file)


def _their_conversion(file: GgufFile) -> Tokenizer:
    """What transformers makes of a GGUF's metadata; reading the file with it as well would take 5 s."""
    metadata = {
        "tokenizer_type": file.metadata["tokenizer.ggml.model"],
        "pre_tokenizer_type": file.metadata["tokenizer.ggml.pre"],
        "tokens": list(file.get_all("tokenizer.ggml.tokens", str)),
        "token_type": list(file.get_all("tokenizer.ggml.token_type", int)),
        "merges": list(file.get_all("tokenizer.ggml.merges", str)),
        "bos_token_id": file.metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": file.metadata["tokenizer.ggml.eos_token_id"],
    }

    converted: Tokenizer = convert_gguf_tokenizer("llama", metadata)[0]
    return converted
