"""Small model files, written with the libraries that others use to write them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 64, 4, 2, 8, 6
TOKENS = ["<|end|>", "a", "b", "ab", "Ġ", "c"]
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
METADATA: dict[str, object] = {
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.block_count": 1,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "llama.context_length": 128,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
}
_SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    "model.norm.weight": (HIDDEN,),
}
_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    "output_norm.weight": "model.norm.weight",
}


def tiny_weights() -> dict[str, torch.Tensor]:
    """Every tensor of the tiny model by its Hugging Face name; every number in it differs from the others nearby."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in _SHAPES.items()}


def gguf_tensors(weights: Mapping[str, torch.Tensor]) -> dict[str, npt.NDArray[np.float32]]:
    """The same weights as llama.cpp keeps them: its names, query and key rows in interleaved pairs."""
    tensors = {name: weights[source].numpy() for name, source in _GGUF_NAMES.items()}
    tensors["blk.0.attn_q.weight"] = _interleaved(tensors["blk.0.attn_q.weight"], HEADS)
    tensors["blk.0.attn_k.weight"] = _interleaved(tensors["blk.0.attn_k.weight"], KV_HEADS)
    return tensors


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    metadata: Mapping[str, object] | None = None,
    without: Sequence[str] = (),
    tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Write a GGUF file: the tiny model's metadata with changes, and tensors whose matrices are of one type."""
    writer = GGUFWriter(path, architecture)
    for key, value in (METADATA | dict(metadata or {})).items():
        if key not in without:
            _add(writer, key, value)
    for name, tensor in (gguf_tensors(tiny_weights()) if tensors is None else tensors).items():
        if tensor.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        else:
            writer.add_tensor(name, quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(
    folder: Path,
    *,
    config: Mapping[str, object] | None = None,
    without: Sequence[str] = (),
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a Hugging Face folder: the tiny model's config.json with changes, one safetensors file, a tokenizer."""
    folder.mkdir(exist_ok=True)
    values = {key: value for key, value in (CONFIG | dict(config or {})).items() if key not in without}
    write_json(folder / "config.json", values)
    save_file(dict(tiny_weights() if weights is None else weights), folder / "model.safetensors")
    write_json(folder / "tokenizer.json", TOKENIZER)
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>", "chat_template": "{{ messages }}"})
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


TOKENIZER: Mapping[str, object] = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 0,
            "content": "<|end|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(TOKENS)}, "merges": [["a", "b"]]},
}


def _interleaved(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """What llama.cpp's converter does to query and key rows."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {value!r}")
