"""What generate and chat can ask for besides the text, and how they show what comes."""

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.cli.commands import main
from protos.common.v1 import common_pb2
from protos.inference.v1.inference_pb2 import GenerateResponse, PromptPart, TokenLogprobs, Usage
from tests.unit.control_plane.cli.scripted_server import ScriptedServer

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.setenv("COLUMNS", "100")
    started = ScriptedServer()
    yield started
    started.stop()


def asked(server: ScriptedServer, *words: str) -> common_pb2.SamplingParams:
    """What is asked of the server with these words."""
    assert main(["generate", "x", "--address", server.address, *words]) == 0
    return server.inference.requests[-1].sampling


@pytest.mark.parametrize(
    ("words", "sampling"),
    [
        (["--n", "3"], common_pb2.SamplingParams(n=3)),
        (["--temperature", "0", "--top-k", "0"], common_pb2.SamplingParams(temperature=0, top_k=0)),
        (["--min-tokens", "2"], common_pb2.SamplingParams(min_tokens=2)),
        (["--stop", "a b", "--stop", "-5"], common_pb2.SamplingParams(stop=["a b", "-5"])),
        (["--stop-token-id", "7", "--stop-token-id=8"], common_pb2.SamplingParams(stop_token_ids=[7, 8])),
        (["--include-stop"], common_pb2.SamplingParams(include_stop_str_in_output=True)),
        (["--presence-penalty=-0.5"], common_pb2.SamplingParams(presence_penalty=-0.5)),
        (["--frequency-penalty", "0.5"], common_pb2.SamplingParams(frequency_penalty=0.5)),
        (["--repetition-penalty", "1.5"], common_pb2.SamplingParams(repetition_penalty=1.5)),
        (["--logit-bias", "5=-2", "--logit-bias=7=1.5"], common_pb2.SamplingParams(logit_bias={5: -2, 7: 1.5})),
        (["--bad-word", "sea", "--bad-word", "salt"], common_pb2.SamplingParams(bad_words=["sea", "salt"])),
        (["--allowed-token-id", "0"], common_pb2.SamplingParams(allowed_token_ids=[0])),
        (["--logprobs", "0"], common_pb2.SamplingParams(logprobs=0)),
        (["--prompt-logprobs", "4"], common_pb2.SamplingParams(prompt_logprobs=4)),
        (["--logprob-token-id", "4"], common_pb2.SamplingParams(logprob_token_ids=[4])),
        (["--processed-logprobs"], common_pb2.SamplingParams(logprobs_mode=common_pb2.LOGPROBS_MODE_PROCESSED)),
        (["--keep-special-tokens"], common_pb2.SamplingParams(skip_special_tokens=False)),
        (["--stream-interval", "8"], common_pb2.SamplingParams(stream_interval=8)),
    ],
)
def test_a_flag_sets_its_field_and_no_other(
    server: ScriptedServer, words: list[str], sampling: common_pb2.SamplingParams
) -> None:
    assert asked(server, *words) == sampling


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        (["--json-object"], common_pb2.StructuredOutput(json_object=True)),
        (["--regex", "[0-9]+"], common_pb2.StructuredOutput(regex="[0-9]+")),
        (["--choice", "a", "--choice", "b"], common_pb2.StructuredOutput(choice=common_pb2.Choice(texts=["a", "b"]))),
        (["--json-schema", '{"type": "object"}'], common_pb2.StructuredOutput(json_schema='{"type": "object"}')),
    ],
)
def test_a_shape_is_asked_for(server: ScriptedServer, words: list[str], shape: common_pb2.StructuredOutput) -> None:
    assert asked(server, *words) == common_pb2.SamplingParams(structured_output=shape)


def test_arguments_of_processors_are_json_by_name(server: ScriptedServer) -> None:
    sampling = asked(server, "--extra-arg", "limit=3", "--extra-arg", 'word="sea"', "--extra-arg", "deep=[null, {}]")

    assert {name: sampling.extra_args[name] for name in ("limit", "word")} == {"limit": 3, "word": "sea"}
    assert sampling.extra_args.fields["deep"].list_value.values[0].HasField("null_value")


