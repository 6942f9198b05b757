"""Fetches a model from the Hugging Face hub, when the configuration names one by its hub id."""

import re
from pathlib import Path

from plugins.errors import ModelNotFound

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt")  # no code, no pickles
_NOT_FILES = ("*/*", "consolidated*")  # other layouts of the same weights


def is_hub_id(model: str) -> bool:
    """Say whether a name has the form of a hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith(".gguf")


def fetch(hub_id: str) -> Path:
    """Return the local folder of a hub model, downloaded now or before.

    Raises: ModelNotFound: it is not in the cache, and the hub does not answer, does not have it, or is switched off.
    """
    from huggingface_hub import constants, snapshot_download  # imported here: most starts need no hub

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_FILES), ignore_patterns=list(_NOT_FILES)))
    except (
        Exception
    ) as error:  # the client raises its own errors, the transport's and the system's, without a common base
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set and it is not in the cache; unset it to download"
        else:
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ModelNotFound(
            f"model {hub_id!r} is no local path and cannot be had from the hub ({why}); name a local file or folder"
        ) from error
