"""status, drain, pause, resume-intake and reset-cache against a small server."""

import json
from collections.abc import Iterator

import pytest

from control_plane.cli.commands import main
from protos.admin.v1 import admin_pb2
from tests.unit.control_plane.cli.scripted_server import ScriptedServer, described

ONE, TWO = "10.0.0.1:50061", "10.0.0.2:50061"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    started = ScriptedServer()
    yield started
    started.stop()


def shown(server: ScriptedServer, capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    """The words of each line that a command prints."""
    assert main([*words, "--address", server.address]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_status_shows_the_server_and_a_line_for_each_worker(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.workers.append(described(TWO))
    server.admin.workers[1].intake = admin_pb2.INTAKE_PAUSED
    server.admin.workers[1].prefix_tokens = 0

    lines = shown(server, capsys, "status")

    assert ["readiness", "serving"] in lines
    assert ["intake", "open"] in lines
    assert ["waiting", "tokens", "300"] in lines
    start = lines.index(["workers"])
    assert lines[start + 1 : start + 5] == [
        *(
            ["free", "cached", "hit"],
            ["worker", "link", "intake", "generation", "running", "waiting", "blocks", "blocks", "rate"],
        ),
        [ONE, "live", "open", "0a1b2c3d", "2", "1", "5", "3", "25%"],
        [TWO, "live", "paused", "0a1b2c3d", "2", "1", "5", "3", "-"],
    ]


def test_status_tells_how_many_workers_of_a_generation_are_live(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.workers.append(described(TWO))
    server.admin.workers[1].link = admin_pb2.LINK_LOST

    lines = shown(server, capsys, "status")

    assert ["live", "workers", "1", "of", "2"] in lines


def test_status_marks_an_old_generation_as_draining_and_tells_the_difference(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    old = described(TWO)
    old.generation, old.is_newest_generation = "tiny-99999999", False
    old.generation_difference.append("weights_version: v0 -> v1")
    server.admin.workers = [old, *server.admin.workers]

    lines = shown(server, capsys, "status")

    table = lines[lines.index(["generations"]) :]
    assert table[1:4] == [
        ["generation", "0a1b2c3d", "99999999"],
        ["state", "newest", "draining"],
        ["differs", "-", "weights_version:", "v0", "->", "v1"],
    ]


def test_status_says_of_a_worker_whose_address_is_gone_that_it_leaves(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.workers[0].is_leaving = True

    main(["status", "--json", "--address", server.address])

    status = json.loads(capsys.readouterr().out)
    assert [worker["detail"] for worker in status["workers"]] == ["its address is gone: it finishes what it has"]
    assert [generation["state"] for generation in status["generations"]] == ["draining"]


def test_status_does_not_say_of_a_leaving_worker_that_it_finishes_when_it_cannot(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    paused, lost = described(ONE), described(TWO)
    paused.intake = admin_pb2.INTAKE_PAUSED
    lost.link, lost.detail = admin_pb2.LINK_LOST, "it was killed"
    paused.is_leaving = lost.is_leaving = True
    server.admin.workers = [paused, lost, described("10.0.0.3:50061")]

    main(["status", "--json", "--address", server.address])

    status = json.loads(capsys.readouterr().out)
    assert [worker["detail"] for worker in status["workers"]] == [
        "its address is gone, and it will be removed",
        "it was killed; its address is gone, and it will be removed",
        "",
    ]
    assert [generation["state"] for generation in status["generations"]] == ["newest"]


def test_status_json_has_numbers_and_full_names(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    main(["status", "--json", "--address", server.address])

    status = json.loads(capsys.readouterr().out)
    assert (status["readiness"], status["intake"], status["num_running"]) == ("serving", "open", 2)
    (worker,) = status["workers"]
    assert (worker["free_blocks"], worker["num_blocks"], worker["kv_mib"]) == (5, 8, 2.0)
    assert (worker["prefix_tokens"], worker["prefix_hits"], worker["hit_rate"]) == (400, 100, "25%")
    assert (worker["generation"], worker["generation_id"]) == ("0a1b2c3d", "tiny-0a1b2c3d")
    (generation,) = status["generations"]
    assert (generation["state"], generation["live_workers"], generation["plugins"]) == (
        "newest",
        "1 of 1",
        "dihedral.schedulers:mine 1.0",
    )


def test_status_of_a_worker_that_was_never_described_has_no_figures(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.workers = [
        admin_pb2.Worker(
            worker_id=ONE, link=admin_pb2.LINK_CONNECTING, intake=admin_pb2.INTAKE_OPEN, detail="is loading"
        )
    ]

    lines = shown(server, capsys, "status")
    main(["status", "--json", "--address", server.address])
    (worker,) = json.loads(capsys.readouterr().out)["workers"]

    assert lines[lines.index(["workers"]) + 1 :] == [
        ["worker", "link", "intake", "detail"],
        [ONE, "connecting", "open", "is", "loading"],
        ["generations"],
        ["none"],
    ]
    assert (worker["num_running"], worker["num_blocks"], worker["detail"]) == (None, None, "is loading")


@pytest.mark.parametrize(
    ("command", "call"), [("drain", "Drain"), ("pause", "Pause"), ("resume-intake", "ResumeIntake")]
)
def test_intake_is_moved_of_the_whole_server_or_of_the_named_workers(
    command: str, call: str, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = shown(server, capsys, command)
    shown(server, capsys, command, ONE, TWO)

    assert server.admin.calls == [(call, []), (call, [ONE, TWO])]
    assert whole == [["server", "intake", "draining"], ["workers"], ["worker", "intake"], [ONE, "paused"]]


def test_intake_can_be_told_as_json(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    main(["drain", "--json", "--address", server.address])

    assert json.loads(capsys.readouterr().out) == {
        "server_intake": "draining",
        "workers": [{"worker": ONE, "intake": "paused"}],
    }


def test_caches_are_reset_of_all_workers_or_of_the_named_ones(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    every = shown(server, capsys, "reset-cache")
    one = shown(server, capsys, "reset-cache", ONE)

    assert server.admin.calls == [("ResetPrefixCache", []), ("ResetPrefixCache", [ONE])]
    assert (every, one) == ([["reset", f"{ONE},", "b:2"]], [["reset", ONE]])


def test_a_refusal_is_one_line_and_exit_code_1(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["drain", "nobody:1", "--address", server.address])

    assert (code, capsys.readouterr().err) == (
        1,
        f"dihedral: worker 'nobody:1' is not known here; known: {ONE}\n",
    )
