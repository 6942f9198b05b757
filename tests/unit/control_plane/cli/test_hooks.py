"""`dihedral plugins` and `dihedral plugins check`."""

import json

import pytest

from control_plane.cli.commands import main
from control_plane.scheduling.first_come import FirstComePolicy
from plugins.types import Request

HERE = "tests.unit.control_plane.cli.test_hooks"


class Nowhere(FirstComePolicy):
    def order(self, request: Request) -> float:
        return float("inf")


def test_every_entry_point_is_listed_with_its_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0

    plugins = json.loads(capsys.readouterr().out)["plugins"]
    assert {
        "group": "dihedral.commands",
        "name": "worker",
        "place": "gpu_worker.cli:main",
        "distribution": "dihedral 0.1.0",
    } in plugins


def test_a_scheduler_that_keeps_its_promises_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "control_plane.scheduling.synchronous:SynchronousScheduler", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["hook"] == "scheduler"
    assert [check["name"] for check in report["checks"] if not check["passed"]] == []
    assert len(report["checks"]) == 14


def test_a_policy_that_breaks_one_fails_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", f"{HERE}:Nowhere", "--json"]) == 1

    report = json.loads(capsys.readouterr().out)
    assert report["hook"] == "scheduling policy"
    assert [check for check in report["checks"] if not check["passed"]] == [
        {"name": "every place is a number", "passed": False, "why": "the place of r0 is inf"}
    ]


def test_a_policy_is_checked_at_work_in_a_scheduler_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "control_plane.scheduling.first_come:FirstComePolicy", "--json"]) == 0

    assert len(json.loads(capsys.readouterr().out)["checks"]) == 20


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nothing", "unknown plug-in 'nothing'; known: <none>"),
        ("pathlib:Path", "is neither a Scheduler nor a SchedulingPolicy of plugins.scheduler"),
    ],
)
def test_what_has_no_suite_is_refused(name: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", name]) == 2

    assert complaint in capsys.readouterr().err
