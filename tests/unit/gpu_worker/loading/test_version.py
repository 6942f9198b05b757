"""The version of weights: equal for equal weights, another for others."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpu_worker.config import WorkerConfig
from gpu_worker.loading.open import find_model, version_of
from gpu_worker.loading.version import weights_version
from plugins.errors import ModelFileBroken
from tests.unit.gpu_worker.loading.tiny_files import write_folder, write_gguf

MIB = 1 << 20


def folder_version(folder: Path) -> str:
    return weights_version(folder, "safetensors", {})


def sparse_file(path: Path, size: int, written: Mapping[int, bytes]) -> Path:
    """A large file that takes no room: zeros, but for what is written at some places."""
    with path.open("wb") as file:
        file.truncate(size)
        for offset, data in written.items():
            file.seek(offset)
            file.write(data)
    return path


def test_a_version_is_sixteen_hex_digits(tmp_path: Path) -> None:
    version = folder_version(write_folder(tmp_path / "m"))

    assert len(version) == 16
    assert set(version) <= set("0123456789abcdef")


def test_equal_files_have_one_version_whatever_folder_time_or_readme_they_come_with(tmp_path: Path) -> None:
    first, second = write_folder(tmp_path / "m"), write_folder(tmp_path / "elsewhere")
    os.utime(second / "model.safetensors", (1, 1))
    (second / "README.md").write_text("a card")
    (second / "tokenizer.json").write_text("told by its own checksum")

    assert folder_version(first) == folder_version(second)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_other_byte_of_weights_or_configuration_is_another_version(tmp_path: Path, name: str) -> None:
    first, second = write_folder(tmp_path / "m"), write_folder(tmp_path / "n")
    with (second / name).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b" ")

    assert folder_version(first) != folder_version(second)


def test_another_chat_template_is_another_version(tmp_path: Path) -> None:
    first, second = write_folder(tmp_path / "m"), write_folder(tmp_path / "n")
    (second / "chat_template.jinja").write_text("{{ messages }}")

    assert folder_version(first) != folder_version(second)


def test_a_single_file_may_be_called_anything(tmp_path: Path) -> None:
    first, second = write_gguf(tmp_path / "m.gguf"), write_gguf(tmp_path / "n.gguf")

    assert version_of(find_model(WorkerConfig(model=str(first)))) == version_of(
        find_model(WorkerConfig(model=str(second)))
    )


def test_a_large_file_counts_by_size_head_and_pages_to_the_last_one(tmp_path: Path) -> None:
    size = 100 * MIB
    files = [
        sparse_file(tmp_path / "zeros", size, {}),
        sparse_file(tmp_path / "longer", size + 1, {}),
        sparse_file(tmp_path / "head", size, {15 * MIB: b"x"}),
        sparse_file(tmp_path / "last", size, {size - 1: b"x"}),
        sparse_file(tmp_path / "layer", size, {50 * MIB: b"x" * MIB}),
    ]

    versions = {weights_version(file, "gguf", {}) for file in files}

    assert len(versions) == 5


def test_random_weights_differ_by_seed_and_by_shape(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    configs = [
        WorkerConfig(load_format="dummy"),
        WorkerConfig(load_format="dummy", seed=1),
        WorkerConfig(load_format="dummy", model=str(folder)),
    ]

    versions = [version_of(find_model(config)) for config in configs]
    (folder / "model.safetensors").unlink()

    assert len(set(versions)) == 3
    assert version_of(find_model(configs[2])) == versions[2]


def test_of_another_formats_folder_every_file_counts(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"1")
    before = weights_version(folder, "mine", {})
    (folder / "more.bin").write_bytes(b"2")

    assert weights_version(folder, "mine", {}) != before


def test_a_file_that_has_gone_is_told_by_name(tmp_path: Path) -> None:
    found = find_model(WorkerConfig(model=str(write_gguf(tmp_path / "m.gguf"))))
    (tmp_path / "m.gguf").unlink()

    with pytest.raises(ModelFileBroken, match=r"m\.gguf: cannot be read"):
        version_of(found)
