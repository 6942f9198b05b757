"""What `dihedral serve` gives its worker: the same configuration, and ports of its own."""

import socket
import sys
from pathlib import Path

import pytest

from control_plane.api.config import ServerConfig
from control_plane.cli.client import local_address
from control_plane.cli.launch import Invocation
from control_plane.cli.serve import worker_command, worker_port
from control_plane.config import Source, find_sections, load_config


def invocation(flags: dict[str, object], file: Path | None = None) -> Invocation:
    config = load_config(find_sections(), Source(flags, "on the command line", str), {}, file)
    return Invocation(config, tuple(find_sections()), flags, file)


def test_the_worker_gets_the_flags_that_it_reads_and_an_address_of_its_own() -> None:
    command = worker_command(
        invocation({"worker.model": "m", "log.level": "debug", "server.port": 1, "scheduler.max_sequences": 2}), 50099
    )

    assert command[:5] == [sys.executable, "-P", "-m", "control_plane.cli", "worker"]
    assert command[5:] == ["--worker.model=m", "--log.level=debug", "--worker.host=127.0.0.1", "--worker.port=50099"]


def test_the_worker_reads_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("log: {level: debug}\n", encoding="utf-8")

    command = worker_command(invocation({}, file), 50099)

    assert command[-1] == f"--config={file}"


@pytest.mark.parametrize(("ours", "workers"), [(9000, 9001), (0, 0), (65535, 0)])
def test_the_worker_serves_its_metrics_beside_those_of_the_control_plane(ours: int, workers: int) -> None:
    assert f"--metrics.port={workers}" in worker_command(invocation({"metrics.port": ours}), 50099)


def test_the_metrics_ports_of_both_planes_differ_by_default() -> None:
    assert not [word for word in worker_command(invocation({}), 50099) if word.startswith("--metrics.port")]


def test_a_port_that_was_chosen_is_kept() -> None:
    assert worker_port(invocation({"worker.port": 50123}).config) == 50123


def test_else_the_worker_gets_a_port_that_is_free() -> None:
    port = worker_port(invocation({}).config)

    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1:5"), ("::", "[::1]:5"), ("10.1.2.3", "10.1.2.3:5")],
)
def test_a_server_on_every_interface_is_reached_over_loopback(host: str, address: str) -> None:
    assert local_address(ServerConfig(host=host, port=5)) == address
