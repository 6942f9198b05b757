"""Derives the chart's schema of `config` from the configuration's dataclasses.

`python -m tests.chart.config_schema` writes it into values.schema.json; a test holds that the two are equal.
"""

import dataclasses
import json
import types
import typing
from typing import Any

from control_plane.config import find_sections, is_secret
from control_plane.logs import FORMATS, LEVELS
from gpu_worker.config import DTYPES
from plugins.errors import InvalidConfig
from tests.architecture.sources import ROOT

SCHEMA = ROOT / "helm/dihedral/values.schema.json"
# Where pods listen and find each other is known to the chart alone, and a pod reads only its own section.
SET_BY_THE_CHART = {("server", "host"), ("worker", "host"), ("metrics", "host"), ("workers", "address")}
# What its templates read must be there.
READ_BY_THE_CHART = {
    ("server", "port"),
    ("server", "drain_s"),
    ("worker", "port"),
    ("metrics", "port"),
    ("metrics", "enabled"),
}
CHOICES = {("worker", "dtype"): DTYPES, ("log", "level"): LEVELS, ("log", "format"): FORMATS}
MAX_COLUMNS = 100
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null"}


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of the value `config`: every section and key, and no other."""
    sections = {name: section_schema(name, kind) for name, kind in find_sections().items()}
    return {
        "type": "object",
        "additionalProperties": False,
        "required": sorted(sections),
        "properties": dict(sorted(sections.items())),
    }


def section_schema(name: str, kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    keys = [
        field.name
        for field in dataclasses.fields(kind)
        if (name, field.name) not in SET_BY_THE_CHART and not is_secret(field)  # a ConfigMap is no place for secrets
    ]
    schema: dict[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {key: value_schema(hints[key]) | bound(kind, key, hints[key]) for key in sorted(keys)},
    }
    for key in keys:
        if (name, key) in CHOICES:
            schema["properties"][key] = {"enum": list(CHOICES[name, key])}
    if "port" in keys:
        schema["properties"]["port"] = {"type": "integer", "minimum": 1, "maximum": 65535}  # services must know it
    if needed := sorted(key for key in keys if (name, key) in READ_BY_THE_CHART):
        schema["required"] = needed
    return schema


def value_schema(hint: Any) -> dict[str, Any]:
    """Return the schema of one key. A type that no case covers is a KeyError: say here how YAML writes it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (tuple, list):
        return {"type": "array", "items": value_schema(arguments[0])}
    if origin in (types.UnionType, typing.Union):
        return {"type": [TYPES[argument] for argument in arguments]}
    return {"type": TYPES[hint]}


def bound(kind: type[Any], key: str, hint: Any) -> dict[str, float]:
    """Return the least value of a number, if it is 0 or above it: what the section itself refuses tells."""
    number = {int, float}.intersection({hint, *typing.get_args(hint)})
    if not number or not is_refused(kind, key, -1):
        return {}
    if not is_refused(kind, key, 0):
        return {"minimum": 0}
    return {"minimum": 1} if number == {int} else {"exclusiveMinimum": 0}


def is_refused(kind: type[Any], key: str, value: object) -> bool:
    try:
        kind(**{key: value})
    except InvalidConfig:
        return True
    return False


def main() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["properties"]["config"] = config_schema()
    SCHEMA.write_text(written(schema) + "\n", encoding="utf-8")


def written(value: Any, indent: str = "") -> str:
    """Write JSON, an object or list that fits on a line on one, because there are hundreds of small ones."""
    line = json.dumps(value)
    if len(indent + line) <= MAX_COLUMNS or not isinstance(value, dict | list):
        return line
    inner = indent + "  "
    if isinstance(value, list):
        items = [written(each, inner) for each in value]
    else:
        items = [f"{json.dumps(key)}: {written(each, inner)}" for key, each in value.items()]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"


if __name__ == "__main__":
    main()
