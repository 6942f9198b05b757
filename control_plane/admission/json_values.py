"""Values that a request hands on to plug-ins: JSON, and not too much of it.

What a plug-in makes of them is its own business.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Final

from control_plane.admission.texts import is_unicode
from plugins.errors import FieldViolation
from plugins.sampling_ranges import told

MAX_NAMES: Final = 128
MAX_NAME_CHARACTERS: Final = 128
MAX_DEPTH: Final = 16  # of lists and objects within one another; the arguments themselves are the first
MAX_BYTES: Final = 64 * 1024  # of all arguments, as JSON
MIN_WHOLE, MAX_WHOLE = -(2**63), 2**64 - 1


def json_violations(field: str, values: object) -> list[FieldViolation]:
    """Tell what is wrong with an object of JSON values: of each name the first fault, and of the object its size.

    Looks at no more than MAX_BYTES of it.
    """
    if not isinstance(values, Mapping):
        return [FieldViolation(field, "WRONG_TYPE", f"is {told(values)}; must map names to JSON values")]
    if len(values) > MAX_NAMES:
        return [FieldViolation(field, "TOO_MANY", f"has {len(values)} names; at most {MAX_NAMES} are allowed")]
    violations = []
    sizes = JsonSizes(MAX_BYTES - 1)  # the opening brace
    for name, value in values.items():
        fault = _name_fault(name)
        if fault is not None:
            violations.append(FieldViolation(field, *fault))
            continue
        sizes.add(len(json.dumps(name, ensure_ascii=False).encode()) + 2)  # its colon, and a comma or a brace
        fault = next(_faults(value, 2, sizes), None)
        if fault is not None and not sizes.is_full:
            violations.append(FieldViolation(f"{field}.{name}", *fault))
        if sizes.is_full:
            description = f"is longer than {MAX_BYTES} bytes of JSON, which are allowed"
            return [*violations, FieldViolation(field, "TOO_LONG", description)]
    return violations


def json_fault(value: object, sizes: "JsonSizes") -> tuple[str, str] | None:
    """Tell the first fault of a JSON object, as reason and description; None: it has none, or is too large."""
    if not isinstance(value, Mapping):
        return "WRONG_TYPE", f"is {told(value)}; must be a JSON object"
    fault = next(_faults(dict(value), 1, sizes), None)
    return None if sizes.is_full else fault


class JsonSizes:
    """Adds up how long values are as JSON without spaces. Owned by who checks them."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def add(self, num_bytes: int) -> None:
        """Count some bytes."""
        self._left -= num_bytes

    @property
    def is_full(self) -> bool:
        """True once there are more than may be."""
        return self._left < 0


def _name_fault(name: object) -> tuple[str, str] | None:
    if not isinstance(name, str):
        return "WRONG_TYPE", f"has a name that is {told(name)}; must be a text"
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        description = f"has a name of {len(name)} characters; must have 1 to {MAX_NAME_CHARACTERS}"
        return ("TOO_LONG" if name else "EMPTY"), description
    return None if is_unicode(name) else ("NOT_UNICODE", "has a name that is not valid Unicode")


def _faults(value: object, depth: int, sizes: JsonSizes) -> Iterator[tuple[str, str]]:
    """Walk a value that lies so deep, and yield what is wrong with it. Stops once the sizes are full."""
    if value is None or isinstance(value, bool):
        sizes.add(4)
    elif isinstance(value, str):
        sizes.add(len(value) + 2)  # at least: a long one is not copied for its exact length
        if not sizes.is_full:
            if is_unicode(value):
                sizes.add(len(json.dumps(value, ensure_ascii=False).encode()) - len(value) - 2)
            else:
                yield "NOT_UNICODE", "has a text that is not valid Unicode"
    elif isinstance(value, int):
        sizes.add(1)
        if not MIN_WHOLE <= value <= MAX_WHOLE:
            yield "OUT_OF_RANGE", f"has {told(value)}; whole numbers must be in [-2**63, 2**64)"
        else:
            sizes.add(len(str(int(value))) - 1)
    elif isinstance(value, float):
        sizes.add(len(repr(float(value))))
        if not math.isfinite(value):
            yield "OUT_OF_RANGE", f"has {value}; numbers must be finite"
    elif isinstance(value, list | tuple | dict):
        yield from _inner_faults(value, depth, sizes)
    else:
        yield "WRONG_TYPE", f"has a value {told(value)}; must be JSON: null, true, a number, a text, a list, an object"


def _inner_faults(
    value: list[object] | tuple[object, ...] | dict[object, object], depth: int, sizes: JsonSizes
) -> Iterator[tuple[str, str]]:
    if depth > MAX_DEPTH:
        yield "TOO_DEEP", f"has more than {MAX_DEPTH} lists and objects within one another"
        return
    sizes.add(1 + max(1, len(value)))  # two brackets, and the commas
    items = value.items() if isinstance(value, dict) else ((None, each) for each in value)
    for name, each in items:
        if sizes.is_full:
            return
        if isinstance(value, dict):
            fault = None if isinstance(name, str) and is_unicode(name) else "has an inner name that is no text"
            if fault is not None:
                yield "WRONG_TYPE", fault
                return
            sizes.add(len(json.dumps(name, ensure_ascii=False).encode()) + 1)
        yield from _faults(each, depth + 1, sizes)
