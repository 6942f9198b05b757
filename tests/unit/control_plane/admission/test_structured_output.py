"""Grammars are tried in real processes, within limits, and every end of such a process is an answer."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.grammar_process import GrammarProcess, ProcessGone
from control_plane.admission.structured_output import GrammarCompiler
from control_plane.cli.demo import children
from control_plane.engine.served import ServedModel
from plugins.errors import InvalidConfig, InvalidRequest, NotServing
from plugins.types import StructuredOutput
from tests.unit.control_plane.admission.models import served_model

SLOW = '{"type": "integer", "multipleOf": 999983}'  # takes 7 s and 460 MB


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(AdmissionConfig(grammar_timeout_s=0.3))
    yield compiler
    compiler.close()


def model(has_grammars: bool = True) -> ServedModel:
    served = served_model()
    return replace(served, worker=replace(served.worker, has_grammars=has_grammars))


def refusal(compiler: GrammarCompiler, output: StructuredOutput, served: ServedModel) -> tuple[str, str, str]:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(output, served)
    (violation,) = caught.value.violations
    return violation.field.removeprefix("sampling.structured_output"), violation.reason, violation.description


def processes() -> set[int]:
    """Those that this one has started and that run."""
    return set(children(os.getpid()))


@pytest.mark.parametrize(
    ("output", "part"),
    [
        (StructuredOutput(json_schema='{"type": "boolean"}'), '"type":"boolean"'),
        (StructuredOutput(json_object=True), '"type":"object"'),
        (StructuredOutput(regex="[ab]+"), "start: /[ab]+/"),
        (StructuredOutput(choice=("yes", "no")), "start: /yes|no/"),
        (StructuredOutput(grammar='start: "a"'), 'start: "a"'),
    ],
)
def test_every_kind_of_constraint_becomes_a_grammar(
    compiler: GrammarCompiler, output: StructuredOutput, part: str
) -> None:
    assert part in compiler.compile(output, model())


@pytest.mark.parametrize(
    ("output", "field", "reason", "words"),
    [
        (StructuredOutput(regex="["), ".regex", "INVALID_GRAMMAR", "unclosed character class"),
        (StructuredOutput(json_schema="{"), ".json_schema", "INVALID_GRAMMAR", "is not JSON"),
        (StructuredOutput(json_schema='{"not": {}}'), ".json_schema", "UNSUPPORTED_KEYWORD", '["not"]'),
        (StructuredOutput(grammar="start: b"), ".grammar", "INVALID_GRAMMAR", 'unknown name: "b"'),
        (StructuredOutput(grammar=""), ".grammar", "INVALID_GRAMMAR", "Empty grammar"),
        (StructuredOutput(json_schema=SLOW), ".json_schema", "GRAMMAR_TOO_COMPLEX", "takes longer than 0.3 s"),
    ],
)
def test_what_is_wrong_is_told_at_the_field_that_gave_it(
    compiler: GrammarCompiler, output: StructuredOutput, field: str, reason: str, words: str
) -> None:
    """B093, B100: nothing becomes free text."""
    place, told_reason, description = refusal(compiler, output, model())

    assert (place, told_reason) == (field, reason)
    assert words in description


def test_a_constraint_of_5_mb_is_refused_before_anybody_reads_it(compiler: GrammarCompiler) -> None:
    """B093: at once, and without a process."""
    schema = StructuredOutput(json_schema='{"enum": ["' + "x" * 5_000_000 + '"]}')

    started_s = time.monotonic()
    place, reason, description = refusal(compiler, schema, model())

    assert time.monotonic() - started_s < 0.2
    assert (place, reason) == (".json_schema", "TOO_LARGE")
    assert "5000014 bytes; at most 65536 are allowed (admission.max_grammar_bytes)" in description


def test_the_largest_constraint_is_a_matter_of_configuration() -> None:
    compiler = GrammarCompiler(AdmissionConfig(max_grammar_bytes=5))

    accepted = compiler.compile(StructuredOutput(regex="abcde"), model())
    refused = refusal(compiler, StructuredOutput(regex="abcdé"), model())
    compiler.close()

    assert "abcde" in accepted
    assert refused[:2] == (".regex", "TOO_LARGE")


@pytest.mark.parametrize("key", ["grammar_processes", "grammar_timeout_s", "max_grammar_bytes"])
def test_limits_of_nothing_are_refused(key: str) -> None:
    limits: dict[str, Any] = {key: 0}

    with pytest.raises(InvalidConfig, match=f"admission.{key} must be"):
        AdmissionConfig(**limits)


def test_as_many_grammars_are_tried_at_once_as_there_may_be_processes() -> None:
    before, compiler = processes(), GrammarCompiler(AdmissionConfig(grammar_processes=1, grammar_timeout_s=0.3))
    threads = [
        threading.Thread(target=refusal, args=(compiler, StructuredOutput(json_schema=SLOW), model())) for _ in range(3)
    ]

    for thread in threads:
        thread.start()
    num_processes = 0
    while any(thread.is_alive() for thread in threads):
        num_processes = max(num_processes, len(processes() - before))
    compiler.close()

    assert num_processes == 1


def test_the_parsers_words_are_cut_where_they_are_long(compiler: GrammarCompiler) -> None:
    _, reason, description = refusal(compiler, StructuredOutput(regex="(" + "a" * 5000), model())

    assert reason == "INVALID_GRAMMAR"
    assert len(description) == 500


def test_eight_slow_grammars_at_once_are_all_refused_in_time() -> None:
    """B097: the limit of one, times eight, over two processes, with the processes' start: within 5 s."""
    compiler, refusals = GrammarCompiler(AdmissionConfig()), []

    def compile_slowly(number: int) -> None:
        schema = StructuredOutput(json_schema=SLOW.replace("999983", str(999983 + 2 * number)))
        refusals.append(refusal(compiler, schema, model())[1])

    threads = [threading.Thread(target=compile_slowly, args=(number,)) for number in range(8)]
    started_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - started_s
    compiler.close()

    assert refusals == ["GRAMMAR_TOO_COMPLEX"] * 8
    assert took_s < 5.0


