"""A bug on purpose: one method of the product, put in place of the right one for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is wrong, and which promise it breaks."""

    promise: str  # I1 to I15
    bug: str  # a name for it
    owner: type
    method: str
    spoil: Callable[[Method], Method]  # makes the wrong one from the right one

    def __str__(self) -> str:
        return f"{self.promise}-{self.bug.replace(' ', '-')}"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Let the bug be there while the context lasts."""
        right = self.owner.__dict__[self.method]
        setattr(self.owner, self.method, self.spoil(right))
        try:
            yield
        finally:
            setattr(self.owner, self.method, right)
