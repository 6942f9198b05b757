"""Runs `dihedral` as a user does: in processes of its own, on ports of its own, with a tiny random model."""

import asyncio
import json
import os
import re
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from control_plane.cli.demo import children

DIHEDRAL = (sys.executable, "-P", "-m", "control_plane.cli")
READY = re.compile(r"^Ready: (?P<model>\S+) at (?P<address>\S+), metrics at (?P<metrics>\S+)$")
TINY = ("--load-format=dummy", "--max-model-len=2048", "--worker.kv-cache-gib=0.05", "--worker.threads=1")
FREE_PORTS = ("--port=0", "--metrics.port=0")


class Dihedral:
    """One running `dihedral serve`, `control-plane` or `worker`, and what it has said."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""
        self.metrics_url = ""
        self.log: list[str] = []  # lines of stderr
        self._said = asyncio.Condition()

    async def read_log(self) -> None:
        """Keep reading what it logs, until it ends."""
        while line := await pipe(self.process.stderr).readline():
            async with self._said:
                self.log.append(line.decode().rstrip("\n"))
                self._said.notify_all()

    async def ready(self) -> None:
        """Wait until it says that it takes requests."""
        while line := (await pipe(self.process.stdout).readline()).decode().strip():
            if found := READY.match(line):
                self.address, self.metrics_url = found["address"], found["metrics"]
                return
        raise AssertionError(f"it ended before it was ready: {self.log}")

    async def logged(self, event: str, since: int = 0, **expected: object) -> dict[str, object]:
        """Wait for an event with these fields among the lines of its log from `since` on, and return all its fields."""
        async with self._said:
            while True:
                for line in self.log[since:]:
                    if f'"event": "{event}"' in line:
                        fields: dict[str, object] = json.loads(line)
                        if expected.items() <= fields.items():
                            return fields
                since = len(self.log)
                await self._said.wait()

    def worker_pid(self) -> int:
        """The process id of its worker."""
        found = children(self.process.pid)
        if len(found) != 1:
            raise AssertionError(f"expected one worker, found {found}: {self.log}")
        return found[0]


def pipe(stream: asyncio.StreamReader | None) -> asyncio.StreamReader:
    """The reading end of a process's output."""
    if stream is None:
        raise ValueError("the process was started without a pipe")
    return stream


@asynccontextmanager
async def dihedral(*words: str, program: Sequence[str] = DIHEDRAL) -> AsyncIterator[Dihedral]:
    """Run one command; it and its worker are gone afterwards, whatever the test did."""
    process = await asyncio.create_subprocess_exec(
        *program, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    running = Dihedral(process)
    reading = asyncio.create_task(running.read_log())
    try:
        yield running
    finally:
        left = children(process.pid)
        if process.returncode is None:
            process.kill()
        for pid in left:
            kill(pid)
        await process.wait()
        await reading


async def run(*words: str) -> tuple[int, str, str]:
    """Run one short command to its end: exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *DIHEDRAL, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def watch(pid: int) -> int:
    """A file descriptor that becomes readable when the process ends; it need not be ours."""
    return os.pidfd_open(pid)


async def ended(pidfd: int) -> None:
    """Wait until a watched process has ended."""
    await asyncio.to_thread(select.select, [pidfd], [], [])
    os.close(pidfd)


def kill(pid: int) -> None:
    """Kill a process, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