def test_a_verdict_is_kept_and_needs_no_process() -> None:
    compiler = GrammarCompiler(AdmissionConfig())
    good, bad = StructuredOutput(regex="a+"), StructuredOutput(regex="[")
    first = (compiler.compile(good, model()), refusal(compiler, bad, model()))

    compiler.close()

    assert (compiler.compile(good, model()), refusal(compiler, bad, model())) == first


def test_a_worker_without_grammars_refuses_all_of_them(compiler: GrammarCompiler) -> None:
    """B100: INVALID_ARGUMENT, and no text."""
    place, reason, _ = refusal(compiler, StructuredOutput(regex="a"), model(has_grammars=False))

    assert (place, reason) == ("", "UNSUPPORTED")


def test_a_process_that_is_killed_is_replaced() -> None:
    before, compiler = processes(), GrammarCompiler(AdmissionConfig())
    compiler.compile(StructuredOutput(regex="a"), model())
    (pid,) = processes() - before

    os.kill(pid, 9)

    assert compiler.compile(StructuredOutput(regex="b"), model())
    compiler.close()


def test_no_process_is_left_when_it_is_closed() -> None:
    before, compiler = processes(), GrammarCompiler(AdmissionConfig(grammar_timeout_s=30.0))
    errors: list[Exception] = []

    def compile_slowly() -> None:
        try:
            compiler.compile(StructuredOutput(json_schema=SLOW), model())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    while processes() == before:
        time.sleep(0.01)
    compiler.close()
    thread.join()

    assert processes() == before
    assert [type(error) for error in errors] == [NotServing]


def ask(process: GrammarProcess, served: ServedModel, kind: str, text: str) -> dict[str, str]:
    return process.ask(kind, text, "small", served.text.tokenizer_json, (2,), 5.0)


@pytest.mark.parametrize("command", [("/bin/true",), ("/bin/does-not-exist",), ("/bin/echo", "no JSON")])
def test_a_process_that_cannot_answer_is_gone(command: tuple[str, ...]) -> None:
    process = GrammarProcess(command)

    with pytest.raises(ProcessGone):
        ask(process, model(), "regex", "a")
    process.close()


def test_without_the_library_every_grammar_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B100: the fault is that llguidance cannot be imported."""
    (tmp_path / "llguidance.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    compiler = GrammarCompiler(AdmissionConfig())

    place, reason, description = refusal(compiler, StructuredOutput(regex="a"), model())
    compiler.close()

    assert (place, reason, description) == (".regex", "UNSUPPORTED", "the package llguidance is not installed")


def test_a_fifth_tokenizer_gets_a_new_process() -> None:
    process, served = GrammarProcess(), model()
    pids: list[int | None] = []

    for name in ("a", "b", "c", "d", "a", "e"):
        process.ask("regex", "a", name, served.text.tokenizer_json, (2,), 5.0)
        pids.append(process.pid)
    process.close()

    assert len(set(pids[:5])) == 1
    assert pids[5] != pids[0]


def test_the_process_needs_nothing_of_the_planes_but_its_own_modules() -> None:
    """It starts fast: what it imports is counted."""
    modules = _imported("control_plane.admission.grammar_child")

    ours = [name for name in modules if name.startswith(("control_plane.", "gpu_worker.", "protos."))]
    assert sorted(ours) == [
        "control_plane.admission",
        "control_plane.admission.grammar_child",
        "control_plane.admission.grammar_text",
    ]
    assert not {"torch", "grpc", "numpy", "tokenizers"} & set(modules)


def _imported(module: str) -> Sequence[str]:
    code = f"import {module}, sys; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
