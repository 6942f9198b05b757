"""A Hugging Face folder's weights: whole, in shards, and damaged in each way that a download can be."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from gpu_worker.loading.safetensors_file import read_header
from gpu_worker.loading.safetensors_loader import SafetensorsLoader
from plugins.errors import InvalidConfig, ModelFileBroken, ModelNotFound
from tests.unit.gpu_worker.loading.tiny_files import tiny_weights, write_folder, write_json


def test_weights_come_as_they_are_stored(tmp_path: Path) -> None:
    stored = {name: weight.bfloat16() for name, weight in tiny_weights().items()}
    loader = SafetensorsLoader(write_folder(tmp_path, weights=stored), {})

    weights = dict(loader.weights())

    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)
    assert loader.num_tensors() == 11
    assert loader.config().dtype == "bfloat16"


def test_the_weights_themselves_say_which_dtype_they_have(tmp_path: Path) -> None:
    loader = SafetensorsLoader(write_folder(tmp_path, config={"torch_dtype": "bfloat16"}), {})

    assert loader.config().dtype == "float32"


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    loader = SafetensorsLoader(folder, {})

    weights = dict(loader.weights())

    expected = tiny_weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert loader.num_tensors() == 11


def test_a_head_that_repeats_the_embedding_is_left_out(tmp_path: Path) -> None:
    weights = tiny_weights()
    stored = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    loader = SafetensorsLoader(write_folder(tmp_path, weights=stored), {})

    assert "lm_head.weight" not in dict(loader.weights())
    assert loader.num_tensors() == 11


def test_a_head_of_its_own_is_loaded(tmp_path: Path) -> None:
    head = torch.ones(6, 32)
    folder = write_folder(
        tmp_path, config={"tie_word_embeddings": False}, weights=tiny_weights() | {"lm_head.weight": head}
    )

    assert torch.equal(dict(SafetensorsLoader(folder, {}).weights())["lm_head.weight"], head)


def test_a_missing_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    weights = tiny_weights()
    del weights["model.layers.0.self_attn.k_proj.weight"]
    folder = write_folder(tmp_path, weights=weights)

    with pytest.raises(
        ModelFileBroken,
        match=r"model\.safetensors: tensor model\.layers\.0\.self_attn\.k_proj\.weight is missing \(1 of 11 are\)",
    ):
        SafetensorsLoader(folder, {})


def test_a_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    weights = tiny_weights() | {"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 32)}
    folder = write_folder(tmp_path, weights=weights)

    with pytest.raises(
        ModelFileBroken, match=r"mlp\.down_proj\.weight has shape \[64, 32\]; the configuration implies \[32, 64\]"
    ):
        SafetensorsLoader(folder, {})


def test_a_bias_that_the_model_would_not_use_is_refused(tmp_path: Path) -> None:
    weights = tiny_weights() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    folder = write_folder(tmp_path, weights=weights)

    with pytest.raises(ModelFileBroken, match=r"q_proj\.bias is no part of LlamaForCausalLM"):
        SafetensorsLoader(folder, {})


def test_frequencies_written_by_old_versions_of_transformers_are_ignored(tmp_path: Path) -> None:
    weights = tiny_weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    loader = SafetensorsLoader(write_folder(tmp_path, weights=weights), {})

    assert len(dict(loader.weights())) == loader.num_tensors() == 11


def test_a_file_cut_inside_a_tensor_names_the_tensor_and_where_it_lies(tmp_path: Path) -> None:
    path = write_folder(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])

    with pytest.raises(ModelFileBroken) as caught:
        SafetensorsLoader(tmp_path, {})

    last = "model.norm.weight"  # 32 numbers of 4 bytes, the last ones of the file
    assert str(caught.value) == (
        f"{path}: cut off inside tensor {last}: it lies at bytes [{len(whole) - 128}, {len(whole)}), "
        f"the file has {len(whole) - 100}; fetch it again"
    )


def test_a_file_cut_inside_its_header_is_refused_with_both_lengths(tmp_path: Path) -> None:
    path = write_folder(tmp_path) / "model.safetensors"
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    path.write_bytes(path.read_bytes()[:200])

    with pytest.raises(
        ModelFileBroken, match=rf"cut off inside the header: it takes {header_bytes + 8} bytes, the file has 200"
    ):
        SafetensorsLoader(tmp_path, {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"not a safetensors file \(0 bytes\)"),
        (b"version https://git-lfs.github.com/spec/v1", "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "the header is a JSON list instead of an object"),
        ((3).to_bytes(8, "little") + b'{"a', "the header is not JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "the header is not UTF-8"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "the header's entry of tensor a is damaged"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = write_folder(tmp_path) / "model.safetensors"
    path.write_bytes(content)

    with pytest.raises(ModelFileBroken, match=message):
        SafetensorsLoader(tmp_path, {})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]},
            "tensor a has element type F8_E4M3; supported: BF16",
        ),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, r"tensor a of shape \[2\] needs 8 bytes, .* \[0, 4\)"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, r"needs 8 bytes, its entry says \[-8, 0\)"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "entry of tensor a is damaged"),
        ({"dtype": "F32", "shape": [2]}, "entry of tensor a is damaged"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(tmp_path: Path, entry: dict[str, object], message: str) -> None:
    path = tmp_path / "odd.safetensors"
    header = json.dumps({"a": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))

    with pytest.raises(ModelFileBroken, match=message):
        read_header(path)


@given(place=st.integers(0, 1500), byte=st.integers(0, 255))
def test_a_damaged_header_gives_our_error_or_is_still_whole(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    save_file(tiny_weights(), path)
    content = bytearray(path.read_bytes())
    content[place] = byte
    path.write_bytes(content)

    try:
        tensors = read_header(path)
    except ModelFileBroken as error:
        assert str(path) in str(error)
    else:
        assert len(tensors) <= 11


def test_bytes_that_belong_to_no_tensor_are_refused_when_weights_are_read(tmp_path: Path) -> None:
    path = write_folder(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(8))
    loader = SafetensorsLoader(tmp_path, {})

    with pytest.raises(ModelFileBroken, match=r"model\.safetensors: .*; fetch it again"):
        list(loader.weights())


def test_a_missing_shard_is_named_with_a_tensor_of_it(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    (folder / "model-2.safetensors").unlink()

    with pytest.raises(
        ModelFileBroken, match=r"model-2\.safetensors: this shard is missing, and with it tensor model\.norm\.weight"
    ):
        SafetensorsLoader(folder, {})


def test_a_shard_that_vanishes_before_it_is_read_is_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    loader = SafetensorsLoader(folder, {})
    (folder / "model-2.safetensors").unlink()

    with pytest.raises(ModelFileBroken, match=r"model-2\.safetensors: No such file or directory"):
        list(loader.weights())


def test_a_shard_without_a_tensor_that_the_index_places_there_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    save_file({"other": torch.zeros(1)}, folder / "model-2.safetensors")

    with pytest.raises(ModelFileBroken, match=r"model-2\.safetensors: tensor model\.norm\.weight is missing, which"):
        SafetensorsLoader(folder, {})


def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "../other/model.safetensors"}})

    with pytest.raises(ModelFileBroken, match=r"tensor a is in '\.\./other/model\.safetensors', which is no file name"):
        SafetensorsLoader(folder, {})


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(ModelNotFound, match=r"has neither model\.safetensors nor .* pickled weights .* are never read"):
        SafetensorsLoader(folder, {})


def test_the_loader_needs_a_folder(tmp_path: Path) -> None:
    for path in (None, write_folder(tmp_path) / "model.safetensors"):
        with pytest.raises(InvalidConfig, match="load_format safetensors needs a Hugging Face folder"):
            SafetensorsLoader(path, {})


def write_shards(folder: Path) -> Path:
    """The tiny model in two files: the final norm in the second, all else in the first."""
    write_folder(folder)
    (folder / "model.safetensors").unlink()
    weights = tiny_weights()
    save_file({"model.norm.weight": weights["model.norm.weight"]}, folder / "model-2.safetensors")
    places = {name: "model-2.safetensors" if name == "model.norm.weight" else "model-1.safetensors" for name in weights}
    del weights["model.norm.weight"]
    save_file(weights, folder / "model-1.safetensors")
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    return folder
