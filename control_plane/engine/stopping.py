"""Ends an output where its text says so: a stop string is found here, before the scheduler sees the tokens."""

from collections.abc import Sequence
from typing import Protocol

from plugins.types import TokenId


class StopWatcher(Protocol):
    """Reads one output as it comes, and says where it ends."""

    def push(self, token_ids: Sequence[TokenId], is_stopped: bool = False) -> int | None:
        """Take the next tokens; how many of them belong to the output, if it ends among them, else None.

        `is_stopped`: the worker ended the output, and the last token is what ended it.
        """
