"""Reads the header of a GGUF file and checks that the file holds all that the header promises.

Knows the container: metadata, tensor names, shapes, places. What the numbers mean is `gguf_loader`'s business. Ids and
sizes of types come from the `gguf` package; its GGUFReader is not used because it needs 2 s for a vocabulary of 49,152
strings (this reader: 0.1 s) and says neither file nor tensor when a file is cut.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeVar

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from plugins.errors import ModelFileBroken

T = TypeVar("T")

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_ENTRIES = 1 << 16  # of the metadata, and of the table of tensors; a model of 1,024 layers has 10,000 tensors
_MAX_ITEMS = 1 << 24  # of one array; a vocabulary has less than a million, and one byte can take 40 of memory
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies in its file."""

    name: str
    shape: tuple[int, ...]  # outermost first, the reverse of the file's order
    kind: GGMLQuantizationType
    offset: int  # of its first byte, from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file's header. Every tensor lies inside the file."""

    path: Path
    metadata: Mapping[str, object]  # int, float, bool, str, or a tuple of one of them
    tensors: tuple[GgufTensor, ...]

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return one value of the metadata.

        Raises: ModelFileBroken: the key is absent and there is no default, or its value is of another type.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelFileBroken(f"{self.path}: metadata has no {key}; a complete conversion of the model has it")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelFileBroken(f"{self.path}: metadata {key} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def get_all(self, key: str, kind: type[T]) -> tuple[T, ...]:
        """Return an array of the metadata, all of one type. Raises: ModelFileBroken, as `get` does."""
        values = self.get(key, tuple)
        if not all(isinstance(value, kind) for value in values):
            raise ModelFileBroken(f"{self.path}: metadata {key} is not an array of {kind.__name__}")
        return values


def read_gguf(path: Path) -> GgufFile:
    """Read a header.

    Raises: ModelFileBroken: the file is not GGUF, is damaged, or ends before its last tensor does.
    """
    size = path.stat().st_size
    if size == 0:
        raise ModelFileBroken(f"{path}: the file is empty; fetch it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        num_tensors, num_values = _read_counts(cursor)
        metadata: dict[str, object] = {}
        for index in range(num_values):
            cursor.place = f"metadata entry {index + 1} of {num_values}"
            key = cursor.text()
            cursor.place = f"metadata {key}"
            metadata[key] = _read_value(cursor)
        infos = [_read_tensor_info(cursor, index, num_tensors) for index in range(num_tensors)]
        start = _data_start(cursor, metadata)
    tensors = tuple(_place(path, info, start, size) for info in infos)
    if len({tensor.name for tensor in tensors}) != num_tensors:
        raise ModelFileBroken(f"{path}: two tensors have the same name; fetch the file again")
    return GgufFile(path, metadata, tensors)


class _Cursor:
    """A place in a mapped file that moves forward and never past the end. `place` says what is being read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.offset = 0
        self.place = "the header"
        self._data = data
        self._size = len(data)

    def advance(self, num_bytes: int) -> int:
        """Step over some bytes and return where they start."""
        start, end = self.offset, self.offset + num_bytes
        if end > self._size:
            raise ModelFileBroken(
                f"{self.path}: cut off inside {self.place}: at byte {start} it needs {num_bytes} bytes more, "
                f"the file has {self._size} bytes; fetch it again"
            )
        self.offset = end
        return start

    def bytes(self, num_bytes: int) -> bytes:
        start = self.advance(num_bytes)
        return self._data[start : self.offset]

    def numbers(self, code: str, count: int) -> tuple[object, ...]:
        layout = f"<{count}{code}"
        return struct.unpack_from(layout, self._data, self.advance(struct.calcsize(f"<{code}") * count))

    def integer(self, code: str) -> int:
        return int.from_bytes(self.bytes(struct.calcsize(f"<{code}")), "little")

    def text(self) -> str:
        try:
            return self.bytes(self.integer("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"holds text that is not UTF-8 ({error.reason})") from error

    def texts(self, count: int) -> tuple[str, ...]:
        return tuple(self.text() for _ in range(count))

    def broken(self, what: str) -> ModelFileBroken:
        return ModelFileBroken(f"{self.path}: {self.place} {what}; fetch the file again")


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.bytes(len(MAGIC))
    if magic != MAGIC:
        raise ModelFileBroken(
            f"{cursor.path}: not a GGUF file: it starts with {magic!r} instead of {MAGIC!r} "
            "(a page or a git-lfs pointer saved in its place?); fetch it again"
        )
    version = cursor.integer("I")
    if version not in _VERSIONS:
        raise ModelFileBroken(
            f"{cursor.path}: GGUF version {version} is not supported; supported: {', '.join(map(str, _VERSIONS))}, "
            "little-endian"
        )
    num_tensors, num_values = cursor.integer("Q"), cursor.integer("Q")
    for count, what in ((num_tensors, "tensors"), (num_values, "metadata entries")):
        if count > _MAX_ENTRIES:
            raise cursor.broken(f"counts {count} {what}, more than {_MAX_ENTRIES}")
    return num_tensors, num_values


def _read_value(cursor: _Cursor) -> object:
    kind = _value_type(cursor)
    if kind is GGUFValueType.STRING:
        return cursor.text()
    if kind is not GGUFValueType.ARRAY:
        return cursor.numbers(_SCALARS[kind], 1)[0]
    item, count = _value_type(cursor), cursor.integer("Q")
    if item is GGUFValueType.ARRAY:
        raise cursor.broken("is an array of arrays, which no supported model has")
    if count > _MAX_ITEMS:
        raise cursor.broken(f"is an array of {count} items, more than {_MAX_ITEMS}")
    if item is GGUFValueType.STRING:
        return cursor.texts(count)
    return cursor.numbers(_SCALARS[item], count)


def _value_type(cursor: _Cursor) -> GGUFValueType:
    number = cursor.integer("I")
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise cursor.broken(f"has the unknown type {number}") from error


def _read_tensor_info(cursor: _Cursor, index: int, num_tensors: int) -> GgufTensor:
    """Read one entry of the table of tensors; its offset is still counted from the start of the data."""
    cursor.place = f"the entry of tensor {index + 1} of {num_tensors}"
    name = cursor.text()
    cursor.place = f"the entry of tensor {name}"
    num_dimensions = cursor.integer("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.broken(f"has {num_dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}")
    shape = tuple(cursor.integer("Q") for _ in range(num_dimensions))[::-1]
    number = cursor.integer("I")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise cursor.broken(f"has the unknown type {number}") from error
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size != 0:
        raise cursor.broken(f"has rows of {shape[-1]} numbers, not a multiple of {kind.name}'s {block_size}")
    return GgufTensor(name, shape, kind, cursor.integer("Q"), prod(shape) // block_size * block_bytes)


def _data_start(cursor: _Cursor, metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelFileBroken(f"{cursor.path}: metadata general.alignment is {alignment!r}, not a positive number")
    return -(-cursor.offset // alignment) * alignment


def _place(path: Path, info: GgufTensor, start: int, size: int) -> GgufTensor:
    """Count a tensor's offset from the start of the file, and check that the file goes on to the tensor's end."""
    offset = start + info.offset
    if offset + info.num_bytes > size:
        raise ModelFileBroken(
            f"{path}: cut off inside tensor {info.name}: it lies at bytes [{offset}, {offset + info.num_bytes}), "
            f"the file has {size}; fetch it again"
        )
    return GgufTensor(info.name, info.shape, info.kind, offset, info.num_bytes)
