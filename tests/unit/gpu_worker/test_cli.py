"""The worker's command: what it says while it starts, and what it refuses to start with."""

import asyncio
import io
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.workers.grpc_handle import GrpcWorkerHandle
from gpu_worker.cli import LoadingStopped, SayProgress, run_worker
from gpu_worker.config import WorkerConfig
from gpu_worker.server import WorkerServer
from gpu_worker.worker import Worker
from plugins.errors import InvalidConfig, ModelNotFound, WorkerLost
from plugins.metrics import Metrics, NoMetrics
from plugins.types import StepResult, WorkerInfo
from tests.fakes import worker_info

ERASED_LINE = "\x1b[2K"


class Terminal(io.StringIO):
    """Text output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class BrokenWorker:
    """A worker whose device is lost from the start."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def open(self) -> WorkerInfo:
        return worker_info()

    async def results(self) -> AsyncIterator[StepResult]:
        raise self._error
        yield StepResult(seq=1)

    async def close(self) -> None:
        return None


def dummy(port: int = 0) -> WorkerConfig:
    return WorkerConfig(load_format="dummy", dtype="float32", threads=1, num_blocks=8, max_model_len=128, port=port)


async def until_event(caplog: pytest.LogCaptureFixture, event: str) -> logging.LogRecord:
    """Wait for a log event of the worker."""
    arrived: asyncio.Queue[logging.LogRecord] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, record)

    listener = Listener()
    caplog.set_level(logging.INFO)
    logging.getLogger().addHandler(listener)
    try:
        while (record := await arrived.get()).getMessage() != event:
            continue
        return record
    finally:
        logging.getLogger().removeHandler(listener)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_a_signal_and_ends_with_0(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    serving = asyncio.create_task(until_event(caplog, "worker_serving"))
    running = asyncio.create_task(run_worker(dummy(), NoMetrics(), None, io.StringIO()))
    await serving

    os.kill(os.getpid(), number)

    assert await running == 0
    assert [record.getMessage() for record in caplog.records if record.name == "gpu_worker.cli"] == [
        "worker_listening",
        "model_loading",
        "worker_serving",
        "signal_received",
        "worker_stopping",
    ]


async def test_a_signal_while_it_loads_stops_the_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    def load_for_ever(config: WorkerConfig, metrics: Metrics, progress: SayProgress, processors: object = ()) -> Worker:
        while True:
            started.set()
            progress("load", 1, 1000)

    monkeypatch.setattr("gpu_worker.cli.build_worker", load_for_ever)
    running = asyncio.create_task(run_worker(dummy(), NoMetrics(), None, io.StringIO()))
    await asyncio.to_thread(started.wait, 10)

    os.kill(os.getpid(), signal.SIGTERM)

    assert await running == 0


async def test_a_second_signal_ends_the_process_whatever_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    started, ended = threading.Event(), threading.Event()
    codes: list[int] = []

    def hang(config: WorkerConfig, metrics: Metrics, progress: SayProgress, processors: object = ()) -> Worker:
        started.set()
        if not ended.wait(10):
            pytest.fail("never ended")
        raise LoadingStopped

    def note_exit(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr("gpu_worker.cli.build_worker", hang)
    running = asyncio.create_task(run_worker(dummy(), NoMetrics(), None, io.StringIO(), note_exit))
    await asyncio.to_thread(started.wait, 10)

    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)

    await running
    assert codes == [1]
    events = [(record.getMessage(), record.__dict__.get("signal")) for record in caplog.records]
    assert ("stopped_without_waiting", None) in events
    assert {("signal_received", "SIGTERM"), ("signal_received", "SIGINT")} <= set(events)


async def test_a_worker_that_can_compute_no_more_ends_its_process_with_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = RuntimeError("device lost")
    monkeypatch.setattr(
        "gpu_worker.cli.build_worker", lambda config, metrics, progress, processors=(): BrokenWorker(broken)
    )
    serving = asyncio.create_task(until_event(caplog, "worker_serving"))
    running = asyncio.create_task(run_worker(dummy(), NoMetrics(), None, io.StringIO()))
    handle = GrpcWorkerHandle(f"127.0.0.1:{(await serving).__dict__['port']}", "me", 1_000_000, timeout_s=30.0)

    await handle.open()
    with pytest.raises(WorkerLost):
        await anext(handle.results())

    await handle.close()
    assert await running == 1
    failed = next(record for record in caplog.records if record.getMessage() == "worker_failed")
    assert failed.exc_info is not None
    assert failed.exc_info[1] is broken


async def test_a_terminal_shows_a_bar_that_is_gone_before_the_next_event(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    events = logging.StreamHandler(terminal)
    serving = asyncio.create_task(until_event(caplog, "worker_serving"))

    logging.getLogger().addHandler(events)
    try:
        running = asyncio.create_task(run_worker(dummy(), NoMetrics(), None, terminal))
        await serving
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    finally:
        logging.getLogger().removeHandler(events)

    before, _, rest = terminal.getvalue().partition("model_loading\n")
    bar, _, after = rest.partition("model_loaded\n")
    assert "load dummy" in bar
    assert bar.endswith(ERASED_LINE)
    assert "load" not in before + after.replace("loaded", "")


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (WorkerConfig(port=0), "smollm2-135m-instruct"),
        (WorkerConfig(load_format="GGUF", port=0), "smollm2-135m-instruct"),
        (WorkerConfig(load_format="Dummy", port=0), "dummy"),
        (WorkerConfig(load_format="dummy", model="/models/shape", port=0), "/models/shape"),
        (WorkerConfig(model="org/name", served_model_name="chat", port=0), "chat"),
    ],
)
async def test_loading_says_which_model_it_is(
    config: WorkerConfig, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def stopped(config: WorkerConfig, metrics: Metrics, progress: SayProgress, processors: object = ()) -> Worker:
        raise LoadingStopped

    monkeypatch.setattr("gpu_worker.cli.build_worker", stopped)

    await run_worker(config, NoMetrics(), None, io.StringIO())

    loading = [record for record in caplog.records if record.getMessage() == "model_loading"]
    assert [record.__dict__["model"] for record in loading] == [model]


async def test_a_port_in_use_is_told_before_anything_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    other = WorkerServer("127.0.0.1", 0, 5.0, lambda error: None)
    port = await other.start()

    with pytest.raises(InvalidConfig, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"):
        await run_worker(dummy(port), NoMetrics(), None, io.StringIO())

    await other.stop()
    assert "model_loading" not in [record.getMessage() for record in caplog.records]


async def test_a_model_that_is_not_there_ends_the_process_with_its_message(tmp_path: Path) -> None:
    config = WorkerConfig(model=str(tmp_path / "absent.gguf"), port=0)

    with pytest.raises(ModelNotFound, match="absent.gguf"):
        await run_worker(config, NoMetrics(), None, io.StringIO())
