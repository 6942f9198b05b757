"""generate, chat and status against a small server that speaks the public protos."""

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from control_plane.cli.commands import main
from control_plane.cli.generate import chat
from control_plane.cli.options import Connection, Sampling
from plugins.errors import FieldViolation, InvalidRequest
from protos.common.v1 import common_pb2
from tests.unit.control_plane.cli.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    started = ScriptedServer()
    yield started
    started.stop()


def test_generate_prints_the_text_and_a_line_break(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["generate", "count", "--address", server.address])

    assert code == 0
    assert capsys.readouterr().out == "one two three\n"
    assert server.inference.requests[0].text == "count"


def test_generate_passes_sampling_on_and_leaves_the_rest_to_the_server(server: ScriptedServer) -> None:
    main(
        ["generate", "count", "--address", server.address, "--max-tokens", "7", "--temperature", "0", "--top-p", "0.5"]
        + ["--top-k", "3", "--min-p", "0.25", "--seed", "11", "--ignore-eos", "--model", "tiny"]
    )

    request = server.inference.requests[0]
    assert request.model == "tiny"
    assert request.sampling == common_pb2.SamplingParams(
        max_tokens=7, temperature=0, top_k=3, top_p=0.5, min_p=0.25, seed=11, ignore_eos=True
    )


def test_generate_tells_priority_salt_and_tenant_under_the_configured_key(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIHEDRAL_ADMISSION__TENANT_KEY", "x-team")

    main(
        ["generate", "count", "--address", server.address]
        + ["--priority=-5", "--cache-salt", "pinch", "--tenant", "red"]
    )

    request = server.inference.requests[0]
    assert (request.priority, request.cache_salt) == (-5, "pinch")
    assert server.inference.metadata[0]["x-team"] == "red"


def test_chat_tells_them_with_each_message(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("first\nsecond\n"))

    main(["chat", "--address", server.address, "--priority", "7", "--tenant", "red"])

    assert [request.priority for request in server.inference.requests] == [7, 7]
    assert [metadata["dihedral-tenant"] for metadata in server.inference.metadata] == ["red", "red"]


def test_who_gives_no_tenant_tells_none(server: ScriptedServer) -> None:
    main(["generate", "count", "--address", server.address])

    assert "dihedral-tenant" not in server.inference.metadata[0]


def test_generate_without_sampling_flags_sets_no_sampling_field(server: ScriptedServer) -> None:
    main(["generate", "count", "--address", server.address])

    assert server.inference.requests[0].sampling == common_pb2.SamplingParams()


def test_generate_chat_sends_a_message(server: ScriptedServer) -> None:
    main(["generate", "--chat", "hello", "--address", server.address])

    messages = server.inference.requests[0].chat.messages
    assert [(message.role, message.content) for message in messages] == [("user", "hello")]


@pytest.mark.parametrize(
    ("text", "prompt"), [("of two\nlines", "of two\nlines"), ("as echo\n", "as echo"), ("a\n\n", "a\n")]
)
def test_generate_reads_its_prompt_from_standard_input_without_the_line_break_that_ends_it(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, text: str, prompt: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))

    main(["generate", "--address", server.address])

    assert server.inference.requests[0].text == prompt


def test_generate_json_tells_everything_at_once(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "count", "--json", "--address", server.address])

    answer = json.loads(capsys.readouterr().out)
    assert answer.pop("first_token_s") <= answer.pop("total_s")
    assert answer == {
        "text": "one two three",
        "token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "stopped_by": None,
        "logprobs": [],
        "others": [],
        "prompt": "",
        "prompt_token_ids": [],
        "prompt_logprobs": [],
        "prompt_tokens": 5,
        "output_tokens": 3,
        "cached_tokens": 0,
    }


def test_a_refusal_is_one_line_with_every_field_and_exit_code_1(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.inference.refusal = InvalidRequest(
        [
            FieldViolation("sampling.top_p", "OUT_OF_RANGE", "must be in (0, 1], is 3"),
            FieldViolation("sampling.max_tokens", "OUT_OF_RANGE", "must be at least 1, is 0"),
        ]
    )

    code = main(["generate", "count", "--top-p", "3", "--max-tokens", "0", "--address", server.address])

    assert code == 1
    assert capsys.readouterr().err == (
        "dihedral: sampling.top_p: must be in (0, 1], is 3; sampling.max_tokens: must be at least 1, is 0\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["x", "--max-tokens=-5", "--seed=-1"],
            "sampling.max_tokens: is -5; must be in [1, 2**32), or left out; "
            "sampling.seed: is -1; must be in [0, 2**64), or left out",
        ),
        (["x", "--top-k=4294967296"], "sampling.top_k: is 4294967296; must be in [0, 2**32), 0 keeps all tokens"),
        (["\udcff"], "prompt: is not valid Unicode: surrogates not allowed"),
        (["x", "--priority=2147483648"], "priority: is 2147483648; must be in [-1000, 1000], lower goes first"),
        (["x", "--tenant=é"], "metadata.dihedral-tenant: may only contain printable ASCII characters"),
    ],
)
def test_what_no_message_can_carry_is_refused_as_by_the_server(
    server: ScriptedServer, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["generate", *words, "--address", server.address])

    assert (code, capsys.readouterr().err) == (1, f"dihedral: {message}\n")
    assert server.inference.requests == []


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"], ["status"], ["drain"], ["reset-cache", "w"]])
@pytest.mark.parametrize(
    "address",
    ["foo", "http://127.0.0.1:5", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "h:x", "::1:5", ":5", "[]:5"],
)
def test_an_address_that_is_none_is_refused_before_a_call(
    command: list[str], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*command, "--address", address])

    assert (code, capsys.readouterr().err) == (
        2,
        f"dihedral: --address must be host:port, or [v6]:port, is {address!r}\n",
    )


