"""Writes the figures of one benchmark: a file that people can read and compare, one line for each run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write a JSON object with a line for each key, and for each entry of a list or of an object that is a value."""
    lines = [f" {json.dumps(key)}: {_spread(value)}" for key, value in results.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _spread(value: object) -> str:
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
    return json.dumps(value)
