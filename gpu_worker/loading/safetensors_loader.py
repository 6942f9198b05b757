"""Loads a model from a Hugging Face folder: config.json, safetensors files, tokenizer files.

Pickled weights are never read. What the JSON files say is the business of `hf_config` and `hf_tokenizer`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.loading.checkpoint import check_tensors, is_ignored, refuse_options
from gpu_worker.loading.default_sampling import read_generation_config
from gpu_worker.loading.hf_config import read_config
from gpu_worker.loading.hf_tokenizer import read_tokenizer
from gpu_worker.loading.json_file import read_json
from gpu_worker.loading.safetensors_file import StoredTensor, read_header
from plugins.errors import InvalidConfig, ModelFileBroken, ModelNotFound
from plugins.model_loader import ModelConfig, ModelLoader, register_model_loader
from plugins.types import SamplingParams, TokenizerBundle

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@register_model_loader("safetensors")
class SafetensorsLoader(ModelLoader):
    """One Hugging Face folder. All headers are read and compared with the architecture at construction."""

    def __init__(self, path: Path | None, options: Mapping[str, object]) -> None:
        refuse_options("safetensors", options)
        if path is None or not path.is_dir():
            raise InvalidConfig(f"load_format safetensors needs a Hugging Face folder; {path} is none")
        self._folder = path
        config = read_config(path)
        where, self._shards, stored = _find_tensors(path)
        check_tensors(where, config, {name: tensor.shape for name, tensor in stored.items()})
        self._config = replace(config, dtype=stored["model.embed_tokens.weight"].dtype)

    def config(self) -> ModelConfig:
        return self._config

    def tokenizer(self) -> TokenizerBundle:
        return read_tokenizer(self._folder)

    def default_sampling(self) -> SamplingParams:
        return read_generation_config(self._folder)

    def num_tensors(self) -> int:
        return sum(not is_ignored(name, self._config) for names in self._shards.values() for name in names)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors as they are stored, shard by shard."""
        for path, names in self._shards.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        if not is_ignored(name, self._config):
                            yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:  # neither carries the file's name
                raise ModelFileBroken(f"{path}: {error}; fetch it again") from error


def _find_tensors(folder: Path) -> tuple[Path, Mapping[Path, tuple[str, ...]], Mapping[str, StoredTensor]]:
    """Return the file that lists the tensors, the names by shard, and what is stored under each name."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        stored = read_header(single)
        return single, {single: tuple(stored)}, stored
    if not index.is_file():
        raise ModelNotFound(
            f"{folder}: has neither {_SINGLE} nor {_INDEX}; pickled weights (.bin, .pt) are never read: "
            "save the model with safetensors"
        )
    return index, *_read_shards(index)


def _read_shards(index: Path) -> tuple[Mapping[Path, tuple[str, ...]], Mapping[str, StoredTensor]]:
    shards: dict[Path, list[str]] = {}
    for name, file_name in read_json(index).get("weight_map", dict).items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelFileBroken(f"{index}: tensor {name} is in {file_name!r}, which is no file name of this folder")
        shards.setdefault(index.parent / file_name, []).append(name)
    stored: dict[str, StoredTensor] = {}
    for path, names in shards.items():
        if not path.is_file():
            raise ModelFileBroken(f"{path}: this shard is missing, and with it tensor {names[0]}; fetch it again")
        header = read_header(path)
        for name in names:
            if name not in header:
                raise ModelFileBroken(f"{path}: tensor {name} is missing, which {index.name} places here")
            stored[name] = header[name]
    return {path: tuple(names) for path, names in shards.items()}, stored
