"""How a checkpoint wants its tokens chosen: what is read, and what is left out with a warning."""

import logging
from pathlib import Path

import pytest

from gpu_worker.loading.default_sampling import read_generation_config
from gpu_worker.loading.gguf_loader import GgufLoader
from gpu_worker.loading.safetensors_loader import SafetensorsLoader
from plugins.errors import ModelFileBroken
from plugins.types import SamplingParams
from tests.unit.gpu_worker.loading.tiny_files import write_folder, write_gguf, write_json


def generation_config(folder: Path, **values: object) -> SamplingParams:
    write_json(folder / "generation_config.json", values)
    return read_generation_config(folder)


def test_a_folder_without_a_generation_config_has_no_defaults_of_its_own(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == SamplingParams()


def test_the_parameters_of_a_generation_config_are_read_by_our_names(tmp_path: Path) -> None:
    sampling = generation_config(
        tmp_path,
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        max_new_tokens=512,
        eos_token_id=2,
        num_beams=4,
        transformers_version="4.1",
    )

    assert sampling == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1, max_tokens=512
    )


def test_a_model_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    assert generation_config(tmp_path, do_sample=False, temperature=0.7) == SamplingParams(temperature=0.0)


@pytest.mark.parametrize("top_k", [0, None])
def test_a_top_k_of_0_or_null_keeps_all_tokens(tmp_path: Path, top_k: int | None) -> None:
    """Case B005: the value in the file follows the rule of the value in a request."""
    assert generation_config(tmp_path, top_k=top_k) == SamplingParams(top_k=0)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("temperature", -1, "-1"),
        ("temperature", "hot", "of type str"),
        ("temperature", True, "True"),
        ("top_p", 0, "0"),
        ("top_p", float("nan"), "nan"),
        ("top_k", -1, "-1"),
        ("top_k", 1.5, "1.5"),
        ("min_p", float("inf"), "inf"),
        ("repetition_penalty", 0.0, "0.0"),
        ("max_new_tokens", 0, "0"),
        ("max_new_tokens", [1], "of type list"),
    ],
)
def test_a_value_that_no_request_could_have_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, value: object, told: str
) -> None:
    with caplog.at_level(logging.WARNING):
        sampling = generation_config(tmp_path, **{key: value})

    assert sampling == SamplingParams()
    (record,) = caplog.records
    assert record.getMessage() == "default_sampling_ignored"
    assert (record.__dict__["key"], record.__dict__["value"]) == (key, told)


def test_a_generation_config_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[]")

    with pytest.raises(ModelFileBroken, match="generation_config.json: a JSON list instead of an object"):
        read_generation_config(tmp_path)


def test_the_loader_of_folders_tells_them(tmp_path: Path) -> None:
    write_json(write_folder(tmp_path) / "generation_config.json", {"temperature": 0.6})

    assert SafetensorsLoader(tmp_path, {}).default_sampling() == SamplingParams(temperature=0.6)


def test_the_loader_of_gguf_files_tells_those_of_the_metadata(tmp_path: Path) -> None:
    metadata = {
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 40,
        "general.sampling.top_p": 0.9,
        "general.sampling.min_p": 0.05,
        "general.sampling.penalty_repeat": 1.1,
        "general.sampling.mirostat": 2,
    }

    sampling = GgufLoader(write_gguf(tmp_path / "tiny.gguf", metadata=metadata), {}).default_sampling()

    assert sampling == SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1)


def test_a_gguf_file_without_such_metadata_has_no_defaults(tmp_path: Path) -> None:
    assert GgufLoader(write_gguf(tmp_path / "tiny.gguf"), {}).default_sampling() == SamplingParams()
