"""Opens the model that the configuration names: decides where it lies, in which format, and what it is called.

What a format means is its loader's business.
"""

from pathlib import Path

from gpu_worker.config import WorkerConfig
from gpu_worker.loading import dummy_loader, embedded, gguf_loader  # noqa: F401  the loaders register themselves
from plugins.errors import ModelNotFound
from plugins.model_loader import MODEL_LOADERS, ModelLoader

_GGUF = "gguf"


def open_model(config: WorkerConfig) -> tuple[ModelLoader, str]:
    """Return the opened checkpoint and the name that requests call it by.

    Raises: ModelNotFound: it is not there. ModelFileBroken: it is damaged or of an unknown kind.
    InvalidConfig: load_format is unknown or does not fit the model.
    """
    load_format = config.load_format.lower()
    if load_format != "auto":
        MODEL_LOADERS.get(load_format)  # unknown names are told before anything is looked for
    if config.model is None and load_format in ("auto", _GGUF):
        path: Path | None = embedded.embedded_model()
        name = embedded.NAME
    elif config.model is None:
        path, name = None, load_format
    else:
        path = Path(config.model).expanduser()
        if not path.exists():
            raise ModelNotFound(f"model {config.model!r}: no such file or folder")
        name = path.name
    if load_format == "auto":
        load_format = _GGUF
    options = {"seed": config.seed} if load_format == "dummy" else {}
    loader = MODEL_LOADERS.get(load_format)(path, options)
    return loader, config.served_model_name or name
