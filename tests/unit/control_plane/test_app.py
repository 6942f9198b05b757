"""The control plane put together: how it ends, well and badly."""

import asyncio

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.api.config import ServerConfig
from control_plane.app import run_control_plane
from control_plane.engine.driver import EngineDriver
from control_plane.scheduling.config import SchedulerConfig
from control_plane.workers.config import WorkersConfig
from control_plane.workers.supervisor import WorkerSupervisor
from plugins.metrics import NoMetrics

NOBODY = "127.0.0.1:1"  # a port on which nothing listens


def start(stop: asyncio.Event, bound: asyncio.Future[int]) -> asyncio.Task[None]:
    return asyncio.create_task(
        run_control_plane(
            ServerConfig(port=0),
            AdmissionConfig(),
            SchedulerConfig(),
            WorkersConfig(address=NOBODY),
            NoMetrics(),
            stop,
            bound.set_result,
        )
    )


async def test_it_listens_without_a_worker_and_stops_when_told() -> None:
    stop, bound = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = start(stop, bound)

    port = await bound
    stop.set()
    await running

    assert port > 0


@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_bug_of_the_supervisor_comes_out_while_it_serves_and_while_it_drains(
    is_draining: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = asyncio.Event()

    async def fail(self: WorkerSupervisor) -> None:
        await reached.wait()
        raise RuntimeError("a bug")

    async def drain_for_ever(self: EngineDriver, grace_s: float) -> bool:
        reached.set()
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(WorkerSupervisor, "run", fail)
    monkeypatch.setattr(EngineDriver, "drain", drain_for_ever)
    stop, bound = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = start(stop, bound)
    await bound

    (stop if is_draining else reached).set()

    with pytest.raises(RuntimeError, match="a bug"):
        await running