def test_schemas_and_grammars_are_read_from_files(server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "shape"
    file.write_text('start: "ä"', encoding="utf-8")

    assert asked(server, "--grammar", str(file)).structured_output.grammar == 'start: "ä"'
    assert asked(server, "--json-schema", str(file)).structured_output.json_schema == 'start: "ä"'


def test_echo_and_the_wait_are_asked_of_the_request(server: ScriptedServer) -> None:
    asked(server, "--echo", "--max-queue-time", "2.5")

    request = server.inference.requests[-1]
    assert (request.echo, request.max_queue_time_s) == (True, 2.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--n=-1"], "sampling.n: is -1; must be in [0, 2**32)"),
        (
            ["--stop-token-id=-7", "--min-tokens=-2"],
            "sampling.min_tokens: is -2; must be in [0, 2**32); sampling.stop_token_ids: is -7; must be in [0, 2**32)",
        ),
        (
            ["--priority=3000000000", "--seed=-1"],
            "priority: is 3000000000; must be in [-1000, 1000], lower goes first; "
            "sampling.seed: is -1; must be in [0, 2**64), or left out",
        ),
        (
            ["--model", "\udcff", "--cache-salt", "\udcff"],
            "model: is not valid Unicode: surrogates not allowed; "
            "cache_salt: is not valid Unicode: surrogates not allowed",
        ),
        (["--stop", "\udcff"], "sampling.stop: is not valid Unicode: surrogates not allowed"),
        (["--regex", "\udcff"], "sampling.structured_output.regex: is not valid Unicode: surrogates not allowed"),
        (
            ["--logit-bias", "five", "--logit-bias", "3000000000=1"],
            "sampling.logit_bias: is 'five'; must be a token and its bias, such as 42=-5; "
            "sampling.logit_bias: is '3000000000=1'; must be a token and its bias, such as 42=-5",
        ),
        (
            ["--extra-arg", "limit=three"],
            "sampling.extra_args: is 'limit=three'; must be a name and a JSON value, such as limit=3 or word='\"sea\"'",
        ),
        (
            ["--json-object", "--choice", "a"],
            "sampling.structured_output: is given by --json-object and --choice; an output has one shape",
        ),
    ],
)
def test_what_no_request_can_carry_is_refused_with_its_field(
    server: ScriptedServer, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["generate", "x", "--address", server.address, *words])

    assert (code, capsys.readouterr().err) == (1, f"dihedral: {message}\n")
    assert server.inference.requests == []


def test_a_file_that_cannot_be_read_is_named_with_its_flag(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["generate", "x", "--address", server.address, "--grammar", "/nowhere"])

    assert (code, capsys.readouterr().err) == (
        2,
        "dihedral: --grammar: '/nowhere' cannot be read: No such file or directory\n",
    )


def test_help_all_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat"):
        main([command, "--help-all"])

        text = capsys.readouterr().out
        for flag in ("--n ", "--logit-bias", "--grammar", "--prompt-logprobs", "--max-queue-time", "--echo"):
            assert flag in text


