"""Opens the model that the configuration names: decides where it lies, in which format, and what it is called.

What a format means is its loader's business.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gpu_worker.config import WorkerConfig
from gpu_worker.loading import dummy_loader, embedded, gguf_loader, safetensors_loader  # noqa: F401  loaders register
from gpu_worker.loading.gguf_file import MAGIC
from gpu_worker.loading.hub import fetch, is_hub_id
from gpu_worker.loading.version import weights_version
from plugins.errors import InvalidConfig, ModelFileBroken, ModelNotFound
from plugins.model_loader import MODEL_LOADERS, ModelLoader

_AUTO, _DUMMY, _GGUF, _SAFETENSORS = "auto", "dummy", "gguf", "safetensors"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """Where a model lies, what reads it, and what it is called."""

    path: Path | None  # None: it needs no file
    load_format: str  # a registered one
    options: Mapping[str, object]  # for its loader
    name: str  # what requests call it by


def find_model(config: WorkerConfig) -> FoundModel:
    """Decide which model the configuration means. Reads no more of it than tells its format.

    Raises: ModelNotFound: it is not there, or may not be read. InvalidConfig: load_format is unknown or does not fit.
    """
    load_format = config.load_format.lower()
    if load_format != _AUTO and load_format not in MODEL_LOADERS.names():
        known = ", ".join((_AUTO, *MODEL_LOADERS.names()))
        raise InvalidConfig(f"worker.load_format {config.load_format!r} is unknown; known: {known}")
    with _finding():
        path, name = _locate(config.model, load_format)
        if load_format == _AUTO:
            load_format = _format_of(path)
    options = {"seed": config.seed} if load_format == _DUMMY else {}
    return FoundModel(path, load_format, options, config.served_model_name or name)


def open_found(found: FoundModel) -> ModelLoader:
    """Open a model's checkpoint. Raises: ModelNotFound: it may not be read. ModelFileBroken: it is damaged."""
    with _finding():
        return MODEL_LOADERS.get(found.load_format)(found.path, found.options)


def open_model(config: WorkerConfig) -> tuple[ModelLoader, str]:
    """Return the opened checkpoint and the name that requests call it by. Raises: as the two functions above."""
    found = find_model(config)
    return open_found(found), found.name


def version_of(found: FoundModel) -> str:
    """Return the version of a model's weights. Raises: ModelFileBroken: the system refuses a file, or it has gone."""
    with reading():
        return weights_version(found.path, found.load_format, found.options)


@contextmanager
def _finding() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # such as a volume whose files belong to somebody else
        raise ModelNotFound(_why(error)) from error


@contextmanager
def reading() -> Iterator[None]:
    """Hold while an opened loader reads. Raises: ModelFileBroken: the system refuses a file, or it has gone."""
    try:
        yield
    except OSError as error:
        raise ModelFileBroken(_why(error)) from error


def read_weights(loader: ModelLoader) -> Iterator[tuple[str, Tensor]]:
    """Yield a loader's weights. Raises: ModelFileBroken, as `reading` does; the taker's own errors pass."""
    with reading():
        yield from loader.weights()


def _why(error: OSError) -> str:
    where, why = error.filename or "a file of the model", error.strerror or error
    return f"{where}: cannot be read: {why}; check its owner and mode"


def unnamed_model(load_format: str) -> str:
    """Return what the model is called when the configuration names none: the embedded one, or its format's own."""
    return embedded.NAME if load_format.lower() in (_AUTO, _GGUF) else load_format.lower()


def _locate(model: str | None, load_format: str) -> tuple[Path | None, str]:
    """Return where the model lies, None if it needs no file, and its name."""
    if model is None:
        path = embedded.embedded_model() if load_format in (_AUTO, _GGUF) else None
        return path, unnamed_model(load_format)
    path = Path(model).expanduser()
    if model and path.exists():
        return path, _name_of(path.absolute())
    if is_hub_id(model) and load_format not in (_DUMMY, _GGUF):
        return fetch(model), model.rpartition("/")[2]
    raise ModelNotFound(f"worker.model {model!r}: no such file or folder; name a .gguf file or a Hugging Face folder")


def _name_of(path: Path) -> str:
    """Return the last part of a path. A folder keeps its dots: they belong to names such as Llama-3.1-8B."""
    return path.stem if path.is_file() else path.name


def _format_of(path: Path | None) -> str:
    if path is None or path.is_dir():
        return _SAFETENSORS
    if path.suffix.lower() == ".gguf":
        return _GGUF
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return _GGUF
    raise InvalidConfig(
        f"worker.model {str(path)!r} is neither a GGUF file nor a folder; for safetensors name the folder that has "
        "config.json, or choose worker.load_format"
    )
