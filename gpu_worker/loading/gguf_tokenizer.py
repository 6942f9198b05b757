"""Makes a tokenizer.json from the metadata of a GGUF file.

Knows byte-level BPE vocabularies (`tokenizer.ggml.model` gpt2) whose way of splitting text is known for certain; for
all others it says so, and the model's Hugging Face folder carries the right tokenizer.json.
"""

import json
from collections.abc import Mapping
from enum import IntEnum

from gpu_worker.loading.gguf_file import GgufFile
from plugins.errors import ModelFileBroken
from plugins.types import TokenId, TokenizerBundle

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = _BYTE_LEVEL | {"use_regex": False}
_DECODER = _BYTE_LEVEL | {"add_prefix_space": True}
_EACH_DIGIT: dict[str, object] = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
}
_LLAMA_3: dict[str, object] = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        _BYTES_ONLY,
    ],
}
# How text is split before merges apply, by `tokenizer.ggml.pre`, as in the tokenizer.json of the models that use it
_PRE_TOKENIZERS: Mapping[str, Mapping[str, object]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": _EACH_DIGIT,
    "starcoder": _EACH_DIGIT,
    "llama-bpe": _LLAMA_3,
}
_STARTS_WITH_BOS = ("llama-bpe",)  # where the metadata does not say


class _TokenType(IntEnum):
    """`tokenizer.ggml.token_type`: what a token is. The others are ordinary entries of the vocabulary."""

    CONTROL = 3
    USER_DEFINED = 4


def tokenizer_bundle(file: GgufFile) -> TokenizerBundle:
    """Return the tokenizer that the metadata describes.

    Raises: ModelFileBroken: the metadata is incomplete, or describes a kind of tokenizer that is not known here.
    """
    tokens = file.get_all("tokenizer.ggml.tokens", str)
    pre = _pre_tokenizer_name(file)
    return TokenizerBundle(
        tokenizer_json=_tokenizer_json(file, tokens, pre),
        chat_template=file.get("tokenizer.chat_template", str, ""),
        bos_token=_token(file, tokens, "tokenizer.ggml.bos_token_id"),
        eos_token=_token(file, tokens, "tokenizer.ggml.eos_token_id"),
        add_bos=file.get("tokenizer.ggml.add_bos_token", bool, pre in _STARTS_WITH_BOS),
    )


def eos_token_ids(file: GgufFile) -> tuple[TokenId, ...]:
    """Return the tokens that end an output: of a sequence and, where there is one, of a turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(TokenId(file.get(key, int)) for key in keys if key in file.metadata))


def _pre_tokenizer_name(file: GgufFile) -> str:
    model = file.get("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise ModelFileBroken(
            f"{file.path}: tokenizer.ggml.model {model!r} is not supported; supported: gpt2 (byte-level BPE); "
            "name the model's Hugging Face folder instead"
        )
    pre = file.get("tokenizer.ggml.pre", str, "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        raise ModelFileBroken(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported; supported: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}; name the model's Hugging Face folder instead"
        )
    return pre


def _token(file: GgufFile, tokens: tuple[str, ...], key: str) -> str:
    """Return the text of a token that the metadata names by id; empty if it names none."""
    if key not in file.metadata:
        return ""
    token_id = file.get(key, int)
    if not 0 <= token_id < len(tokens):
        raise ModelFileBroken(f"{file.path}: metadata {key} is {token_id}, not in [0, {len(tokens)})")
    return tokens[token_id]


def _tokenizer_json(file: GgufFile, tokens: tuple[str, ...], pre: str) -> bytes:
    kinds = file.get_all("tokenizer.ggml.token_type", int)
    if len(kinds) != len(tokens):
        raise ModelFileBroken(
            f"{file.path}: {len(tokens)} tokens have {len(kinds)} entries in tokenizer.ggml.token_type"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelFileBroken(f"{file.path}: {len(tokens) - len(vocabulary)} tokens of the vocabulary occur twice")
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _TokenType.CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_TokenType.CONTROL, _TokenType.USER_DEFINED)
    ]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": _DECODER,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",  # a word that is a token stays whole, whatever the merges say
            "vocab": vocabulary,
            "merges": _merges(file, vocabulary),
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _merges(file: GgufFile, vocabulary: dict[str, int]) -> list[list[str]]:
    merges = [merge.split(" ") for merge in file.get_all("tokenizer.ggml.merges", str)]
    for merge in merges:
        if len(merge) != 2 or "".join(merge) not in vocabulary or not vocabulary.keys() >= set(merge):
            raise ModelFileBroken(f"{file.path}: merge {' '.join(merge)!r} does not join two tokens into a third")
    return merges
