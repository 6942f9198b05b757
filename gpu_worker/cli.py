"""`dihedral worker`: one worker process, from its configuration to its end.

Starts and stops; serving is `gpu_worker/server.py`, building the worker is `gpu_worker/factory.py`.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gpu_worker.config import WorkerConfig
from gpu_worker.factory import build_worker
from gpu_worker.loading.open import unnamed_model
from gpu_worker.parent import VARIABLE, ParentWatch, parse_fd
from gpu_worker.server import WorkerServer
from gpu_worker.worker import Worker
from plugins.commands import CommandContext
from plugins.config import PluginsConfig
from plugins.logits_loading import LoadedProcessor, load_processors
from plugins.metrics import Metrics

logger = logging.getLogger(__name__)

SayProgress = Callable[[str, int, int], None]  # phase, done, total


class LoadingStopped(Exception):
    """The process was asked to stop while it loaded."""


def main(context: CommandContext) -> int:
    """Serve one model until SIGTERM, SIGINT or the end of the parent. Returns 1 if the worker failed.

    A second signal ends the process where it stands, with 1.
    Raises: InvalidConfig: the port, the model or its files, or a plug-in.
    """
    plugins = context.section(PluginsConfig)
    processors = load_processors(plugins.logits_processors, plugins.logits_processor_config)
    parent = os.environ.get(VARIABLE)
    parent_fd = None if parent is None else parse_fd(parent)
    config = context.section(WorkerConfig)
    return asyncio.run(run_worker(config, context.metrics, parent_fd, sys.stderr, processors=processors))


async def run_worker(
    config: WorkerConfig,
    metrics: Metrics,
    parent_fd: int | None,
    out: TextIO,
    exit_now: Callable[[int], object] = os._exit,
    processors: Sequence[LoadedProcessor] = (),
) -> int:
    """Listen, load, serve, stop. `out` shows the progress of loading if it is a terminal."""
    stop = asyncio.Event()
    _stop_on_signals(stop, out, exit_now)
    if parent_fd is not None:
        _stop_with_parent(stop, parent_fd)
    failures: list[Exception] = []

    def note_failure(error: Exception) -> None:
        failures.append(error)
        stop.set()

    server = WorkerServer(config.host, config.port, config.lease_s, note_failure)
    port = await server.start()
    logger.info("worker_listening", extra={"host": config.host, "port": port})
    worker = None
    try:
        worker = await _load(config, metrics, processors, stop, out)
        if worker is not None:
            await server.begin(worker)
            logger.info("worker_serving", extra={"host": config.host, "port": port})
            await stop.wait()
    finally:
        logger.info("worker_stopping")
        await server.stop()
        if worker is not None:
            await worker.close()
    if failures:
        logger.error("worker_failed", exc_info=failures[0])
    return 1 if failures else 0


async def _load(
    config: WorkerConfig, metrics: Metrics, processors: Sequence[LoadedProcessor], stop: asyncio.Event, out: TextIO
) -> Worker | None:
    """Load in a thread, while the loop answers probes. Returns None if it was stopped: noticed between tensors."""
    model = config.served_model_name or config.model or unnamed_model(config.load_format)
    logger.info("model_loading", extra={"model": model})
    with _progress(model, out) as say:

        def step(phase: str, done: int, total: int) -> None:
            if stop.is_set():
                raise LoadingStopped
            say(phase, done, total)

        with suppress(LoadingStopped):
            return await asyncio.to_thread(build_worker, config, metrics, step, processors)
    return None


@contextmanager
def _progress(model: str, out: TextIO) -> Iterator[SayProgress]:
    """Draw a bar on a terminal, from the first tensor to the last, so that log events around it keep their lines."""
    if not out.isatty():
        yield lambda phase, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(file=out), transient=True)
    task = bar.add_task(f"loading {model}", total=None)

    def draw(phase: str, done: int, total: int) -> None:
        bar.start()  # once; it does nothing while the bar is there
        bar.update(task, description=f"{phase} {model}", completed=done, total=total)
        if done == total:
            bar.stop()

    try:
        yield draw
    finally:
        bar.stop()


def _stop_on_signals(stop: asyncio.Event, out: TextIO, exit_now: Callable[[int], object]) -> None:
    """Let the first SIGTERM or SIGINT ask the process to end, and a second one make it.

    Ending waits for threads: for the file that is being downloaded, the weights being packed, the step that computes.
    """

    def handle(number: signal.Signals) -> None:
        logger.info("signal_received", extra={"signal": number.name})
        if stop.is_set():
            logger.warning("stopped_without_waiting")
            Console(file=out).show_cursor()  # which a bar has hidden
            exit_now(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle, number)


def _stop_with_parent(stop: asyncio.Event, parent_fd: int) -> None:
    loop = asyncio.get_running_loop()

    def on_gone() -> None:
        with suppress(RuntimeError):  # the loop is closed: this process is ending anyway
            loop.call_soon_threadsafe(stop.set)

    ParentWatch(parent_fd, on_gone).start()
