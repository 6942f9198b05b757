"""Finds the first of some texts in a text that grows.

Knows characters only; tokens, and what becomes of the text, are the business of `stream.py`.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Match(NamedTuple):
    """Where a text was found: it is `[end - length, end)` of what was read, and may begin in what was read before."""

    end: int  # characters
    length: int  # characters, >= 1


class StopStrings:
    """Some texts, made ready to be found. Immutable; the reader keeps the state, a small number, 0 at the start.

    The text that ends first is found, and the longest one of those that end at the same character. So it does not
    matter in which pieces the text arrives. Empty texts are never found. An automaton of Aho and Corasick: reading
    costs the same per character however many texts there are.

    Invariant: a state stands for the longest end of what was read that begins some text.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # by state, then by character
        self._shorter = [0]  # the state of the longest shorter end that begins some text
        self._found = [0]  # length of the longest text that ends here, or 0
        self._num_held = [0]  # length of the longest end here that begins some text and is not all of it
        for text in texts:
            self._add(text)
        self._link()

    def read(self, state: int, text: str, may_match: bool = True) -> tuple[int, Match | None]:
        """Return the state behind the text, and the first match in it; where nothing may match, none."""
        following, shorter, found = self._next, self._shorter, self._found
        for end, character in enumerate(text, start=1):
            while (reached := following[state].get(character)) is None and state:
                state = shorter[state]
            state = reached or 0
            if found[state] and may_match:
                return state, Match(end, found[state])
        return state, None

    def num_held(self, state: int) -> int:
        """Return how many of the last characters could belong to a match that is yet to end."""
        return self._num_held[state]

    def _add(self, text: str) -> None:
        state = 0
        for character in text:
            reached = self._next[state].get(character)
            if reached is None:
                reached = self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self._found.append(0)
                self._num_held.append(0)
            state = reached
        self._found[state] = len(text)

    def _link(self) -> None:
        """Fill in what a state owes to shorter ones, the shortest first."""
        states = deque((state, character, 0, 1) for character, state in self._next[0].items())
        while states:
            state, character, parent, depth = states.popleft()
            shorter = self._shorter[parent]
            while character not in self._next[shorter] and shorter:
                shorter = self._shorter[shorter]
            self._shorter[state] = self._next[shorter].get(character, 0) if parent else 0
            self._found[state] = self._found[state] or self._found[self._shorter[state]]
            self._num_held[state] = depth if self._next[state] else self._num_held[self._shorter[state]]
            states.extend((child, each, state, depth + 1) for each, child in self._next[state].items())
