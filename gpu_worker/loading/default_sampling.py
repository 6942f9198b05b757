"""How a checkpoint wants its tokens chosen, as the files of the two formats say it.

A value that no request could have is left out with a warning: the model is served all the same.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from gpu_worker.loading.gguf_file import GgufFile
from gpu_worker.loading.json_file import read_json
from plugins.sampling_ranges import RANGES, told
from plugins.types import SamplingParams

logger = logging.getLogger(__name__)

# What the files call a parameter, and what we do. Other keys belong to methods that are not had here.
_HUGGING_FACE: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def read_generation_config(folder: Path) -> SamplingParams:
    """Read generation_config.json, if there is one. Raises: ModelFileBroken: it is no JSON object."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingParams()
    values = dict(read_json(path).values)
    if values.get("do_sample") is False:
        values["temperature"] = 0.0  # whatever is written there: it is not used then
    return _read(path, values, _HUGGING_FACE)


def read_gguf_sampling(file: GgufFile) -> SamplingParams:
    """Read the metadata of a GGUF file that says how to sample."""
    values = {key: _shortest(file.metadata[key]) for key in _GGUF if key in file.metadata}
    return _read(file.path, values, _GGUF)


def _read(path: Path, values: Mapping[str, object], names: Mapping[str, str]) -> SamplingParams:
    """Take the values that have a name here; null says nothing."""
    taken: dict[str, object] = {}
    for key, name in names.items():
        value = values.get(key)
        if value is None:
            continue
        allowed = RANGES[name]
        if allowed.fault(value) is not None:
            event = {"path": str(path), "key": key, "value": told(value), "rule": allowed.rule}
            logger.warning("default_sampling_ignored", extra=event)
        else:
            taken[name] = value
    return SamplingParams(**taken)  # type: ignore[arg-type]  # the ranges are of each field's type


def _shortest(value: object) -> object:
    """Return the shortest decimal that is the same float32: 0.7, where the file's bits read 0.699999988."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
