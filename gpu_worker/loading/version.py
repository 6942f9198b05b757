"""Gives weights a version that is equal for equal weights, wherever and whenever they were stored.

Reads a part of each file and no tensor; what the numbers in it mean is the loaders' business.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_WHOLE_BYTES: Final = 64 << 20  # files up to here are read whole: 0.1 s
_HEAD_BYTES: Final = 16 << 20  # of larger ones: the header, with each tensor's name, shape and place; GGUF's vocabulary
_NUM_PAGES: Final = 256  # evenly spaced over the rest, the last page among them
_PAGE_BYTES: Final = 4096
_DIGEST_BYTES: Final = 8
# Of a Hugging Face folder. What the tokenizer's vocabulary is has a checksum of its own; its template has not.
_CONFIG_PATTERNS: Final = ("config.json", "tokenizer_config.json", "chat_template.jinja")
_WEIGHT_PATTERNS: Final = (*_CONFIG_PATTERNS, "*.safetensors", "*.safetensors.index.json")


def weights_version(path: Path | None, load_format: str, options: Mapping[str, object]) -> str:
    """Return 16 hex digits over a model's files and its loader's options; neither path, owner nor time counts.

    A file of up to 64 MiB counts whole. Of a larger one count its size, its first 16 MiB and 256 pages spread over
    the rest: 17 MiB a file, so 100 GB in 20 files take 340 MB of reading. A retrained or quantised model differs in
    nearly every page; a change of a few numbers in a large file may go unseen. Of a folder count its configuration,
    its chat template and its safetensors files (for random weights not the latter), for other formats every file.
    Raises: OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _add(digest, json.dumps([load_format, dict(sorted(options.items()))], default=str).encode())
    for file in _files(path, load_format):
        if file != path:  # a single file may be called anything
            _add(digest, file.name.encode())
        _add_file(digest, file)
    return digest.hexdigest()


def _files(path: Path | None, load_format: str) -> tuple[Path, ...]:
    if path is None:
        return ()
    if not path.is_dir():
        return (path,)
    patterns = {"safetensors": _WEIGHT_PATTERNS, "dummy": _CONFIG_PATTERNS}.get(load_format, ("*",))
    found = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    return tuple(sorted(found))


def _add_file(digest: "hashlib.blake2b", file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as opened:
        if size <= _WHOLE_BYTES:
            digest.update(opened.read())
            return
        digest.update(opened.read(_HEAD_BYTES))
        for index in range(1, _NUM_PAGES + 1):
            opened.seek(_HEAD_BYTES + (size - _HEAD_BYTES - _PAGE_BYTES) * index // _NUM_PAGES)
            digest.update(opened.read(_PAGE_BYTES))


def _add(digest: "hashlib.blake2b", data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
