"""The control plane put together: every class is chosen here, started in order and stopped in the other.

Holds no behaviour of its own beyond that order.
"""

import asyncio
import secrets
import socket
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.validator import Validator
from control_plane.api.admin import AdminServicer
from control_plane.api.config import ServerConfig
from control_plane.api.health import HealthServicer
from control_plane.api.inference import InferenceServicer
from control_plane.api.server import ApiServer
from control_plane.engine.core import EngineCore
from control_plane.engine.driver import EngineDriver
from control_plane.engine.served import ServedModels
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.fcfs import FCFSScheduler
from control_plane.workers.config import WorkersConfig
from control_plane.workers.grpc_handle import GrpcWorkerHandle
from control_plane.workers.supervisor import WorkerSupervisor
from plugins.metrics import Metrics
from plugins.types import WorkerId
from protos.channel import MIB

SEED_BITS = 64
LAST_WORDS_S = 0.5  # for a stream's final message to leave, once nothing is at hand


async def run_control_plane(
    server: ServerConfig,
    admission: AdmissionConfig,
    scheduler: SchedulerConfig,
    workers: WorkersConfig,
    metrics: Metrics,
    stop: asyncio.Event,
    on_bound: Callable[[int], object],
) -> None:
    """Serve until `stop` is set, then drain and return. `on_bound` is told the port as soon as it listens.

    While it drains, readiness says NOT_SERVING, requests at hand go on, and new ones are refused with UNAVAILABLE.
    Raises: InvalidConfig: the port cannot be had; whatever is a bug of the engine, as it was.
    """
    core = EngineCore(lambda worker: FCFSScheduler(scheduler, worker), admission.max_waiting)
    driver = EngineDriver(core, metrics, time.monotonic)
    models = ServedModels()
    health = HealthServicer()
    supervisor = WorkerSupervisor(
        WorkerId(workers.address),
        lambda: GrpcWorkerHandle(workers.address, owner_id, workers.max_message_mib * MIB, workers.connect_timeout_s),
        driver,
        models,
        lambda is_up: health.set_ready(is_up, [model.worker.model.name for model in models.all()]),
    )
    validator = Validator(models, admission, draw_seed=lambda: secrets.randbits(SEED_BITS))
    api = ApiServer(
        server,
        InferenceServicer(models, validator, driver, admission, metrics, time.monotonic),
        AdminServicer(
            driver,
            driver.facts,
            lambda: supervisor.view,
            admission.max_waiting,
            version("dihedral"),
            time.monotonic,
        ),
        health,
    )
    port = await api.start()
    owner_id = workers.owner_id or f"{socket.gethostname()}:{port}"
    on_bound(port)
    supervising = asyncio.create_task(supervisor.run(), name="worker-supervisor")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await _either(stopping, supervising)
        health.drain()
        await _either(asyncio.create_task(driver.drain(server.drain_s), name="drain"), supervising)
        await api.stop(LAST_WORDS_S)
    finally:
        for task in (supervising, stopping):
            task.cancel()
        await asyncio.wait((supervising, stopping))
        await api.stop(0)


async def _either(awaited: asyncio.Task[Any], supervising: asyncio.Task[None]) -> None:
    """Wait for a task, or for the supervisor to end, which it does only by a bug: that is raised."""
    await asyncio.wait((awaited, supervising), return_when=asyncio.FIRST_COMPLETED)
    if supervising.done():
        awaited.cancel()
        supervising.result()
