"""Reads the numbers of a model from the config.json and generation_config.json of a Hugging Face folder.

Refuses what the configuration asks for and the models here do not compute, instead of computing something else.
"""

from pathlib import Path

from gpu_worker.loading.checkpoint import LLAMA, check_config
from gpu_worker.loading.json_file import JsonFile, read_json
from plugins.errors import ModelFileBroken, ModelNotFound
from plugins.model_loader import ModelConfig
from plugins.types import TokenId

_ARCHITECTURES = (LLAMA,)
_DTYPES = ("bfloat16", "float16", "float32")
_PLAIN_VALUES = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rope_interleaved": False,
}  # the only ones computed here


def read_config(folder: Path) -> ModelConfig:
    """Return a folder's model configuration; `dtype` is what config.json says, float32 if it says nothing.

    Raises: ModelNotFound: there is no config.json. ModelFileBroken: it is damaged, or of an unknown kind.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder}: has no config.json; {_what_else(folder)}")
    file = read_json(path)
    architecture = _architecture(file)
    _refuse_variants(file)
    hidden_size = file.get("hidden_size", int)
    num_heads = file.get("num_attention_heads", int)
    if num_heads < 1:
        raise ModelFileBroken(f"{path}: num_attention_heads is {num_heads}; at least 1")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=file.get("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=file.get("intermediate_size", int),
        num_hidden_layers=file.get("num_hidden_layers", int),
        num_attention_heads=num_heads,
        num_key_value_heads=file.get("num_key_value_heads", int, num_heads),
        head_dim=file.get("head_dim", int, hidden_size // num_heads),
        rms_norm_eps=file.get("rms_norm_eps", float, 1e-6),
        rope_theta=_rope_theta(file),
        max_position_embeddings=file.get("max_position_embeddings", int, 2048),
        tie_word_embeddings=file.get("tie_word_embeddings", bool, False),
        dtype=_dtype(file),
        eos_token_ids=_eos_token_ids(folder, file),
    )
    return check_config(path, config)


def _what_else(folder: Path) -> str:
    """Say what to do about a folder that is no Hugging Face checkpoint."""
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if found:
        return f"to load a GGUF file name the file itself: {', '.join(found)}"
    return "name a Hugging Face folder, with config.json, tokenizer.json and model.safetensors"


def _architecture(file: JsonFile) -> str:
    names = file.get("architectures", list)
    for name in names:
        if name in _ARCHITECTURES:
            return str(name)
    raise ModelFileBroken(
        f"{file.path}: architecture {', '.join(map(str, names)) or '<none>'} is not supported; "
        f"supported: {', '.join(_ARCHITECTURES)}"
    )


def _refuse_variants(file: JsonFile) -> None:
    for key, plain in _PLAIN_VALUES.items():
        value = file.values.get(key)
        if value is not None and value != plain:
            raise ModelFileBroken(f"{file.path}: {key} {value!r} is not supported; supported: {plain!r}")
    if file.values.get("quantization_config") is not None:
        method = file.get("quantization_config", dict).get("quant_method")
        raise ModelFileBroken(
            f"{file.path}: weights quantised with {method!r} are not supported; "
            "name the original checkpoint, or a GGUF file"
        )


def _rope_theta(file: JsonFile) -> float:
    """Return the base of the rotary embeddings. Newer files keep it in rope_parameters, older ones beside rope_scaling.

    Raises: ModelFileBroken: the embeddings are scaled.
    """
    for key in ("rope_parameters", "rope_scaling"):
        rope = JsonFile(file.path, file.get(key, dict, {}))
        kind = rope.values.get("rope_type", rope.values.get("type"))
        if kind not in (None, "default"):
            raise ModelFileBroken(
                f"{file.path}: {key} of type {kind!r} is not supported; only unscaled rotary embeddings are"
            )
        if rope.get("partial_rotary_factor", float, 1.0) != 1.0:
            raise ModelFileBroken(f"{file.path}: {key}.partial_rotary_factor is not supported; only 1.0 is")
    parameters = JsonFile(file.path, file.get("rope_parameters", dict, {}))
    return parameters.get("rope_theta", float, file.get("rope_theta", float, 10000.0))


def _dtype(file: JsonFile) -> str:
    name = file.get("dtype", str, file.get("torch_dtype", str, "float32"))
    if name not in _DTYPES:
        raise ModelFileBroken(f"{file.path}: dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return name


def _eos_token_ids(folder: Path, config: JsonFile) -> tuple[TokenId, ...]:
    """Return the tokens that end an output: generation_config.json knows best, config.json is asked next."""
    path = folder / "generation_config.json"
    files = [read_json(path), config] if path.is_file() else [config]
    for file in files:
        value = file.values.get("eos_token_id")
        if value is None:
            continue
        ids = [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
        if not ids or (isinstance(value, list) and len(ids) != len(value)):
            raise ModelFileBroken(f"{file.path}: eos_token_id is {value!r}; it must be a token id or a list of them")
        return tuple(TokenId(item) for item in ids)
    return ()
