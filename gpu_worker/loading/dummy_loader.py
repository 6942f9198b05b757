"""Loads a model that exists in no file: random weights in any shape, and a tokenizer of single bytes.

For tests and for measuring speed: the whole system runs, what it says means nothing.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gpu_worker.loading.checkpoint import LLAMA, expected_tensors, refuse_options
from gpu_worker.loading.hf_config import read_config
from gpu_worker.loading.hf_tokenizer import read_tokenizer
from plugins.errors import InvalidConfig
from plugins.model_loader import ModelConfig, ModelLoader, register_model_loader
from plugins.types import TokenId, TokenizerBundle

_STD = 0.02  # of every matrix; norms are ones
_NUM_BYTES = 256  # token i is byte i; special tokens follow
_SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", *(f"<|reserved_{index}|>" for index in range(14)))
_EOS_TOKEN = "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TINY = ModelConfig(
    architecture=LLAMA,
    vocab_size=_NUM_BYTES + len(_SPECIAL_TOKENS),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    dtype="float32",
    eos_token_ids=(TokenId(_NUM_BYTES + _SPECIAL_TOKENS.index(_EOS_TOKEN)),),
)


@register_model_loader("dummy")
class DummyLoader(ModelLoader):
    """Random weights. The same seed and shape give the same weights on every machine.

    A folder lends its config.json, and its tokenizer.json if it has one; its weights are not read.
    """

    def __init__(self, path: Path | None, options: Mapping[str, object]) -> None:
        refuse_options("dummy", options, known=("seed",))
        seed = options.get("seed", 0)
        if not isinstance(seed, int):
            raise InvalidConfig(f"load_format dummy: seed must be a whole number, is {seed!r}")
        if path is not None and not path.is_dir():
            raise InvalidConfig(f"load_format dummy takes the shape from a folder's config.json; {path} is no folder")
        self._seed = seed
        self._folder = path if path is not None and (path / "tokenizer.json").is_file() else None
        self._config = TINY if path is None else read_config(path)
        if self._folder is None:
            if self._config.vocab_size < TINY.vocab_size:
                raise InvalidConfig(
                    f"{path}: vocab_size is {self._config.vocab_size}; without a tokenizer.json it must be at least "
                    f"{TINY.vocab_size}, for a tokenizer of bytes"
                )
            self._config = replace(self._config, eos_token_ids=TINY.eos_token_ids)

    def config(self) -> ModelConfig:
        return self._config

    def tokenizer(self) -> TokenizerBundle:
        return byte_tokenizer() if self._folder is None else read_tokenizer(self._folder)

    def num_tensors(self) -> int:
        return len(expected_tensors(self._config))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        for name, shape in expected_tensors(self._config).items():
            if len(shape) == 1:
                yield name, torch.ones(shape)
            else:
                yield name, torch.randn(shape, generator=generator) * _STD


def byte_tokenizer() -> TokenizerBundle:
    """Return a tokenizer whose first 256 tokens are the bytes, followed by the special tokens of ChatML."""
    tokens = [*_byte_characters(), *_SPECIAL_TOKENS]
    added = [
        {
            "id": _NUM_BYTES + index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(_SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []},
    }
    return TokenizerBundle(
        tokenizer_json=json.dumps(document, ensure_ascii=False).encode(),
        chat_template=_CHAT_TEMPLATE,
        bos_token="",
        eos_token=_EOS_TOKEN,
        add_bos=False,
    )


def _byte_characters() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies: itself where it can be seen."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(_NUM_BYTES, 2 * _NUM_BYTES))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(_NUM_BYTES)]
