"""A worker in a process of its own: how it ends, and what its control plane sees of it."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from control_plane.workers.grpc_handle import GrpcWorkerHandle
from plugins.errors import WorkerLeaving, WorkerLost
from plugins.types import StepPlan
from tests.end_to_end.processes import FREE_PORTS, TINY, Dihedral, dihedral


@asynccontextmanager
async def opened_worker() -> AsyncIterator[tuple[Dihedral, GrpcWorkerHandle]]:
    """A worker process, and the handle that owns it."""
    async with dihedral("worker", *TINY, *FREE_PORTS, "--log.format=json") as worker:
        serving = await worker.logged("worker_serving")
        handle = GrpcWorkerHandle(f"127.0.0.1:{serving['port']}", "test", 1_000_000, timeout_s=30.0)
        await handle.open()
        yield worker, handle
        await handle.close()


async def test_a_killed_worker_is_lost_at_once() -> None:
    async with opened_worker() as (worker, handle):
        results = handle.results()
        handle.submit(StepPlan(seq=1))
        await anext(results)

        worker.process.kill()

        with pytest.raises(WorkerLost):
            await anext(results)


async def test_a_worker_that_is_asked_to_stop_ends_its_stream_and_exits_with_0() -> None:
    async with opened_worker() as (worker, handle):
        worker.process.send_signal(signal.SIGTERM)

        with pytest.raises(WorkerLeaving, match="the worker is leaving: it was asked to stop"):
            await anext(handle.results())
        assert await worker.process.wait() == 0
