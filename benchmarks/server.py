"""Starts `dihedral serve` as a child process, waits until it would take a request, and stops it.

Speaks to it over its public ports only, as any client would.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.load import Clock
from plugins.errors import Code, InvariantBroken, ServingError
from protos.channel import channel_options

SERVE = (sys.executable, "-m", "control_plane.cli", "serve")
READINESS = "readiness"  # the health service's name for "a request would be taken"
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.05


class ServerNotReady(ServingError):
    """A server ended, or took too long, before it would take a request."""

    code, reason = Code.UNAVAILABLE, "SERVER_NOT_READY"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that takes requests."""

    address: str
    pid: int | None  # None: somebody else started it
    start_s: float | None  # from the start of its process until it was ready
    command: tuple[str, ...] = ()


@asynccontextmanager
async def running_server(
    arguments: Sequence[str], log: Path, limit_s: float, clock: Clock, program: Sequence[str] = SERVE
) -> AsyncIterator[Server]:
    """Run a server with these arguments on free ports, its output in `log`, while the context lasts.

    SIGTERM meanwhile cancels the calling task, so that the server never outlives it.

    Raises: ServerNotReady: it ended, or was not ready in time; the message has the end of its log.
    """
    (port,) = free_ports(1)
    command = (*program, f"--server.port={port}", "--metrics.port=0", *arguments)
    address = f"127.0.0.1:{port}"
    start_s = clock()
    with log.open("wb") as output, _cancelled_by_sigterm():
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            try:
                await wait_until_ready(address, limit_s, process)
            except ServerNotReady as error:
                raise ServerNotReady(f"the server did not start: {error}; its log ends with:\n{_tail(log)}") from error
            yield Server(address, process.pid, round(clock() - start_s, 2), command)
        finally:
            await _stop(process)


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:
        raise InvariantBroken("a server is run from a task")
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def wait_until_ready(address: str, limit_s: float, process: asyncio.subprocess.Process | None = None) -> None:
    """Ask for readiness until the answer is yes. Raises: ServerNotReady: the process ended, or time is up."""
    try:
        async with asyncio.timeout(limit_s), grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            while not await _is_ready(channel):
                if process is not None and process.returncode is not None:
                    raise ServerNotReady(f"the process ended with status {process.returncode}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise ServerNotReady(f"{address} was not ready within {limit_s:g} s") from None


async def _is_ready(channel: grpc.aio.Channel) -> bool:
    health: Any = health_pb2_grpc.HealthStub(channel)  # its type stub lists no methods
    try:
        answer = await health.Check(health_pb2.HealthCheckRequest(service=READINESS))
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports that nobody listens on now. All are held until the last is found, so they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = tuple(int(each.getsockname()[1]) for each in sockets)
    for each in sockets:
        each.close()
    return ports


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)  # its session is its own, and so is the group
            await process.wait()
