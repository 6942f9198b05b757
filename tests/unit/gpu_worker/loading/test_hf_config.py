"""config.json and generation_config.json: what is read, and what is refused instead of being computed wrongly."""

from pathlib import Path

import pytest

from gpu_worker.loading.hf_config import read_config
from plugins.errors import ModelFileBroken, ModelNotFound
from plugins.model_loader import ModelConfig
from plugins.types import TokenId
from tests.unit.gpu_worker.loading.tiny_files import write_folder, write_json


def test_numbers_come_from_config_json(tmp_path: Path) -> None:
    config = read_config(write_folder(tmp_path))

    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=6,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_ids=(TokenId(0),),
    )


def test_what_a_file_leaves_out_has_the_values_of_transformers(tmp_path: Path) -> None:
    left_out = ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings"]
    left_out += ["tie_word_embeddings", "torch_dtype", "eos_token_id"]

    config = read_config(write_folder(tmp_path, without=left_out))

    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)
    assert (config.rope_theta, config.max_position_embeddings, config.tie_word_embeddings) == (10000.0, 2048, False)
    assert (config.dtype, config.eos_token_ids) == ("float32", ())


def test_files_of_newer_versions_of_transformers_are_read_too(tmp_path: Path) -> None:
    newer = {"dtype": "float16", "rope_parameters": {"rope_theta": 7000, "rope_type": "default"}}

    config = read_config(write_folder(tmp_path, config=newer, without=["torch_dtype", "rope_theta"]))

    assert (config.dtype, config.rope_theta) == ("float16", 7000.0)


@pytest.mark.parametrize(("value", "ids"), [(3, (3,)), ([1, 2], (1, 2))])
def test_generation_config_says_which_tokens_end_an_output(tmp_path: Path, value: object, ids: tuple[int, ...]) -> None:
    write_json(write_folder(tmp_path) / "generation_config.json", {"eos_token_id": value})

    assert read_config(tmp_path).eos_token_ids == ids


def test_a_generation_config_without_end_tokens_leaves_the_word_to_config_json(tmp_path: Path) -> None:
    write_json(write_folder(tmp_path) / "generation_config.json", {"eos_token_id": None})

    assert read_config(tmp_path).eos_token_ids == (0,)


@pytest.mark.parametrize("kind", ["llama3", "linear", "yarn", "dynamic"])
@pytest.mark.parametrize(("section", "name"), [("rope_scaling", "type"), ("rope_parameters", "rope_type")])
def test_scaled_rotary_embeddings_are_refused_by_name(tmp_path: Path, section: str, name: str, kind: str) -> None:
    folder = write_folder(tmp_path, config={section: {name: kind, "factor": 8.0}})

    with pytest.raises(ModelFileBroken, match=rf"config\.json: {section} of type '{kind}' is not supported"):
        read_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; supported: LlamaForCausalLM",
        ),
        ({"architectures": []}, "architecture <none> is not supported"),
        ({"architectures": None}, "architectures is missing"),
        ({"attention_bias": True}, "attention_bias True is not supported; supported: False"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantised with 'awq' are not supported"),
        ({"torch_dtype": "float64"}, "dtype 'float64' is not supported; supported: bfloat16, float16, float32"),
        ({"hidden_size": "32"}, "hidden_size is '32', which is no int"),
        ({"hidden_size": True}, "hidden_size is True, which is no int"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; at least 1"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 7}, "head_dim is 7; rotary embeddings need an even number"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers is 1000000; at most 1024"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is a number beyond every float"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be above 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be above 0"),
        ({"eos_token_id": 6}, r"end-of-sequence token 6 is not in \[0, 6\)"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id or a list of them"),
        ({"eos_token_id": [1, "x"]}, r"eos_token_id is \[1, 'x'\]; it must be"),
    ],
)
def test_a_configuration_that_the_model_cannot_follow_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = write_folder(tmp_path, config=changes)

    with pytest.raises(ModelFileBroken, match=message):
        read_config(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b'{"hidden_size": 32', "not JSON"),
        (b"[]", "a JSON list instead of an object"),
        (b"\xff{}", "not UTF-8"),
        (b"[" * 100_000, "JSON nested too deeply"),
    ],
)
def test_a_damaged_config_is_refused_with_its_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = write_folder(tmp_path) / "config.json"
    path.write_bytes(content)

    with pytest.raises(ModelFileBroken, match=rf"config\.json: {message}.*; fetch it again"):
        read_config(tmp_path)


def test_a_folder_without_config_json_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json; name a Hugging Face folder"):
        read_config(tmp_path)


def test_a_folder_with_gguf_files_asks_to_name_one(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()

    with pytest.raises(ModelNotFound, match=r"has no config\.json; .* name the file itself: a\.gguf, b\.gguf"):
        read_config(tmp_path)
