"""`dihedral serve` and `dihedral control-plane`: the control plane in this process, the worker in a child.

Decides the order of starting and ending; `worker_process.py` restarts the worker, `control_plane/app.py` serves.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, TextIO

from control_plane.admission.config import AdmissionConfig
from control_plane.api.config import ServerConfig
from control_plane.app import run_control_plane
from control_plane.cli.client import Client, local_address
from control_plane.cli.flags import to_arguments
from control_plane.cli.launch import Context, Invocation
from control_plane.cli.worker_process import WorkerProcess
from control_plane.config import Config
from control_plane.plugin_guard import without_tensors
from control_plane.scheduling.config import SchedulerConfig
from control_plane.telemetry import MetricsConfig
from control_plane.workers.config import WorkersConfig
from plugins.config import PluginsConfig
from plugins.errors import InvalidConfig, ServingError

logger = logging.getLogger(__name__)

WORKER_SECTIONS = ("worker", "plugins", "log", "metrics")  # what the child reads
GRACE_S = 5.0  # how long the worker may take to end, after the control plane has drained


def control_plane(context: Context) -> int:
    """Serve with a worker that runs elsewhere, until SIGTERM or SIGINT. Returns the exit code."""
    with without_tensors():
        return asyncio.run(_run(context, context.section(WorkersConfig), None))


def serve(context: Context) -> int:
    """Serve with a worker of our own, until SIGTERM or SIGINT. Returns the exit code. Its place is settled already.

    Raises: WorkerGaveUp: the worker dies before it can serve.
        InvalidConfig: a flag names another worker; WorkerRefused: the worker's configuration or model is wrong.
    """
    if "workers.address" in context.invocation.flags:
        raise InvalidConfig("workers.address: serve starts a worker of its own; use control-plane with one elsewhere")
    worker = WorkerProcess(worker_command(context.invocation), os.environ, GRACE_S)
    with without_tensors():
        return asyncio.run(_run(context, context.section(WorkersConfig), worker))


def settle_worker(config: Config) -> Config:
    """Return the configuration of `serve` with the place that our worker takes, in both planes' sections.

    Raises: InvalidConfig: the worker's host is not an address of this machine.
    """
    host, port = worker_place(config)
    return config.replaced({"worker.port": port, "workers.address": local_address(host, port)})


def worker_command(invocation: Invocation) -> list[str]:
    """Return the command of our worker: the same flags, file and environment, and ports of its own."""
    values = {key: value for key, value in invocation.flags.items() if key.partition(".")[0] in WORKER_SECTIONS}
    values["worker.port"] = invocation.config.resolved(["worker"])["worker"]["port"]
    metrics_port = invocation.config.section(MetricsConfig).port
    if metrics_port is not None:
        values["metrics.port"] = metrics_port + 1 if 0 < metrics_port < 65535 else 0
    file = [] if invocation.file is None else [f"--config={invocation.file}"]
    # -P: a file of the current folder never takes the place of a module.
    return [sys.executable, "-P", "-m", "control_plane.cli", "worker", *to_arguments(values), *file]


def worker_place(config: Config) -> tuple[str, int]:
    """Return where our worker listens: its host, and the port that was chosen, or else one that is free now.

    Raises: InvalidConfig: the host is not an address of this machine.
    """
    worker = config.resolved(["worker"])["worker"]
    host, port = str(worker["host"]), worker["port"]
    if config.origin("worker.port") is not None and isinstance(port, int) and port > 0:
        return host, port
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            chosen: int = free.getsockname()[1]
    except OSError as error:
        raise InvalidConfig(
            f"worker.host {host!r} is not an address of this machine ({error.strerror}); choose another"
        ) from error
    return host, chosen


async def _run(context: Context, workers: WorkersConfig, worker: WorkerProcess | None) -> int:
    """Run the control plane, and the worker as soon as the control plane has its port, until one of them ends."""
    stop, stop_worker = asyncio.Event(), asyncio.Event()
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        run_control_plane(
            context.section(ServerConfig),
            context.section(AdmissionConfig),
            context.section(SchedulerConfig),
            workers,
            context.metrics,
            stop,
            bound.set_result,
            context.section(PluginsConfig),
        )
    )
    _stop_on_signals(stop, serving)
    first: tuple[asyncio.Future[Any], ...] = (serving, bound)
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    others: list[asyncio.Task[None]] = []
    if bound.done():
        gc.freeze()  # what the start has built lives as long as the process: no collection need look at it again
        address = local_address(context.section(ServerConfig).host, bound.result())
        note_served = worker.note_served if worker else lambda: None
        announcing = asyncio.create_task(announce(address, context.metrics_url, note_served, sys.stdout))
        others = [asyncio.create_task(worker.run(stop_worker))] if worker else []
        await asyncio.wait({serving, *others}, return_when=asyncio.FIRST_COMPLETED)
        stop.set()  # the worker gave up, or the control plane has ended anyway
        await asyncio.wait({serving})
        announcing.cancel()
        stop_worker.set()
        for task in others:
            await task
    if serving.cancelled():
        logger.warning("stopped_without_draining")
        return 1
    serving.result()
    return 0


def _stop_on_signals(stop: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Let the first SIGTERM or SIGINT begin the drain, and a second one end it."""

    def handle(number: signal.Signals) -> None:
        logger.info("signal_received", extra={"signal": number.name})
        if stop.is_set():
            serving.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle, number)


async def announce(address: str, metrics_url: str | None, note_served: Callable[[], None], out: TextIO) -> None:
    """Say once, on `out` and in the log, that requests are taken; call `note_served` each time that becomes true.

    Nobody need read it: what is written for a reader that has gone is lost.
    """
    is_told = False
    with contextlib.suppress(ServingError):  # the server has ended
        async with Client(address) as client:
            async for is_ready in client.readiness():
                if not is_ready:
                    continue
                note_served()
                if is_told:
                    continue
                models = ", ".join(await client.models())
                is_told = True
                logger.info("server_ready", extra={"models": models, "address": address})
                metrics = f", metrics at {metrics_url}" if metrics_url else ""
                with contextlib.suppress(BrokenPipeError):
                    out.write(f"Ready: {models} at {address}{metrics}\n")
                    out.flush()
