"""Reads the header of a safetensors file and checks that the file holds all that the header promises.

Reading tensors is the `safetensors` package's business; its errors for a damaged file name neither file nor tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gpu_worker.loading.json_file import parse_object
from plugins.errors import ModelFileBroken

_LENGTH_BYTES = 8  # the header's length, little-endian, comes first
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}  # name there -> ours, bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a header. The tensor lies inside the file."""

    dtype: str  # bfloat16, float16, float32
    shape: tuple[int, ...]


def read_header(path: Path) -> Mapping[str, StoredTensor]:
    """Return all tensors of a file by name.

    Raises: ModelFileBroken: the file is not safetensors, is damaged, or ends before its last tensor does.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + length
        if size < _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
            raise ModelFileBroken(f"{path}: not a safetensors file ({size} bytes); fetch it again")
        if start > size:
            raise ModelFileBroken(
                f"{path}: cut off inside the header: it takes {start} bytes, the file has {size}; fetch it again"
            )
        try:
            entries = parse_object(file.read(length))
        except ValueError as error:
            raise ModelFileBroken(f"{path}: the header is {error}; fetch the file again") from error
    entries.pop("__metadata__", None)
    return {name: _check_entry(path, name, entry, start, size) for name, entry in entries.items()}


def _check_entry(path: Path, name: str, entry: object, start: int, size: int) -> StoredTensor:
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
            isinstance(length, int) and length >= 0 for length in shape
        ):
            pass
        case _:
            raise ModelFileBroken(f"{path}: the header's entry of tensor {name} is damaged; fetch the file again")
    if code not in _DTYPES:
        raise ModelFileBroken(f"{path}: tensor {name} has element type {code}; supported: {', '.join(sorted(_DTYPES))}")
    dtype, item_bytes = _DTYPES[code]
    if end - begin != prod(shape) * item_bytes or begin < 0:
        raise ModelFileBroken(
            f"{path}: tensor {name} of shape {shape} needs {prod(shape) * item_bytes} bytes, "
            f"its entry says [{begin}, {end}); fetch the file again"
        )
    if start + end > size:
        raise ModelFileBroken(
            f"{path}: cut off inside tensor {name}: it lies at bytes [{start + begin}, {start + end}), "
            f"the file has {size}; fetch it again"
        )
    return StoredTensor(dtype, tuple(shape))
