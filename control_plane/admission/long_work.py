"""Threads for what would hold the event loop up: reading long prompts and trying grammars, a bounded number of them.

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
NUM_SLOW_THREADS = 4  # they wait for processes, and the verdicts on known grammars come between
RETRY_AFTER_S = 1.0


class LongWork:
    """Does short work at once, long work in a thread, and slow work in others. Called from one event loop; closed once.

    Long work takes as long as its message is long; slow work may take seconds whatever its size, and never holds long
    work up. Invariant: at most `max_reading` pieces of each are queued or running.
    """

    def __init__(self, max_reading: int) -> None:
        self._long = _Lane(max_reading, NUM_THREADS, "prompt")
        self._slow = _Lane(max_reading, NUM_SLOW_THREADS, "grammar")

    async def run(self, num_bytes: int, work: Callable[[], T], is_slow: bool = False) -> T:
        """Return what `work` returns; `num_bytes` is the size of its message.

        Raises: QueueFull: too much such work is at hand; whatever `work` raises.
        """
        if is_slow:
            return await self._slow.run(work)
        if num_bytes <= MAX_INLINE_BYTES:
            return work()
        return await self._long.run(work)

    def close(self) -> None:
        """Drop what is queued and wait for nothing. Idempotent."""
        self._long.close()
        self._slow.close()


class _Lane:
    """Some threads, and how much work is at hand for them. Work whose caller has gone counts until it ends."""

    def __init__(self, max_reading: int, num_threads: int, name: str) -> None:
        self._max_reading = max_reading
        self._num_reading = 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        if self._num_reading >= self._max_reading:
            raise QueueFull(self._num_reading, self._max_reading, RETRY_AFTER_S)
        self._num_reading += 1
        loop = asyncio.get_running_loop()
        future = self._threads.submit(work)
        future.add_done_callback(lambda done: self._note_end(loop, done))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _note_end(self, loop: asyncio.AbstractEventLoop, done: "Future[Any]") -> None:
        if not loop.is_closed():  # else nobody asks for a number any more
            loop.call_soon_threadsafe(self._count_down)

    def _count_down(self) -> None:
        self._num_reading -= 1
