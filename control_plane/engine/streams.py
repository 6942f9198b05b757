"""The output of one request, between the engine and whoever reads it.

Merges what the reader has not fetched yet, so that a slow reader delays only itself and holds at most its own output.
"""

import asyncio
from dataclasses import dataclass

from plugins.errors import InvariantBroken, ServingError
from plugins.types import FinishReason, TokenId, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Output:
    """What came since the last one. After an Output with `finish` there is none."""

    token_ids: tuple[TokenId, ...]
    finish: FinishReason | None = None
    error: ServingError | None = None  # set when the end is not STOP or LENGTH
    num_cached_tokens: int = 0  # prompt tokens that needed no computing, as far as is known
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # one per token; empty: nobody asked
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # the next places of the prompt, from place 1 on, each told once


class OutputStream:
    """One request's output. Written by the engine's driver, read by one task of the same loop.

    Bounded by the request's own max_tokens: unread tokens are merged, not queued.
    """

    def __init__(self) -> None:
        self._token_ids: list[TokenId] = []
        self._finish: FinishReason | None = None
        self._error: ServingError | None = None
        self._num_cached_tokens = 0
        self._logprobs: list[TokenLogprobs | None] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._unread_since_s: float | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the reader, while there is nothing to read

    def put(
        self,
        token_ids: tuple[TokenId, ...],
        finish: FinishReason | None,
        error: ServingError | None,
        now_s: float,
        num_cached_tokens: int = 0,
        logprobs: tuple[TokenLogprobs | None, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Add output; 0 cached tokens changes nothing. Raises: InvariantBroken: the stream has ended."""
        if self._finish is not None:
            raise InvariantBroken(f"output after the end ({self._finish.name})")
        self._token_ids.extend(token_ids)
        if finish is not None:
            self._finish, self._error = finish, error
        if num_cached_tokens:
            self._num_cached_tokens = num_cached_tokens
        if logprobs:
            self._logprobs.extend(logprobs)
        if prompt_logprobs:
            self._prompt_logprobs.extend(prompt_logprobs)
        if self._unread_since_s is None:
            self._unread_since_s = now_s
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    @property
    def is_ended(self) -> bool:
        """True once the last output was put, read or not."""
        return self._finish is not None

    @property
    def unread_since_s(self) -> float | None:
        """When the oldest output came that nobody has read yet, as `put` was told; None if there is none."""
        return self._unread_since_s

    async def next(self) -> Output:
        """Wait for output and take all there is. Never call it again after one with `finish`."""
        if self._unread_since_s is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._unread_since_s = None
        token_ids, self._token_ids = tuple(self._token_ids), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return Output(token_ids, self._finish, self._error, self._num_cached_tokens, logprobs, prompt_logprobs)
