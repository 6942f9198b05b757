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
from control_plane.admission.defaults import DefaultSampling
from control_plane.admission.extra_args import ExtraArgs, warn_of_undeclared
from control_plane.admission.structured_output import GrammarCompiler
from control_plane.admission.validator import Validator
from control_plane.api.admin import AdminServicer
from control_plane.api.config import ServerConfig
from control_plane.api.health import HealthServicer
from control_plane.api.inference import InferenceServicer
from control_plane.api.server import ApiServer
from control_plane.engine.core import EngineCore
from control_plane.engine.driver import EngineDriver
from control_plane.engine.generations import Generations
from control_plane.engine.router import make_router
from control_plane.engine.scheduler_choice import choose_scheduler
from control_plane.engine.served import ServedModels
from control_plane.scheduling.config import SchedulerConfig
from control_plane.workers.config import WorkersConfig
from control_plane.workers.discovery import discovery_of
from control_plane.workers.fleet import WorkerFleet
from control_plane.workers.grpc_handle import GrpcWorkerHandle
from plugins.config import PluginsConfig
from plugins.logits_loading import load_processors
from plugins.metrics import Metrics
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
    plugins: PluginsConfig = PluginsConfig(),  # noqa: B008  # frozen
) -> None:
    """Serve until `stop` is set, then drain and return. `on_bound` is told the port as soon as it listens.

    While it drains, readiness says NOT_SERVING, requests at hand go on, and new ones are refused with UNAVAILABLE.
    Raises: InvalidConfig: the port cannot be had, or a plug-in cannot be loaded; whatever is a bug, as it was.
    """
    processors = load_processors(plugins.logits_processors, plugins.logits_processor_config)
    warn_of_undeclared(processors)
    core = EngineCore(
        choose_scheduler(scheduler),
        admission,
        make_router(workers.router, secrets.randbelow),
        workers.recovery_timeout_s,
        scheduler.target_inter_token_ms,
    )
    driver = EngineDriver(core, metrics, time.monotonic, admission, workers.step_timeout_s)
    defaults = DefaultSampling(admission.default_sampling, admission.model_defaults)
    models = ServedModels(lambda worker_id: driver.facts(worker_id).intake, defaults.apply)

    def note_absence(why: str) -> None:
        models.absence = why

    generations = Generations()
    health = HealthServicer()
    fleet = WorkerFleet(
        workers,
        discovery_of(workers.address, workers.refresh_s, note_absence),
        lambda address: GrpcWorkerHandle(address, owner_id, workers.max_message_mib * MIB, workers.connect_timeout_s),
        driver,
        models,
        generations,
        health.set_models,
        logits_processors=tuple(each.info.place for each in processors),
    )
    grammars = GrammarCompiler(admission)
    validator = Validator(
        models,
        admission,
        draw_seed=lambda: secrets.randbits(SEED_BITS),
        extra_args=ExtraArgs(processors),
        grammars=grammars,
    )
    api = ApiServer(
        server,
        InferenceServicer(models, validator, driver, admission, metrics, time.monotonic),
        AdminServicer(
            driver,
            fleet.views,
            admission,
            health.set_open,
            fleet.note_intake,
            version("dihedral"),
            time.monotonic,
            [each.info for each in processors],
        ),
        health,
    )
    port = await api.start()
    owner_id = workers.owner_id or f"{socket.gethostname()}:{port}"
    on_bound(port)
    running = (
        asyncio.create_task(driver.run(), name="engine"),
        asyncio.create_task(fleet.run(), name="worker-fleet"),
    )
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await _before_a_bug(stopping, running)
        health.drain()
        await _before_a_bug(asyncio.create_task(driver.drain(server.drain_s), name="drain"), running)
        await api.stop(LAST_WORDS_S)
    finally:
        for task in (*running, stopping):
            task.cancel()
        await asyncio.wait((*running, stopping))
        await api.stop(0)
        grammars.close()


async def _before_a_bug(awaited: asyncio.Task[Any], running: tuple[asyncio.Task[None], ...]) -> None:
    """Wait for a task, or for one of those that never end: a bug ends them, and that is raised."""
    await asyncio.wait((awaited, *running), return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        if task.done():
            awaited.cancel()
            task.result()
