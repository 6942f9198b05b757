"""Keeps one worker process running: starts it, starts it again when it dies, and ends it.

Knows processes and exit codes; what the worker does is told by the control plane's readiness.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence

from plugins.errors import Code, InvalidConfig, ServingError

logger = logging.getLogger(__name__)

PARENT_VARIABLE = "DIHEDRAL_PARENT_FD"  # a pipe whose end tells the child that its parent is gone
BAD_CONFIG = 2  # exit code of a command whose configuration or model is wrong; it has said why
MAX_FAILURES = 3  # deaths in a row of a worker that never served
FIRST_DELAY_S = 0.25
MAX_DELAY_S = 15.0


class WorkerGaveUp(ServingError):
    """The worker died again and again before it could serve."""

    code, reason = Code.FAILED_PRECONDITION, "WORKER_GAVE_UP"


class WorkerRefused(InvalidConfig):
    """The worker cannot start with its configuration, or with the files of its model."""

    reason = "WORKER_REFUSED"

    def __init__(self) -> None:
        super().__init__("the worker could not start; its own message is above")


class WorkerProcess:
    """One worker process after another. `run` is one task of its owner's loop; the rest is called from that loop.

    Invariant: when `run` has ended, in whatever way, no process of it is left. The child also ends by itself when
    this process is killed: it holds the reading end of a pipe whose writing end only this process has.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], grace_s: float) -> None:
        """`grace_s` is how long the worker may take to end before it is killed."""
        self._command = tuple(command)
        self._environ = dict(environ)
        self._grace_s = grace_s
        self._num_failures = 0
        self._has_served = False

    def note_served(self) -> None:
        """Take notice that the worker serves: its next death is an accident, and is tried again at once."""
        self._has_served = True
        self._num_failures = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Keep a worker running until `stop` is set, then end it.

        Raises: WorkerRefused: it says that its configuration or its model is wrong; WorkerGaveUp: it died too often
            without having served.
        """
        reading, writing = os.pipe()
        try:
            while not stop.is_set():
                code = await self._run_once(reading, stop)
                if stop.is_set():
                    return
                self._num_failures += 1
                delay_s = min(FIRST_DELAY_S * 2 ** (self._num_failures - 1), MAX_DELAY_S)
                logger.warning("worker_exited", extra={"exit": describe_exit(code), "restart_in_s": delay_s})
                if not self._has_served and code == BAD_CONFIG:
                    raise WorkerRefused
                if not self._has_served and self._num_failures >= MAX_FAILURES:
                    raise WorkerGaveUp(
                        f"the worker died {self._num_failures} times before it could serve "
                        f"(last: {describe_exit(code)}); its own messages are above"
                    )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), delay_s)
        finally:
            os.close(reading)
            os.close(writing)

    async def _run_once(self, reading: int, stop: asyncio.Event) -> int:
        # Its own session: Ctrl-C at the terminal reaches this process alone, which drains before it ends the worker.
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            env=self._environ | {PARENT_VARIABLE: str(reading)},
            pass_fds=(reading,),
            start_new_session=True,
        )
        logger.info("worker_started", extra={"pid": process.pid})
        exited = asyncio.create_task(process.wait())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({exited, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    process.send_signal(signal.SIGTERM)
                await asyncio.wait({exited}, timeout=self._grace_s)
        finally:
            stopped.cancel()
            if process.returncode is None:
                logger.warning("worker_killed", extra={"pid": process.pid, "grace_s": self._grace_s})
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.wait({exited})
        return exited.result()


def describe_exit(code: int) -> str:
    """Say how a process ended: by a signal, by name, or with a code."""
    return signal.Signals(-code).name if code < 0 else f"code {code}"
