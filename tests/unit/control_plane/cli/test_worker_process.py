"""Keeping a worker process: started again when it dies, given up when it cannot start, never left behind.

The workers here are small programs that call back to the test, so that nothing waits for a time to pass.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from control_plane.cli.worker_process import WorkerGaveUp, WorkerProcess, WorkerRefused, describe_exit

# Says its process id to the test, then waits for a byte, or for the end of its parent.
CALL = """
import os, select, signal, socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
link.sendall(b"%d\\n" % os.getpid())
"""
WAIT = CALL + 'select.select([link, int(os.environ["DIHEDRAL_PARENT_FD"])], [], [])\n'
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + CALL + "link.recv(1)\n"
PARENT = """
import asyncio, os, sys
from control_plane.cli.worker_process import WorkerProcess
worker = WorkerProcess([sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ, grace_s=60)
asyncio.run(worker.run(asyncio.Event()))
"""


class Callers:
    """The workers that have called back, one after another."""

    def __init__(self) -> None:
        self._calls: asyncio.Queue[tuple[int, asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self.port = 0

    async def called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._calls.put((int(await reader.readline()), reader, writer))

    async def next(self) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """Wait for the next worker: its process id, and its end of the line."""
        return await self._calls.get()


@asynccontextmanager
async def callers() -> AsyncIterator[Callers]:
    calls = Callers()
    server = await asyncio.start_server(calls.called, "127.0.0.1", 0)
    calls.port = server.sockets[0].getsockname()[1]
    try:
        yield calls
    finally:
        server.close()


def worker_process(program: str, port: int = 0, grace_s: float = 60.0) -> WorkerProcess:
    return WorkerProcess([sys.executable, "-S", "-c", program, str(port)], os.environ, grace_s)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_worker_runs_until_it_is_stopped() -> None:
    async with callers() as calls:
        stop = asyncio.Event()
        running = asyncio.create_task(worker_process(WAIT, calls.port).run(stop))
        pid, _, _ = await calls.next()

        stop.set()
        await running

        assert not is_running(pid)


async def test_a_killed_worker_is_started_again() -> None:
    async with callers() as calls:
        stop = asyncio.Event()
        worker = worker_process(WAIT, calls.port)
        running = asyncio.create_task(worker.run(stop))
        first, _, _ = await calls.next()
        worker.note_served()

        os.kill(first, signal.SIGKILL)
        second, _, _ = await calls.next()

        assert second != first
        stop.set()
        await running
        assert not is_running(second)


async def test_a_worker_that_refuses_its_configuration_is_not_started_again() -> None:
    async with callers() as calls:
        with pytest.raises(WorkerRefused, match="the worker could not start; its own message is above"):
            await worker_process(CALL + "sys.exit(2)", calls.port).run(asyncio.Event())

        await calls.next()
        assert calls._calls.empty()


async def test_a_worker_that_dies_three_times_before_it_served_is_given_up() -> None:
    async with callers() as calls:
        with pytest.raises(WorkerGaveUp, match=r"died 3 times before it could serve \(last: code 7\)"):
            await worker_process(CALL + "sys.exit(7)", calls.port).run(asyncio.Event())

        assert len({(await calls.next())[0] for _ in range(3)}) == 3


async def test_a_worker_that_has_served_is_started_again_whatever_its_exit_code() -> None:
    async with callers() as calls:
        stop = asyncio.Event()
        worker = worker_process(CALL + "link.recv(1); sys.exit(2)", calls.port)
        worker.note_served()
        running = asyncio.create_task(worker.run(stop))
        first, _, line = await calls.next()

        line.write(b"x")
        second, _, _ = await calls.next()

        assert second != first
        stop.set()
        await running


async def test_a_worker_that_ignores_the_request_to_end_is_killed_after_its_grace() -> None:
    async with callers() as calls:
        stop = asyncio.Event()
        running = asyncio.create_task(worker_process(STUBBORN, calls.port, grace_s=0.05).run(stop))
        pid, _, _ = await calls.next()

        stop.set()
        await running

        assert not is_running(pid)


async def test_cancelling_the_task_kills_the_worker() -> None:
    async with callers() as calls:
        running = asyncio.create_task(worker_process(WAIT, calls.port).run(asyncio.Event()))
        pid, _, _ = await calls.next()

        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        assert not is_running(pid)


async def test_a_worker_learns_of_the_death_of_its_parent() -> None:
    async with callers() as calls:
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, WAIT, str(calls.port))
        _, line, _ = await calls.next()

        parent.kill()
        await parent.wait()

        assert await line.read() == b""  # the worker has ended, and its end of the line with it


async def test_ctrl_c_at_the_terminal_does_not_reach_the_worker() -> None:
    async with callers() as calls:
        stop = asyncio.Event()
        running = asyncio.create_task(worker_process(WAIT, calls.port).run(stop))
        pid, _, _ = await calls.next()

        assert os.getpgid(pid) != os.getpgid(os.getpid())

        stop.set()
        await running


def test_an_exit_is_told_by_signal_or_code() -> None:
    assert describe_exit(-9) == "SIGKILL"
    assert describe_exit(3) == "code 3"