def test_several_outputs_are_shown_under_headings(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.inference.responses = [
        GenerateResponse(request_id="r", index=1, token_ids=[1], text="a"),
        GenerateResponse(index=0, token_ids=[2], text="b", finish_reason=STOP, stop_string="x"),
        GenerateResponse(index=1, token_ids=[3], text="c", finish_reason=LENGTH, usage=Usage(output_tokens=3)),
    ]

    main(["generate", "x", "--n", "2", "--address", server.address])

    assert capsys.readouterr().out == "[0] stop, 1 tokens\nb\n[1] length, 2 tokens\nac\n"


def test_json_tells_everything_of_several_outputs(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    place = TokenLogprobs(token_ids=[2, 9], logprobs=[-0.5, -math.inf], ranks=[1, 2])
    server.inference.responses = [
        GenerateResponse(request_id="r", prompt=PromptPart(token_ids=[5, 6], text="ef")),
        GenerateResponse(prompt=PromptPart(start=1, logprobs=[place])),
        GenerateResponse(index=1, token_ids=[1], text="a", finish_reason=STOP, stop_token_id=1),
        GenerateResponse(token_ids=[2], text="b", logprobs=[place], finish_reason=LENGTH, usage=Usage(output_tokens=2)),
    ]

    main(["generate", "x", "--n", "2", "--json", "--address", server.address])

    answer = json.loads(capsys.readouterr().out)
    told = [[{"token_id": 2, "logprob": -0.5, "rank": 1}, {"token_id": 9, "logprob": None, "rank": 2}]]
    assert (answer["text"], answer["token_ids"], answer["finish_reason"], answer["logprobs"]) == (
        "b",
        [2],
        "length",
        told,
    )
    assert answer["others"] == [
        {"text": "a", "token_ids": [1], "finish_reason": "stop", "stopped_by": 1, "logprobs": []}
    ]
    assert (answer["prompt"], answer["prompt_token_ids"], answer["prompt_logprobs"]) == ("ef", [5, 6], told)


def test_log_probabilities_are_a_table_below_the_text(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [
        TokenLogprobs(token_ids=[3, 1, 3], logprobs=[-1.25, -0.5, -1.25], ranks=[2, 1, 2]),
        TokenLogprobs(token_ids=[0, 0, 2], logprobs=[-0.125, -0.125, -math.inf], ranks=[1, 1, 2]),
    ]
    server.inference.responses = [
        GenerateResponse(token_ids=[3, 0], text="c", logprobs=places, finish_reason=STOP, usage=Usage(output_tokens=2))
    ]

    main(["generate", "x", "--logprobs", "2", "--address", server.address])

    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "c",
        "tokens",
        "token logprob rank others",
        "'c'   -1.250     2 'a' -0.500",
        "<0>   -0.125     1 'b' -inf",
    ]


def test_the_prompt_is_shown_first_with_echo(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.inference.responses = [
        GenerateResponse(request_id="r", prompt=PromptPart(token_ids=[5, 6], text="the sea")),
        GenerateResponse(token_ids=[2], text=" is", finish_reason=LENGTH, usage=Usage(output_tokens=1)),
    ]

    main(["generate", "x", "--echo", "--address", server.address])

    assert capsys.readouterr().out == "the sea is\n"


def test_the_prompt_stands_above_several_outputs(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.inference.responses = [
        GenerateResponse(request_id="r", prompt=PromptPart(token_ids=[5, 6], text="the sea")),
        GenerateResponse(token_ids=[2], text=" is", finish_reason=LENGTH),
        GenerateResponse(index=1, token_ids=[3], text=" was", finish_reason=LENGTH, usage=Usage(output_tokens=2)),
    ]

    main(["generate", "x", "--echo", "--n", "2", "--address", server.address])

    assert capsys.readouterr().out == "the sea\n[0] length, 1 tokens\n is\n[1] length, 1 tokens\n was\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--n", "2"], "--n: a conversation goes on from one answer, not 2"),
        (["--logprobs", "0"], "--logprobs: a conversation shows text alone; generate --chat tells log-probabilities"),
        (
            ["--prompt-logprobs", "1"],
            "--prompt-logprobs: a conversation shows text alone; generate --chat tells log-probabilities",
        ),
    ],
)
def test_a_conversation_has_one_answer_at_a_time_and_shows_its_text(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n"))

    code = main(["chat", *words, "--address", server.address])

    assert (code, capsys.readouterr().err) == (2, f"dihedral: {message}\n")


def test_chat_passes_the_flags_on(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n"))

    main(["chat", "--stop", "x", "--repetition-penalty", "1.5", "--address", server.address])

    assert server.inference.requests[0].sampling == common_pb2.SamplingParams(stop=["x"], repetition_penalty=1.5)
