"""Ends this process when its parent is gone.

A parent hands its child the reading end of a pipe and keeps the other: however the parent ends, the pipe ends too.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from plugins.errors import InvalidConfig

logger = logging.getLogger(__name__)

VARIABLE: Final = "DIHEDRAL_PARENT_FD"  # environment: the number of the pipe's file descriptor
GRACE_S: Final = 2.0  # from the parent's end to ours, at the most


class ParentWatch:
    """Waits for the end of a pipe in a thread of its own, which works also while the event loop is stuck."""

    def __init__(
        self,
        fd: int,
        on_gone: Callable[[], None],
        grace_s: float = GRACE_S,
        exit_now: Callable[[int], object] = os._exit,
    ) -> None:
        self._fd = fd
        self._on_gone = on_gone  # called from the thread: should let the process end well
        self._grace_s = grace_s
        self._exit_now = exit_now  # called if it has not ended by then

    def start(self) -> threading.Thread:
        """Start watching. The thread never keeps the process alive."""
        os.set_inheritable(self._fd, False)
        thread = threading.Thread(target=self._watch, name="parent watch", daemon=True)
        thread.start()
        return thread

    def _watch(self) -> None:
        while os.read(self._fd, 1):
            continue
        logger.warning("parent_gone", extra={"grace_s": self._grace_s})
        self._on_gone()
        time.sleep(self._grace_s)
        self._exit_now(1)


def parse_fd(text: str) -> int:
    """Read the variable's value. Raises: InvalidConfig: it is no open file descriptor."""
    try:
        fd = int(text)
        os.fstat(fd)
    except (ValueError, OSError) as error:
        raise InvalidConfig(f"{VARIABLE} must be the number of an open file descriptor, is {text!r}") from error
    return fd
