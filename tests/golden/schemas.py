"""Random JSON schemas whose values are short: every string, number and array has its bounds.

The same number gives the same schema everywhere.
"""

import random
from typing import Any, Final

WORDS: Final = ("name", "age", "city", "tags", "note", "price", "color", "items", "owner", "size")


def random_schema(number: int) -> dict[str, Any]:
    """Return an object's schema; every second one has objects in objects in an object, or deeper."""
    draw = random.Random(number)
    return _object(draw, depth=draw.randint(3, 4) if number % 2 else draw.randint(1, 2))


def nesting(schema: dict[str, Any]) -> int:
    """Say how many objects and arrays lie in one another, at most."""
    inner = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else ())]
    own = 1 if schema.get("type") in ("object", "array") else 0
    return own + max(map(nesting, inner), default=0)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randint(1, 3))
    properties = {name: _leaf(draw) for name in names}
    if depth > 1:
        inner = _object(draw, depth - 1)
        properties[names[0]] = inner if draw.random() < 0.7 else _array(inner, 1, 2)
    required = [name for name in names if name == names[0] or draw.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _leaf(draw: random.Random) -> dict[str, Any]:
    match draw.randrange(8):
        case 0:
            return {"type": "string", "maxLength": draw.randint(1, 12)}
        case 1:
            return {"type": "integer", "minimum": draw.randint(-9, 0), "maximum": draw.randint(1, 999)}
        case 2:
            return {"type": "boolean"}
        case 3:
            return {"enum": draw.sample(["red", "green", "blue", 1, 2.5, None, True], draw.randint(1, 4))}
        case 4:
            return _array({"type": "integer", "minimum": 0, "maximum": 99}, 0, draw.randint(1, 3))
        case 5:
            return {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 1, "maxLength": 8}]}
        case 6:
            return {"type": "string", "pattern": "^[a-z]{2,6}$"}
        case _:
            return {"type": "string", "format": "date"}
