"""Writes constraints as llguidance reads them.

What a constraint may say is said here; whether a text can be found that fits it is for `grammar_child.py` to try.
"""

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher

# White space is as json.dumps writes it: a model that may write as much of it as it likes may never end.
# Whatever llguidance cannot hold a text to is refused, not left out.
JSON_OPTIONS: Final[dict[str, Any]] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}
_OLD_BOUNDS: Final = ("exclusiveMinimum", "exclusiveMaximum")
_OF_NAMES: Final = ("properties", "patternProperties", "$defs", "definitions")  # keys in them are no keywords
_OF_VALUES: Final = ("const", "enum", "default", "examples")  # what is in them is no schema


class Refused(Exception):
    """A constraint cannot be had."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        self.message = message
        super().__init__(message)


def grammar_text(kind: str, text: str) -> str:
    """Write a constraint as a grammar. `kind` is json_schema, regex, choice (a JSON list of texts) or grammar (Lark).

    Raises: Refused: it has no meaning.
    """
    match kind:
        case "json_schema":
            return _schema(text)
        case "regex":
            return _expression(text)
        case "choice":
            return _choice(json.loads(text))
    return _matcher().grammar_from_lark(text)


def _matcher() -> "type[LLMatcher]":
    """Import llguidance, which may be missing: then the first tokenizer has told so."""
    from llguidance import LLMatcher

    return LLMatcher


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
        has_old_bounds = _has_old_bounds(schema)
    except RecursionError:
        raise Refused("GRAMMAR_TOO_COMPLEX", "is nested too deeply") from None
    except ValueError as error:
        raise Refused("INVALID_GRAMMAR", f"is not JSON: {error}") from None
    if schema is False:
        raise Refused("INVALID_GRAMMAR", "is false, which no value fits")
    if schema is True:
        text = "{}"
    elif not isinstance(schema, dict):
        raise Refused("INVALID_GRAMMAR", "must be an object, or true")
    elif "x-guidance" in schema:
        raise Refused("UNSUPPORTED_KEYWORD", "has the keyword x-guidance, which is not supported")
    elif has_old_bounds:
        raise Refused("UNSUPPORTED_KEYWORD", "has a boolean exclusiveMinimum or exclusiveMaximum; must be a number")
    try:
        return _matcher().grammar_from_json_schema(text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]  # they are
    except ValueError as error:
        raise Refused("INVALID_GRAMMAR", str(error)) from None


def _expression(text: str) -> str:
    num_backslashes = len(text) - len(text.rstrip("\\"))
    if num_backslashes % 2:  # llguidance would leave it out
        raise Refused("INVALID_GRAMMAR", "ends with a backslash that escapes nothing")
    return _matcher().grammar_from_regex(text)


def _choice(texts: list[str]) -> str:
    """Write exact texts as alternatives of one expression, in which letters and digits alone stand for themselves."""
    escaped = ("".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text) for text in texts)
    return _matcher().grammar_from_regex("|".join(escaped))


def _has_old_bounds(value: Any, is_of_names: bool = False) -> bool:
    """Say whether a schema has draft 4's `exclusiveMinimum: true`, which llguidance would pass over."""
    if isinstance(value, list):
        return any(map(_has_old_bounds, value))
    if not isinstance(value, dict):
        return False
    if is_of_names:
        return any(map(_has_old_bounds, value.values()))
    return any(isinstance(value.get(key), bool) for key in _OLD_BOUNDS) or any(
        _has_old_bounds(each, key in _OF_NAMES) for key, each in value.items() if key not in _OF_VALUES
    )
