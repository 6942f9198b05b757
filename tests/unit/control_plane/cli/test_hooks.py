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


def test_what_is_built_in_is_listed_beside_what_is_plugged_in(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plugins", "--json"])

    plugins = json.loads(capsys.readouterr().out)["plugins"]
    assert [(each["name"], each["place"]) for each in plugins if each["group"] == "dihedral.scheduling_policies"] == [
        ("fair_share", "control_plane.scheduling.fair_share:FairSharePolicy"),
        ("fcfs", "control_plane.scheduling.first_come:FirstComePolicy"),
        ("priority", "control_plane.scheduling.priority:PriorityPolicy"),
    ]
    assert [each["place"] for each in plugins if each["group"] == "dihedral.schedulers"] == [
        "control_plane.scheduling.run_ahead:RunAheadScheduler",
        "control_plane.scheduling.synchronous:SynchronousScheduler",
    ]


def test_plug_ins_are_shown_by_group_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plugins"])

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = lines.index(["dihedral.scheduling_policies"])
    assert lines[start + 1 : start + 5] == [
        ["name", "place", "distribution"],
        ["fair_share", "control_plane.scheduling.fair_share:FairSharePolicy", "dihedral", "0.1.0"],
        ["fcfs", "control_plane.scheduling.first_come:FirstComePolicy", "dihedral", "0.1.0"],
        ["priority", "control_plane.scheduling.priority:PriorityPolicy", "dihedral", "0.1.0"],
    ]


@pytest.mark.parametrize("name", ["fcfs", "priority", "fair_share"])
def test_a_built_in_policy_is_checked_by_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", name, "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["hook"] == "scheduling policy"


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
        ("nothing", "unknown plug-in 'nothing'; known: fair_share, fcfs, priority;"),
        ("pathlib:Path", "must be a subclass of plugins.scheduler.Scheduler or plugins.scheduler.SchedulingPolicy"),
        ("pathlib:os", "must be a subclass of plugins.scheduler.Scheduler or plugins.scheduler.SchedulingPolicy"),
    ],
)
def test_what_has_no_suite_is_refused(name: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", name]) == 2

    assert complaint in capsys.readouterr().err
