"""`dihedral plugins` and `dihedral plugins check`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from control_plane.cli.commands import main
from control_plane.scheduling.first_come import FirstComePolicy
from plugins.types import Request
from tests.architecture.sources import ROOT

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
    assert [each["name"] for each in plugins if each["group"] == "dihedral.logits_processors"] == [
        "ngram_repetition",
        "thinking_budget",
        "watermark",
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


def test_a_logits_processor_is_listed_with_the_arguments_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dihedral.logits_processors]\nbroken = planted_nowhere:Class\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    main(["plugins", "--json"])

    plugins = json.loads(capsys.readouterr().out)["plugins"]
    processors = [each for each in plugins if each["group"] == "dihedral.logits_processors"]
    assert [(each["name"], each["arguments"]) for each in processors] == [
        ("broken", "cannot be loaded; `dihedral plugins check` tells why"),
        ("ngram_repetition", "no_repeat_ngram_size, no_repeat_window"),
        ("thinking_budget", "thinking_budget, thinking_end, thinking_open, thinking_start"),
        ("watermark", "watermark, watermark_delta, watermark_gamma"),
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
    assert len(report["checks"]) == 17


def test_a_policy_that_breaks_one_fails_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", f"{HERE}:Nowhere", "--json"]) == 1

    report = json.loads(capsys.readouterr().out)
    assert report["hook"] == "scheduling policy"
    assert [check for check in report["checks"] if not check["passed"]] == [
        {"name": "every place is a number", "passed": False, "why": "the place of r0 is inf"}
    ]


def test_a_policy_is_checked_at_work_in_a_scheduler_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "control_plane.scheduling.first_come:FirstComePolicy", "--json"]) == 0

    assert len(json.loads(capsys.readouterr().out)["checks"]) == 23


@pytest.mark.parametrize(
    "words",
    [
        ["ngram_repetition"],
        ["plugins.builtin.thinking:ThinkingBudget", "--section", '{"start": [5], "end": [7]}'],
        ["watermark", "--section", '{"key": "a key of these tests"}'],
        ["tests.contract.broken_processors:Fee", "--example", '{"fee": 2}', "--example", '{"fee": 0.5}'],
    ],
    ids=["a name", "a place", "a section", "examples"],
)
def test_a_logits_processor_that_keeps_its_promises_passes(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "check", *words, "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["hook"] == "logits processor"
    assert len(report["checks"]) == 19


def test_a_logits_processor_that_breaks_one_fails_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tests.contract.broken_processors:AcceptsAll", "--example", '{"fee": 2}', "--json"]

    assert main(["plugins", "check", *words]) == 1

    assert [check for check in json.loads(capsys.readouterr().out)["checks"] if not check["passed"]] == [
        {
            "name": "a request without its arguments is declined",
            "passed": False,
            "why": "it accepts a request that gives none of its arguments",
        }
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--example", "{"], "--example '{' is no JSON: "),
        (["--example", "[1]"], "--example '[1]' must be a JSON object, such as {\"size\": 3}"),
        (["--section", "7"], "--section '7' must be a JSON object"),
    ],
)
def test_arguments_of_a_check_must_be_objects(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "check", "watermark", *words]) == 2

    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("example", "complaint"),
    [
        ('{"no_repeat_ngram_size": 1}', "sampling.extra_args.no_repeat_ngram_size: 1 is less than the minimum of 2"),
        ('{"no_repeat_ngram_sise": 3}', "sampling.extra_args.no_repeat_ngram_sise: no logits processor reads it; did"),
    ],
)
def test_an_example_that_the_processor_does_not_declare_is_no_fault_of_its(
    example: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "check", "ngram_repetition", "--example", example]) == 2

    assert f"--example {example} is none: {complaint}" in " ".join(capsys.readouterr().err.split())


def test_without_torch_a_logits_processor_is_not_checked_and_the_remedy_is_told() -> None:
    command = [sys.executable, "-m", "tests.architecture.torch_free", "control_plane.cli.commands:main"]
    check = subprocess.run(
        [*command, "plugins", "check", "watermark"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert check.returncode == 2
    assert "torch is not installed here; pip install 'dihedral[worker]'" in " ".join(check.stderr.split())


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "nothing",
            "known: fair_share, fcfs, ngram_repetition, priority, thinking_budget, watermark;",
        ),
        (
            "pathlib:Path",
            "must be a subclass of plugins.scheduler.Scheduler, plugins.scheduler.SchedulingPolicy or plugins.logits.",
        ),
        (
            "pathlib:os",
            "must be a subclass of plugins.scheduler.Scheduler, plugins.scheduler.SchedulingPolicy or plugins.logits.",
        ),
    ],
)
def test_what_has_no_suite_is_refused(name: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", name]) == 2

    assert complaint in capsys.readouterr().err
