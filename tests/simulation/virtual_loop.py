"""An asyncio event loop on virtual time: nothing waits, and the same calls run in the same order.

The clock stands still while callbacks run and jumps to the next timer when none is left.
"""

import asyncio
from asyncio.base_events import BaseEventLoop
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Everybody waits, and no timer will wake anybody: a wake-up was lost."""


class VirtualLoop(BaseEventLoop):
    """One thread, no sockets, no wall clock. Executors run their work at once, inside the call."""

    _clock_resolution: float
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self.stalled_s = 0.0  # how long it stood still, all in all
        self._now_s = 0.0
        self._clock_resolution = 1e-9  # timers of the same instant run in the same round
        self._selector = self  # the base class asks it what to wait for

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def stall(self, seconds: float) -> None:
        """Let time pass while nothing runs, as if the process were stopped: timers that are due run late."""
        self._now_s += seconds
        self.stalled_s += seconds

    def num_timers(self) -> int:
        """Timers that are set and not cancelled."""
        return sum(not handle.cancelled() for handle in self._scheduled)

    def select(self, timeout: float | None) -> list[Any]:
        """Let time pass until the next timer. Raises: Deadlock: there is none."""
        if timeout is None:
            raise Deadlock(f"at {self._now_s:g} s nothing is left to happen")
        if timeout > 0:
            self._now_s = self._scheduled[0].when()
        return []

    def run_in_executor(  # type: ignore[override]  # at once, where the base class promises a thread
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """There is no other thread."""
