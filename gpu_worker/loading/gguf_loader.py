"""Loads a model from one GGUF file: numbers and tokenizer from its metadata, weights dequantised to float32.

Translates llama.cpp's names and row order into those of the Hugging Face checkpoint. Where bytes lie is
`gguf_file`'s business; what blocks of packed numbers mean is the `gguf` package's.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from gpu_worker.loading.checkpoint import LLAMA, check_config, check_tensors, is_ignored, refuse_options
from gpu_worker.loading.default_sampling import read_gguf_sampling
from gpu_worker.loading.gguf_file import GgufFile, GgufTensor, read_gguf
from gpu_worker.loading.gguf_tokenizer import eos_token_ids, tokenizer_bundle
from plugins.errors import InvalidConfig, ModelFileBroken
from plugins.model_loader import ModelConfig, ModelLoader, register_model_loader
from plugins.types import SamplingParams, TokenizerBundle

_ARCHITECTURES = {"llama": LLAMA}  # general.architecture -> the checkpoint's name for it
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@register_model_loader("gguf")
class GgufLoader(ModelLoader):
    """One GGUF file. Its header is read and compared with the architecture at construction."""

    def __init__(self, path: Path | None, options: Mapping[str, object]) -> None:
        refuse_options("gguf", options)
        if path is None or not path.is_file():
            raise InvalidConfig(f"load_format gguf needs a .gguf file; {path} is none")
        self._file = read_gguf(path)
        self._config = _read_config(self._file)
        self._tensors = {hugging_face_name(tensor.name): tensor for tensor in self._file.tensors}
        check_tensors(path, self._config, {name: tensor.shape for name, tensor in self._tensors.items()})
        _check_kinds(self._file)

    def config(self) -> ModelConfig:
        return self._config

    def tokenizer(self) -> TokenizerBundle:
        return tokenizer_bundle(self._file)

    def default_sampling(self) -> SamplingParams:
        return read_gguf_sampling(self._file)

    def num_tensors(self) -> int:
        return sum(not is_ignored(name, self._config) for name in self._tensors)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield float32 tensors in the order of the file. Memory: one tensor at a time, besides the mapped file."""
        data = np.memmap(self._file.path, dtype=np.uint8, mode="r")
        for name, tensor in self._tensors.items():
            if not is_ignored(name, self._config):
                yield name, self._read(data, name, tensor)

    def _read(self, data: np.ndarray, name: str, tensor: GgufTensor) -> Tensor:
        block_size, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        packed = data[tensor.offset : tensor.offset + tensor.num_bytes]
        rows = packed.reshape(*tensor.shape[:-1], tensor.shape[-1] // block_size * block_bytes)
        # dequantize returns a view of the mapped file where nothing is packed; torch wants memory that it may write
        weight = torch.from_numpy(np.array(dequantize(rows, tensor.kind), dtype=np.float32))
        if name.endswith("self_attn.q_proj.weight"):
            return _half_split(weight, self._config.num_attention_heads)
        if name.endswith("self_attn.k_proj.weight"):
            return _half_split(weight, self._config.num_key_value_heads)
        return weight


def hugging_face_name(name: str) -> str:
    """Translate a tensor's name; one that is not known stays as it is."""
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _INNER and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_INNER[parts[2]]}.weight"
    return name


def _half_split(weight: Tensor, num_heads: int) -> Tensor:
    """Put query or key rows, which llama.cpp keeps in interleaved pairs, into the order of half-split rotary ones."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _read_config(file: GgufFile) -> ModelConfig:
    kind = file.get("general.architecture", str)
    if kind not in _ARCHITECTURES:
        raise ModelFileBroken(
            f"{file.path}: architecture {kind!r} is not supported; supported: {', '.join(sorted(_ARCHITECTURES))}"
        )
    _refuse_variants(file, kind)
    hidden_size = file.get(f"{kind}.embedding_length", int)
    num_heads = file.get(f"{kind}.attention.head_count", int)
    if num_heads < 1:
        raise ModelFileBroken(f"{file.path}: metadata {kind}.attention.head_count is {num_heads}; at least 1")
    head_dim = file.get(f"{kind}.attention.key_length", int, hidden_size // num_heads)
    for key in (f"{kind}.rope.dimension_count", f"{kind}.attention.value_length"):
        if file.get(key, int, head_dim) != head_dim:
            raise ModelFileBroken(f"{file.path}: metadata {key} is {file.metadata[key]}, the head dimension {head_dim}")
    config = ModelConfig(
        architecture=_ARCHITECTURES[kind],
        vocab_size=file.get(f"{kind}.vocab_size", int, len(file.get("tokenizer.ggml.tokens", tuple))),
        hidden_size=hidden_size,
        intermediate_size=file.get(f"{kind}.feed_forward_length", int),
        num_hidden_layers=file.get(f"{kind}.block_count", int),
        num_attention_heads=num_heads,
        num_key_value_heads=file.get(f"{kind}.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        rms_norm_eps=_shortest(file.get(f"{kind}.attention.layer_norm_rms_epsilon", float)),
        rope_theta=_shortest(file.get(f"{kind}.rope.freq_base", float, 10000.0)),
        max_position_embeddings=file.get(f"{kind}.context_length", int),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in file.tensors),
        dtype="float32",
        eos_token_ids=eos_token_ids(file),
    )
    return check_config(file.path, config)


def _refuse_variants(file: GgufFile, kind: str) -> None:
    """Refuse what this architecture name covers in GGUF, but the model here does not compute."""
    scaling = file.get(f"{kind}.rope.scaling.type", str, "none")
    if scaling != "none" or any(tensor.name == "rope_freqs.weight" for tensor in file.tensors):
        told = repr(scaling) if scaling != "none" else "by the tensor rope_freqs.weight"
        raise ModelFileBroken(f"{file.path}: rope scaling {told} is not supported; only unscaled rotary embeddings are")
    num_experts = file.get(f"{kind}.expert_count", int, 0)
    if num_experts > 0:
        raise ModelFileBroken(f"{file.path}: a mixture of {num_experts} experts is not supported; dense models are")


def _shortest(number: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05, where the file's bits read 9.99999974e-06."""
    return float(str(np.float32(number)))


def _check_kinds(file: GgufFile) -> None:
    """Refuse packed types that the gguf package cannot unpack, before any weight is read."""
    first_names: dict[GGMLQuantizationType, str] = {}
    for tensor in file.tensors:
        first_names.setdefault(tensor.kind, tensor.name)
    for kind, name in first_names.items():
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError as error:
            raise ModelFileBroken(f"{file.path}: tensor {name} has type {kind.name}, which cannot be read") from error
