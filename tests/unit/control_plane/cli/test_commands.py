"""The command line itself: help that fits a screen, clear refusals, and what a serving command is given."""

import io
import json
import logging
import urllib.request
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from control_plane.cli.commands import find_commands, main
from control_plane.cli.launch import Context, Invocation, launch
from control_plane.config import Source, find_sections, load_config
from control_plane.logs import LogConfig


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "100")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


OPERATING = ("drain", "pause", "resume-intake", "reset-cache")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--help"])

    text = capsys.readouterr().out
    assert code == 0
    for command in ("serve", "control-plane", "worker", "generate", "chat", "status", "--version", *OPERATING):
        assert f"│ {command}" in text
    assert len(text.splitlines()) <= 24


@pytest.mark.parametrize("command", ["serve", "control-plane", "worker", "generate", "chat", "status", *OPERATING])
def test_the_help_of_a_command_fits_a_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([command, "--help"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_help_groups_the_common_flags_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])

    text = capsys.readouterr().out
    assert [group for group in ("Model and worker", "Server", "Logs and metrics") if f"─ {group} ─" in text] == [
        "Model and worker",
        "Server",
        "Logs and metrics",
    ]
    assert "--dtype STR" in text
    assert "[bfloat16]" in text
    assert "[50051]" in text


def test_help_all_shows_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    sections = find_sections()

    main(["serve", "--help-all"])

    text = capsys.readouterr().out
    assert len(sections) == 8
    for name, kind in sections.items():
        for key in kind.__dataclass_fields__:
            flag = key.replace("_", "-")
            assert f"--{flag} " in text or f"--{name}.{flag}" in text


def test_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])

    assert capsys.readouterr().out == "0.1.0\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--prt", "1"], "Unknown option: --prt. Did you mean --port? See `dihedral serve --help`."),
        (["sevre"], 'Unknown command "sevre". Did you mean "serve"?'),
        (["nonsense"], 'Unknown command "nonsense". Available commands: serve, control-plane, worker, generate,'),
        (["serve", "--port", "many"], 'Invalid value for --port: unable to convert "many" into int.'),
        (["serve", "--port", "70000"], "server.port must be in [0, 65535], is 70000 (--port on the command line)"),
        (["control-plane", "--worker.seed", "1"], "Unknown option: --worker.seed."),
        (["serve", "a", "b"], "Words are left over: b. See `dihedral serve --help`."),
        (["generate", "the", "sea", "is"], "Words are left over: sea is. Quote the prompt; options go before `--`."),
        (
            ["generate", "--", "the", "--top-k"],
            "Words are left over: --top-k. Quote the prompt; options go before `--`.",
        ),
        (["generate", "--", "--model", "--max-tokens=3"], "Words are left over: --max-tokens. Quote the prompt;"),
    ],
)
def test_wrong_words_are_one_clear_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(words)

    complaint = capsys.readouterr().err
    assert code == 2
    assert complaint.startswith(f"dihedral: {message}")
    assert complaint.count("\n") == 1


def test_a_wrong_file_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("server: {prot: 1}\n", encoding="utf-8")

    code = main(["serve", "--config", str(file)])

    assert code == 2
    assert capsys.readouterr().err == (f"dihedral: unknown key server.prot in {file}; did you mean server.port?\n")


def test_the_worker_is_found_by_entry_point_and_reads_its_own_section() -> None:
    worker = next(command for command in find_commands(find_sections()) if command.name == "worker")

    assert worker.sections == ("worker", "plugins", "log", "metrics")
    assert worker.positional == "worker.model"
    assert worker.plane == "worker"


def test_a_command_whose_plane_is_not_installed_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = EntryPoint("telescope", "no_such_package.cli:main", "dihedral.commands")
    monkeypatch.setattr("control_plane.cli.commands.entry_points", lambda group: [broken])

    code = main(["telescope"])

    assert code == 2
    assert capsys.readouterr().err == (
        "dihedral: command 'telescope' (no_such_package.cli:main of an unknown distribution) cannot be loaded: "
        "No module named 'no_such_package'; install what it needs\n"
    )


def test_no_words_at_all_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "│ serve" in capsys.readouterr().out


def invocation(values: dict[str, object]) -> Invocation:
    sections = find_sections()
    config = load_config(sections, Source(values, "on the command line", str), {}, None)
    return Invocation(config, ("log", "metrics"), values, None)


def test_a_serving_command_gets_its_sections_and_working_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    pages: list[str] = []

    def run(context: Context) -> int:
        with urllib.request.urlopen(context.metrics_url or "", timeout=10) as answer:
            pages.append(answer.read().decode())
        return 7 if context.section(LogConfig).level == "error" else 0

    code = launch(invocation({"metrics.port": 0, "log.level": "error"}), "worker", run)

    assert code == 7
    assert 'dihedral_build_info{plane="worker"' in pages[0]


def test_the_resolved_configuration_is_logged_once_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)

    launch(invocation({"metrics.enabled": False}), "control_plane", lambda context: 0)

    events = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["config_resolved"]
    assert events[0]["log"] == {"level": "info", "format": "auto"}
    assert events[0]["metrics"] == {"enabled": False, "host": "127.0.0.1", "port": None}


def test_metrics_that_are_off_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    urls: list[str | None] = []

    def run(context: Context) -> int:
        urls.append(context.metrics_url)
        return 0

    launch(invocation({"metrics.enabled": False}), "control_plane", run)

    assert urls == [None]
