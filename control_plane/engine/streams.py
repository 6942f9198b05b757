"""The output of one request, between the engine and whoever reads it.

Merges what the reader has not fetched yet, so that a slow reader delays only itself and holds at most its own output.
"""

import asyncio
from dataclasses import dataclass

from plugins.errors import InvariantBroken, ServingError
from plugins.types import FinishReason, TokenId


@dataclass(frozen=True, slots=True)
class Output:
    """What came since the last one. After an Output with `finish` there is none."""

    token_ids: tuple[TokenId, ...]
    finish: FinishReason | None = None
    error: ServingError | None = None  # set when the end is not STOP or LENGTH


class OutputStream:
    """One request's output. Written by the engine's driver, read by one task of the same loop.

    Bounded by the request's own max_tokens: unread tokens are merged, not queued.
    """

    def __init__(self) -> None:
        self._token_ids: list[TokenId] = []
        self._finish: FinishReason | None = None
        self._error: ServingError | None = None
        self._changed = asyncio.Event()

    def put(self, token_ids: tuple[TokenId, ...], finish: FinishReason | None, error: ServingError | None) -> None:
        """Add output. Raises: InvariantBroken: the stream has ended."""
        if self._finish is not None:
            raise InvariantBroken(f"output after the end ({self._finish.name})")
        self._token_ids.extend(token_ids)
        self._finish = finish
        self._error = error
        self._changed.set()

    @property
    def is_ended(self) -> bool:
        """True once the last output was put, read or not."""
        return self._finish is not None

    async def next(self) -> Output:
        """Wait for output and take all there is. Never call it again after one with `finish`."""
        await self._changed.wait()
        self._changed.clear()
        token_ids, self._token_ids = tuple(self._token_ids), []
        return Output(token_ids, self._finish, self._error)
