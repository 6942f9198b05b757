"""What `dihedral serve` gives its worker: the same configuration, and ports of its own."""

import asyncio
import io
import logging
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.cli.client import local_address
from control_plane.cli.launch import Context, Invocation
from control_plane.cli.serve import announce, serve, settle_worker, worker_command, worker_place
from control_plane.config import Source, find_sections, load_config
from control_plane.telemetry import PrometheusMetrics
from plugins.errors import InvalidConfig
from protos.inference.v1.inference_pb2 import ListModelsRequest
from tests.unit.control_plane.api.running import running


def invocation(flags: dict[str, object], file: Path | None = None) -> Invocation:
    config = load_config(find_sections(), Source(flags, "on the command line", str), {}, file)
    return Invocation(config, tuple(find_sections()), flags, file)


def test_the_worker_gets_the_flags_that_it_reads_and_an_address_of_its_own() -> None:
    flags: dict[str, object] = {
        "worker.model": "m",
        "log.level": "debug",
        "server.port": 1,
        "scheduler.max_sequences": 2,
        "plugins.logits_processors": ("a", "b:C"),
    }
    given = invocation(flags)

    command = worker_command(replace(given, config=given.config.replaced({"worker.port": 50099})))

    assert command[:5] == [sys.executable, "-P", "-m", "control_plane.cli", "worker"]
    assert command[5:] == [
        "--worker.model=m",
        "--log.level=debug",
        "--plugins.logits-processors=a",
        "--plugins.logits-processors=b:C",
        "--worker.port=50099",
    ]


def test_the_worker_reads_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("log: {level: debug}\n", encoding="utf-8")

    command = worker_command(invocation({}, file))

    assert command[-1] == f"--config={file}"


@pytest.mark.parametrize(("ours", "workers"), [(9000, 9001), (0, 0), (65535, 0)])
def test_the_worker_serves_its_metrics_beside_those_of_the_control_plane(ours: int, workers: int) -> None:
    assert f"--metrics.port={workers}" in worker_command(invocation({"metrics.port": ours}))


def test_the_metrics_ports_of_both_planes_differ_by_default() -> None:
    assert not [word for word in worker_command(invocation({})) if word.startswith("--metrics.port")]


def test_a_place_that_was_chosen_is_kept() -> None:
    config = invocation({"worker.host": "127.0.0.2", "worker.port": 50123}).config

    assert worker_place(config) == ("127.0.0.2", 50123)


def test_the_place_of_the_worker_is_a_part_of_the_configuration_of_both_planes() -> None:
    flags: dict[str, object] = {"worker.host": "0.0.0.0", "worker.port": 50123}

    settled = settle_worker(invocation(flags).config).resolved(["worker", "workers"])

    assert (settled["worker"]["host"], settled["worker"]["port"]) == ("0.0.0.0", 50123)
    assert settled["workers"]["address"] == "127.0.0.1:50123"


def test_else_the_worker_gets_a_port_that_is_free() -> None:
    host, port = worker_place(invocation({}).config)

    assert host == "127.0.0.1"
    socket.create_server((host, port)).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_a_host_that_is_not_ours_is_refused_by_name(host: str) -> None:
    with pytest.raises(InvalidConfig, match=f"worker.host '{host}' is not an address of this machine"):
        worker_place(invocation({"worker.host": host}).config)


class Pipe(io.StringIO):
    """Notes each line that was written whole; a reader that has gone breaks it, as on a real pipe."""

    def __init__(self, has_reader: bool) -> None:
        super().__init__()
        self.flushed = asyncio.Event()
        self._has_reader = has_reader

    def flush(self) -> None:
        self.flushed.set()
        if not self._has_reader:
            raise BrokenPipeError


@pytest.mark.parametrize("has_reader", [True, False])
async def test_readiness_is_told_once_and_noted_each_time_also_when_nobody_reads_it(
    has_reader: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    noted, out = asyncio.Event(), Pipe(has_reader)
    async with running() as run:
        address = f"127.0.0.1:{run.port}"
        announcing = asyncio.create_task(announce(address, "http://m", noted.set, out))
        run.health.set_models(["small"])
        await out.flushed.wait()
        noted.clear()

        while not noted.is_set() and not announcing.done():  # a watcher may miss a change that was short
            run.health.set_models([])
            await run.inference.ListModels(ListModelsRequest())
            run.health.set_models(["small"])
            await run.inference.ListModels(ListModelsRequest())
        announcing.cancel()
        await asyncio.wait((announcing,))

    assert noted.is_set()
    assert out.getvalue() == f"Ready: small at {address}, metrics at http://m\n"
    (event,) = [record.__dict__ for record in caplog.records if record.message == "server_ready"]
    assert (event["models"], event["address"]) == ("small", address)


def test_an_address_of_another_worker_is_refused() -> None:
    context = Context(invocation({"workers.address": "10.0.0.1:5"}), PrometheusMetrics("control_plane"), None)

    with pytest.raises(InvalidConfig, match="serve starts a worker of its own; use control-plane with one elsewhere"):
        serve(context)


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1:5"), ("::", "[::1]:5"), ("10.1.2.3", "10.1.2.3:5")],
)
def test_what_listens_on_every_interface_is_reached_over_loopback(host: str, address: str) -> None:
    assert local_address(host, 5) == address