@pytest.mark.parametrize("address", ["[::1]:1", "localhost:1", "127.0.0.1:1"])
def test_an_address_is_a_host_of_any_kind_and_a_port(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["status", "--address", address])

    assert (code, capsys.readouterr().err) == (
        1,
        f"dihedral: no server answers at {address}; start one with `dihedral serve`\n",
    )


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf", "1e+12"])
def test_a_timeout_outside_its_range_is_refused_before_a_call(
    server: ScriptedServer, timeout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["generate", "x", f"--timeout={timeout}", "--address", server.address])

    assert (code, capsys.readouterr().err) == (
        2,
        f"dihedral: --timeout must be above 0 and at most 1000000 seconds, is {timeout}\n",
    )
    assert server.inference.requests == []


@pytest.mark.parametrize("command", [["generate", "x"], ["status"]])
def test_an_absent_server_is_told_with_the_remedy(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*command, "--address", "127.0.0.1:1"])

    assert code == 1
    assert capsys.readouterr().err == ("dihedral: no server answers at 127.0.0.1:1; start one with `dihedral serve`\n")


def test_the_address_comes_from_the_configuration_if_no_flag_names_it(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIHEDRAL_SERVER__HOST", "0.0.0.0")
    monkeypatch.setenv("DIHEDRAL_SERVER__PORT", server.address.partition(":")[2])

    assert main(["generate", "count"]) == 0


def test_chat_keeps_the_conversation(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\nsecond\n"))

    code = main(["chat", "--system", "be brief", "--address", server.address])

    assert code == 0
    assert capsys.readouterr().out == "one two three\none two three\n"
    messages = server.inference.requests[1].chat.messages
    assert [(message.role, message.content) for message in messages] == [
        ("system", "be brief"),
        ("user", "first"),
        ("assistant", "one two three"),
        ("user", "second"),
    ]


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_an_error_amid_an_answer_stands_on_a_line_of_its_own(
    server: ScriptedServer, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n"))
    server.inference.breaks_after_one_word = True

    code = main([*command, "--address", server.address])

    assert (code, *capsys.readouterr()) == (1, "one \n", "dihedral: the cable was cut\n")


async def test_ctrl_c_ends_generate_with_a_line_break_after_what_has_come(server: ScriptedServer) -> None:
    server.inference.may_go_on.clear()
    generate = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "control_plane.cli", "generate", "x", "--address", server.address),
        stdout=asyncio.subprocess.PIPE,
    )
    assert generate.stdout is not None
    assert await generate.stdout.readexactly(4) == b"one "

    generate.send_signal(signal.SIGINT)
    out, _ = await generate.communicate()
    server.inference.may_go_on.set()

    assert (generate.returncode, out) == (130, b"\n")


async def test_ctrl_c_stops_an_answer_and_not_the_conversation(server: ScriptedServer) -> None:
    server.inference.may_go_on.clear()
    chat = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "control_plane.cli", "chat", "--address", server.address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write(b"first\n")
    assert await chat.stdout.readexactly(4) == b"one "

    chat.send_signal(signal.SIGINT)
    assert await chat.stdout.readexactly(1) == b"\n"
    server.inference.may_go_on.set()
    out, _ = await chat.communicate(b"second\n")

    assert (chat.returncode, out) == (0, b"one two three\n")
    messages = server.inference.requests[1].chat.messages
    assert [(message.role, message.content) for message in messages] == [
        ("user", "first"),
        ("assistant", "one "),
        ("user", "second"),
    ]


def test_at_a_terminal_an_error_ends_one_answer_and_not_the_conversation(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def lines() -> Iterator[str]:
        server.inference.refusal = InvalidRequest([FieldViolation("chat", "TOO_LONG", "is too long")])
        yield "first"
        server.inference.refusal = None
        yield "second"

    script = lines()
    monkeypatch.setattr("builtins.input", lambda invitation: next_or_end(script))
    out, log = io.StringIO(), io.StringIO()

    chat("", Connection(address=server.address), Sampling(), Terminal(), out, log)

    assert log.getvalue() == "dihedral: chat: is too long\n"
    assert out.getvalue() == "one two three\n"
    assert [message.content for message in server.inference.requests[1].chat.messages] == ["second"]


async def test_at_a_terminal_a_line_can_be_edited(server: ScriptedServer) -> None:
    ours, terminal = os.openpty()
    chat = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "control_plane.cli", "chat", "--address", server.address),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "dumb", "INPUTRC": os.devnull},
    )
    os.close(terminal)

    await asyncio.to_thread(read_until, ours, b"you> ")
    os.write(ours, b"rst\x01fi\n")  # Ctrl-A goes to the start of the line
    await asyncio.to_thread(read_until, ours, b"you> ")
    os.write(ours, b"\x04")

    assert await chat.wait() == 0
    os.close(ours)
    assert [message.content for message in server.inference.requests[0].chat.messages] == ["first"]


def read_until(descriptor: int, end: bytes) -> None:
    """Read what a terminal shows until these bytes come. Raises: OSError: the terminal was closed before."""
    shown = b""
    while end not in shown:
        shown += os.read(descriptor, 1024)


def next_or_end(script: Iterator[str]) -> str:
    """The next line, or what `input` raises at the end."""
    try:
        return next(script)
    except StopIteration:
        raise EOFError from None
