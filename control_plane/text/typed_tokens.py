"""Breaks special tokens that somebody typed, so that no template takes them for its own.

Knows texts and JSON values; how the broken text becomes tokens is the business of `model.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PRIVATE_USE = range(0xE000, 0xF900)  # Unicode gives these characters no meaning


class TypedTokens:
    """The special tokens of one model, as texts that callers may have written. Immutable.

    A mark, a character of private use, goes behind the first character of each token. It does so too where a text
    ends with the start of a token, because a template may put another text right behind it; but not for a start of
    letters and digits alone, with which words end. A special token of a single character cannot be broken.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._tokens = tuple(token for token in special_tokens if len(token) > 1)
        starts = {token[:length] for token in self._tokens for length in range(1, len(token))}
        self._starts = frozenset(start for start in starts if not start.isalnum())
        self._max_start = max(map(len, self._starts), default=0)

    def is_in(self, text: str) -> bool:
        """True if the text has to be broken somewhere."""
        return any(token in text for token in self._tokens) or bool(self._ends(text.rstrip()))

    def break_up(self, value: Any, mark: str) -> Any:
        """Return a JSON value with the mark in each of its texts, names included, to be broken; "" breaks none."""
        if not mark:
            return value
        if isinstance(value, str):
            return self._break_text(value, mark)
        if isinstance(value, Mapping):
            return {self._break_text(name, mark): self.break_up(each, mark) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.break_up(each, mark) for each in value]
        return value

    def _break_text(self, text: str, mark: str) -> str:
        for token in self._tokens:
            text = text.replace(token, token[0] + mark + token[1:])
        kept = text.rstrip()  # as a template may trim it
        for length in self._ends(kept):
            place = len(kept) - length + 1
            text = text[:place] + mark + text[place:]
        return text

    def _ends(self, text: str) -> list[int]:
        """Return the lengths of the ends of a text that are starts of tokens, the shortest first."""
        longest = min(self._max_start, len(text))
        return [length for length in range(1, longest + 1) if text[-length:] in self._starts]


def texts_in(value: Any) -> Iterator[str]:
    """Yield each text of a JSON value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def unused_mark(source: str, texts: Iterable[str]) -> str | None:
    """Return a character of private use that neither a template nor any of the texts has, None if they have all."""
    used = set(source).union(*texts)
    return next((chr(code) for code in PRIVATE_USE if chr(code) not in used), None)
