"""Ends a call whose client does not read: gRPC itself would wait for it as long as the connection lives.

Watches the transport's side of one call; output that a handler has not fetched is the engine's business.
"""

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc

from plugins.errors import ReaderTooSlow

Context = grpc.aio.ServicerContext[Any, Any]

LAST_WORDS_S = 1.0  # for the status of a call that is ended to leave; it stands behind what was not read


class ReaderWatch:
    """Sends the responses of one call, and ends the call if one of them is not taken in time.

    Made by the task of the call, as a context manager around all that it writes. A call has one timer, whatever the
    number of its messages. The timer outlives the handler, because the last message and the status wait as well.
    """

    def __init__(self, context: Context, max_unread_s: float) -> None:
        self._context = context
        self._max_unread_s = max_unread_s
        self._waits_since: float | None = None  # when the write began that is under way
        self._limit_s = max_unread_s
        self._has_headers = False
        self._is_ended_by_us = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a call is watched from its own task")
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._limit_s, self._check)
        task.add_done_callback(lambda _: self._timer.cancel())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the last message and the status their time. Raises: ReaderTooSlow: this is why the call ends."""
        self._waits_since = self._loop.time()
        if self._is_ended_by_us and isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            self._limit_s = LAST_WORDS_S
            self._timer = self._loop.call_later(LAST_WORDS_S, self._check)
            raise ReaderTooSlow(self._max_unread_s) from None

    async def write(self, response: object) -> None:
        """Send one response; returns when the transport has taken it."""
        self._waits_since = self._loop.time()
        if not self._has_headers:
            # With the first message in one batch they would be pending as long, and no status could be sent.
            # Not sooner: a client may try a call again whose headers it has not seen.
            self._has_headers = True
            await self._context.send_initial_metadata(())
        await self._context.write(response)
        self._waits_since = None

    def _check(self) -> None:
        waited_s = 0.0 if self._waits_since is None else self._loop.time() - self._waits_since
        if waited_s < self._limit_s:
            self._timer = self._loop.call_later(self._limit_s - waited_s, self._check)
            return
        self._is_ended_by_us = True
        self._task.cancel()
