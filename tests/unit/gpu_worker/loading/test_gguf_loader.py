"""A GGUF file becomes numbers, named weights in Hugging Face's layout, and clear refusals."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from gpu_worker.loading.gguf_loader import GgufLoader
from plugins.errors import InvalidConfig, ModelFileBroken
from plugins.model_loader import ModelConfig
from plugins.types import TokenId
from tests.unit.gpu_worker.loading.tiny_files import METADATA, gguf_tensors, tiny_weights, write_gguf


def test_numbers_come_from_the_metadata(tmp_path: Path) -> None:
    loader = GgufLoader(write_gguf(tmp_path / "tiny.gguf"), {})

    assert loader.config() == ModelConfig(
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
        dtype="float32",
        eos_token_ids=(TokenId(0),),
    )


def test_weights_have_hugging_face_names_and_row_order(tmp_path: Path) -> None:
    """The file is written with llama.cpp's own permutation of query and key rows."""
    loader = GgufLoader(write_gguf(tmp_path / "tiny.gguf"), {})

    weights = dict(loader.weights())

    expected = tiny_weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert loader.num_tensors() == 11


@pytest.mark.parametrize(
    ("kind", "largest_error"),
    [
        (GGMLQuantizationType.BF16, 0.01),  # 8 bits of mantissa, numbers up to 4
        (GGMLQuantizationType.F16, 0.001),  # 11 bits
        (GGMLQuantizationType.Q8_0, 0.02),  # half of the largest number, 4, over 127
        (GGMLQuantizationType.Q4_1, 0.25),  # half of the range, 8, over 15
    ],
)
def test_packed_weights_come_out_as_float32_near_what_was_packed(
    tmp_path: Path, kind: GGMLQuantizationType, largest_error: float
) -> None:
    loader = GgufLoader(write_gguf(tmp_path / "packed.gguf", kind=kind), {})

    weights = dict(loader.weights())

    for name, expected in tiny_weights().items():
        assert weights[name].dtype == torch.float32
        assert (weights[name] - expected).abs().max() <= largest_error


def test_a_head_of_its_own_is_loaded_and_unties_the_embedding(tmp_path: Path) -> None:
    head = torch.arange(6 * 32, dtype=torch.float32).view(6, 32)
    tensors = gguf_tensors(tiny_weights()) | {"output.weight": head.numpy()}
    loader = GgufLoader(write_gguf(tmp_path / "untied.gguf", tensors=tensors), {})

    assert loader.config().tie_word_embeddings is False
    assert torch.equal(dict(loader.weights())["lm_head.weight"], head)


def test_a_weight_may_be_written_to_without_changing_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    before = path.read_bytes()

    for _, weight in GgufLoader(path, {}).weights():
        weight.zero_()

    assert path.read_bytes() == before


def test_an_end_of_turn_token_ends_outputs_too(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 5}

    loader = GgufLoader(write_gguf(tmp_path / "turns.gguf", metadata=metadata), {})

    assert loader.config().eos_token_ids == (0, 5)


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "mamba.gguf", architecture="mamba")

    with pytest.raises(ModelFileBroken, match=r"mamba\.gguf: architecture 'mamba' is not supported; supported: llama"):
        GgufLoader(path, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"llama.expert_count": 8}, "a mixture of 8 experts is not supported"),
        ({"llama.rope.dimension_count": 4}, r"llama\.rope\.dimension_count is 4, the head dimension 8"),
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, r"num_attention_heads \(4\) is not a multiple of .* \(3\)"),
        ({"llama.block_count": 4000000000}, "num_hidden_layers is 4000000000"),
        ({"llama.context_length": "long"}, r"llama\.context_length is a str, not a int"),
        ({"tokenizer.ggml.eos_token_id": 6}, r"end-of-sequence token 6 is not in \[0, 6\)"),
    ],
)
def test_metadata_that_the_model_cannot_follow_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = write_gguf(tmp_path / "odd.gguf", metadata=changes)

    with pytest.raises(ModelFileBroken, match=message):
        GgufLoader(path, {})


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "bare.gguf", without=["llama.context_length"])

    with pytest.raises(ModelFileBroken, match=r"bare\.gguf: metadata has no llama\.context_length"):
        GgufLoader(path, {})


def test_a_missing_tensor_is_named_as_the_checkpoint_names_it(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_weights())
    del tensors["blk.0.ffn_up.weight"]
    path = write_gguf(tmp_path / "holes.gguf", tensors=tensors)

    with pytest.raises(ModelFileBroken, match=r"holes\.gguf: tensor model\.layers\.0\.mlp\.up_proj\.weight is missing"):
        GgufLoader(path, {})


def test_a_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_weights())
    tensors["output_norm.weight"] = tensors["output_norm.weight"][:16]
    path = write_gguf(tmp_path / "short.gguf", tensors=tensors)

    with pytest.raises(
        ModelFileBroken, match=r"model\.norm\.weight has shape \[16\]; the configuration implies \[32\]"
    ):
        GgufLoader(path, {})


def test_a_tensor_that_the_model_would_not_use_is_refused(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_weights())
    tensors["blk.0.attn_q.bias"] = tensors["output_norm.weight"]
    path = write_gguf(tmp_path / "biased.gguf", tensors=tensors)

    with pytest.raises(ModelFileBroken, match=r"tensor blk\.0\.attn_q\.bias is no part of LlamaForCausalLM"):
        GgufLoader(path, {})


def test_scaled_rotary_embeddings_are_refused_by_their_tensor(tmp_path: Path) -> None:
    tensors = gguf_tensors(tiny_weights())
    tensors["rope_freqs.weight"] = tensors["output_norm.weight"]
    path = write_gguf(tmp_path / "scaled.gguf", tensors=tensors)

    with pytest.raises(ModelFileBroken, match=r"rope scaling by the tensor rope_freqs\.weight is not supported"):
        GgufLoader(path, {})


def test_a_type_that_cannot_be_unpacked_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    """Type 24 is int8 without scales: the file is whole, and its numbers mean nothing as weights."""
    path = write_gguf(tmp_path / "int8.gguf")
    entry = b"output_norm.weight" + (1).to_bytes(4, "little") + (32).to_bytes(8, "little")
    content = path.read_bytes()
    place = content.index(entry) + len(entry)
    path.write_bytes(content[:place] + (24).to_bytes(4, "little") + content[place + 4 :])

    with pytest.raises(ModelFileBroken, match=r"tensor output_norm\.weight has type I8, which cannot be read"):
        GgufLoader(path, {})


def test_a_folder_is_no_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="load_format gguf needs a .gguf file"):
        GgufLoader(tmp_path, {})


def test_an_option_that_the_loader_does_not_have_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")

    with pytest.raises(InvalidConfig, match="load_format gguf has no option 'speed'; known: <none>"):
        GgufLoader(path, {"speed": 2})


def test_metadata_without_a_size_of_the_vocabulary_takes_the_number_of_tokens(tmp_path: Path) -> None:
    assert "llama.vocab_size" not in METADATA

    loader = GgufLoader(write_gguf(tmp_path / "tiny.gguf"), {})

    assert loader.config().vocab_size == 6
