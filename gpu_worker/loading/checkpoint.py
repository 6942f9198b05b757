"""Which tensors a checkpoint of a known architecture has, under which names and in which shapes.

Both file formats are checked against this one table before a weight is read; reading is the loaders' business.
"""

from collections.abc import Mapping
from pathlib import Path

from plugins.errors import InvalidConfig, ModelFileBroken
from plugins.model_loader import ModelConfig

LLAMA = "LlamaForCausalLM"

_MAX_LAYERS = 1024  # above it a damaged number, and a table of this many layers is still small
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # written by old versions of transformers; follows from rope_theta


def check_config(where: Path, config: ModelConfig) -> ModelConfig:
    """Return the configuration if its numbers fit each other.

    Raises: ModelFileBroken: a number is out of its range; the message names it.
    """
    numbers = {
        name: getattr(config, name)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_theta",
        )
    }
    for name, value in numbers.items():
        if not 0 < value < 2**31:
            raise ModelFileBroken(f"{where}: {name} is {value}; it must be above 0 and below 2**31")
    if config.num_hidden_layers > _MAX_LAYERS:
        raise ModelFileBroken(f"{where}: num_hidden_layers is {config.num_hidden_layers}; at most {_MAX_LAYERS}")
    if config.num_attention_heads % config.num_key_value_heads != 0:
        raise ModelFileBroken(
            f"{where}: num_attention_heads ({config.num_attention_heads}) is not a multiple of "
            f"num_key_value_heads ({config.num_key_value_heads})"
        )
    if config.head_dim % 2 != 0:
        raise ModelFileBroken(f"{where}: head_dim is {config.head_dim}; rotary embeddings need an even number")
    for token_id in config.eos_token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise ModelFileBroken(f"{where}: end-of-sequence token {token_id} is not in [0, {config.vocab_size})")
    return config


def expected_tensors(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Return name and shape of every tensor that the architecture needs, in the order of a forward pass.

    A tied head is the embedding and has no tensor of its own.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{index}.{part}.weight": shape for part, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Say whether a tensor that a checkpoint may hold repeats what the model has from elsewhere."""
    return name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and config.tie_word_embeddings)


def check_tensors(where: Path, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a checkpoint's tensors, by their Hugging Face names, with what the architecture needs.

    Raises: ModelFileBroken: one is missing, has another shape, or belongs to no known part of the model.
    """
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelFileBroken(
            f"{where}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} are); fetch the model again"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelFileBroken(
                f"{where}: tensor {name} has shape {list(found[name])}; the configuration implies {list(shape)}"
            )
    for name in found:
        if name not in expected and not is_ignored(name, config):
            raise ModelFileBroken(
                f"{where}: tensor {name} is no part of {config.architecture} as known here; "
                "ignoring it would change what the model says, so the model is refused"
            )


def refuse_options(load_format: str, options: Mapping[str, object], known: tuple[str, ...] = ()) -> None:
    """Raise InvalidConfig if a loader was given an option that it does not have."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InvalidConfig(
            f"load_format {load_format} has no option {unknown[0]!r}; known: {', '.join(known) or '<none>'}"
        )
