"""Waiting for a server, and the ports that one is given."""

import asyncio
import os
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from benchmarks.server import ServerNotReady, free_ports, running_server, wait_until_ready


async def test_waiting_ends_when_readiness_turns_to_serving() -> None:
    servicer = health.aio.HealthServicer()
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await servicer.set("readiness", health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    waiting = asyncio.create_task(wait_until_ready(f"127.0.0.1:{port}", limit_s=60))
    await asyncio.sleep(0)
    assert not waiting.done()

    await servicer.set("readiness", health_pb2.HealthCheckResponse.SERVING)

    await waiting
    await server.stop(None)


async def test_waiting_for_nobody_ends_with_the_limit() -> None:
    (port,) = free_ports(1)

    with pytest.raises(ServerNotReady, match=rf"127.0.0.1:{port} was not ready within 0.2 s"):
        await wait_until_ready(f"127.0.0.1:{port}", limit_s=0.2)


async def test_waiting_for_a_process_that_ended_tells_its_status() -> None:
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(3)")
    await process.wait()

    with pytest.raises(ServerNotReady, match="the process ended with status 3"):
        await wait_until_ready(f"127.0.0.1:{port}", 60, process)


async def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    program = (sys.executable, "-c", "import sys; sys.exit(f'cannot use {sys.argv[3]}')")

    with pytest.raises(ServerNotReady, match=r"(?s)the process ended with status 1; .*cannot use --no-such-flag=1"):
        async with running_server(["--no-such-flag=1"], tmp_path / "log", 60, lambda: 0.0, program):
            pass


async def test_sigterm_ends_the_server_with_its_user(tmp_path: Path) -> None:
    log = tmp_path / "log"
    kill_the_parent = "print(os.getpid(), flush=True); os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    program = (sys.executable, "-c", f"import os, signal; {kill_the_parent}")

    async def use() -> None:
        async with running_server([], log, 60, lambda: 0.0, program):
            pass

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(use())

    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_free_ports_are_different() -> None:
    ports = free_ports(8)

    assert len(set(ports)) == 8
    assert all(1024 <= port <= 65535 for port in ports)
