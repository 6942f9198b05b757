"""Threads for what would hold the event loop up: reading long prompts, a bounded number of them.

Knows sizes and numbers; what the work is comes with each call.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from plugins.errors import QueueFull

T = TypeVar("T")

MAX_INLINE_BYTES = 8192  # of a message; more may take over 4 ms
NUM_THREADS = 2  # the tokenizer lets go of the interpreter, so that two prompts are read at once
RETRY_AFTER_S = 1.0


class LongWork:
    """Does short work at once and long work in a thread. Called from one event loop; closed once.

    Invariant: at most `max_reading` pieces of long work are queued or running; one whose caller has gone counts
    until it ends.
    """

    def __init__(self, max_reading: int) -> None:
        self._max_reading = max_reading
        self._num_reading = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompt")

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Return what `work` returns; `num_bytes` is the size of its message.

        Raises: QueueFull: too much long work is at hand; whatever `work` raises.
        """
        if num_bytes <= MAX_INLINE_BYTES:
            return work()
        if self._num_reading >= self._max_reading:
            raise QueueFull(self._num_reading, self._max_reading, RETRY_AFTER_S)
        self._num_reading += 1
        loop = asyncio.get_running_loop()
        future = self._threads.submit(work)
        future.add_done_callback(lambda done: self._note_end(loop, done))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop what is queued and wait for nothing. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _note_end(self, loop: asyncio.AbstractEventLoop, done: "Future[Any]") -> None:
        if not loop.is_closed():  # else nobody asks for a number any more
            loop.call_soon_threadsafe(self._count_down)

    def _count_down(self) -> None:
        self._num_reading -= 1
