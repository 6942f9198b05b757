"""Reads the JSON files of a checkpoint, one typed value at a time, with errors that name file and key."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from plugins.errors import ModelFileBroken

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JsonFile:
    """One JSON object. null and an absent key are the same thing."""

    path: Path
    values: Mapping[str, object]

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return one value; a whole number is accepted as a float.

        Raises: ModelFileBroken: the key is absent and there is no default, or its value is of another type.
        """
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFileBroken(f"{self.path}: {key} is missing")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError as error:
                raise ModelFileBroken(f"{self.path}: {key} is a number beyond every float") from error
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelFileBroken(f"{self.path}: {key} is {value!r}, which is no {kind.__name__}")
        return value


def read_json(path: Path) -> JsonFile:
    """Raises: ModelFileBroken: the file is not one JSON object in UTF-8."""
    try:
        return JsonFile(path, parse_object(path.read_bytes()))
    except ValueError as error:
        raise ModelFileBroken(f"{path}: {error}; fetch it again") from error


def parse_object(text: bytes) -> dict[str, object]:
    """Return a JSON object. Raises: ValueError: the text is something else."""
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} instead of an object")
    return value
