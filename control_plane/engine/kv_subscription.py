"""One listener's view of what happens to cached blocks.

Carries events from the engine to a reader; what they mean is told in `plugins/kv_events.py`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from plugins.errors import SubscriberTooSlow
from plugins.kv_events import KvEvent
from plugins.types import WorkerId

MAX_EVENTS: Final = 10_000  # that wait for a reader; a listener who is further behind has to begin anew


class KvSubscription:
    """Events of all workers, in order, from the moment it was made. Written by the driver, read by one task."""

    def __init__(self, on_close: Callable[["KvSubscription"], None]) -> None:
        self._on_close = on_close
        self._events: deque[tuple[WorkerId, KvEvent]] = deque()
        self._is_overrun = False
        self._changed = asyncio.Event()

    def put(self, worker_id: WorkerId, event: KvEvent) -> None:
        """Add an event; one too many ends the subscription."""
        if len(self._events) >= MAX_EVENTS:
            self._is_overrun = True
            self._events.clear()
        if not self._is_overrun:
            self._events.append((worker_id, event))
        self._changed.set()

    def __aiter__(self) -> "KvSubscription":
        return self

    async def __anext__(self) -> tuple[WorkerId, KvEvent]:
        """Wait for the next event. Raises: SubscriberTooSlow: some were lost."""
        while not self._events:
            if self._is_overrun:
                raise SubscriberTooSlow(MAX_EVENTS)
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()

    def close(self) -> None:
        """Follow no longer. Idempotent."""
        self._on_close(self)
