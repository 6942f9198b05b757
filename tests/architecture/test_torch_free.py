"""The control plane starts where torch is not installed."""

import subprocess
import sys

from tests.architecture.sources import ROOT, modules


def run_torch_free(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.architecture.torch_free", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_module_of_the_control_plane_is_importable_without_torch() -> None:
    names = modules("control_plane", "protos", "plugins")

    run = run_torch_free("tests.architecture.torch_free:import_all", *names)

    assert run.returncode == 0, run.stderr


def test_the_command_line_prints_its_help_without_torch() -> None:
    run = run_torch_free("control_plane.cli:main", "--help")

    assert run.returncode == 0, run.stderr
    assert "serve" in run.stdout


def test_the_blocker_blocks_what_the_worker_needs() -> None:
    run = run_torch_free("tests.architecture.torch_free:import_all", "torch.nn")

    assert run.returncode == 1
    assert "torch is blocked in this process" in run.stderr
