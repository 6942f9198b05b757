"""A grammar's output has the same tokens whatever happens around it: run-ahead, neighbours, preemption, slow reading.

The whole engine in process, with the real worker and its small random model, whose tokens are single bytes.
"""

import json
import time
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.local import LocalEngine
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from gpu_worker.sampling.grammar_reader import GrammarReader, GrammarState
from plugins.errors import Code, ServingError
from plugins.scheduler import Scheduler
from plugins.types import FinishReason, SamplingParams, StepPlan, StructuredOutput, TokenId

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,12}$"},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "sizes", "is_new"],
    "additionalProperties": False,
}
HELD = SamplingParams(
    max_tokens=120, temperature=1.0, seed=9, structured_output=StructuredOutput(json_schema=json.dumps(SCHEMA))
)
FREE = SamplingParams(max_tokens=60, temperature=1.0, seed=4, ignore_eos=True)

Outputs = dict[str, tuple[TokenId, ...]]


class Watched(RunAheadScheduler):
    """Tells how much output a request had whenever it was admitted."""

    admitted: list[tuple[str, int]] = []  # replaced for each test that looks

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        plan = super().schedule(throttle_prefills)
        self.admitted += [(each.request_id, len(each.token_ids) - each.num_prompt_tokens) for each in plan.admitted]
        return plan


def make_engine(
    scheduler_cls: type[Scheduler] | None = None, is_async: bool = True, grammar_timeout_s: float = 20.0, **worker: Any
) -> LocalEngine:
    keys: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "num_blocks": 64} | worker
    config = SchedulerConfig(max_step_tokens=64, max_sequences=8, async_scheduling=is_async)
    admission = AdmissionConfig(grammar_timeout_s=grammar_timeout_s)
    return LocalEngine(scheduler=config, scheduler_cls=scheduler_cls, admission=admission, **keys)


def run(engine: LocalEngine, **requests: SamplingParams) -> Outputs:
    """Send all requests at once and wait for their outputs, which end as they should."""
    outputs: Outputs = dict.fromkeys(requests, ())
    for name, sampling in requests.items():
        engine.add_request(name, f"prompt of {name}", sampling)
    while engine.has_work():
        for delivery in engine.step():
            outputs[delivery.request_id] += delivery.token_ids
            assert delivery.finish in (None, FinishReason.STOP, FinishReason.LENGTH), delivery.error
    return outputs


def check(engine: LocalEngine, token_ids: tuple[TokenId, ...]) -> None:
    """See that they are a whole value of SCHEMA."""
    jsonschema.validate(json.loads(engine.model.text.decode(token_ids)), SCHEMA)


def test_run_ahead_and_neighbours_change_no_token_of_a_grammars_output() -> None:
    outputs = []
    for is_async in (True, False):
        with make_engine(is_async=is_async) as engine:
            outputs.append(run(engine, a=HELD)["a"])
            outputs.append(run(engine, x=FREE, a=HELD, b=HELD, y=FREE)["a"])
            check(engine, outputs[-1])
    with make_engine(grammar_threads=3) as engine:
        outputs.append(run(engine, x=FREE, a=HELD, b=HELD, y=FREE)["a"])

    assert outputs == [outputs[0]] * 5


def test_a_preemption_in_the_middle_of_a_value_changes_no_token_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """26 blocks of 4 hold either request alone; the older one takes them from the other as it grows."""
    monkeypatch.setattr(Watched, "admitted", [])
    with make_engine() as engine:
        undisturbed = run(engine, a=HELD)["a"]

    with make_engine(Watched, num_blocks=26, block_size=4) as engine:
        outputs = run(engine, x=FREE, a=HELD)
        check(engine, outputs["a"])

    assert outputs["a"] == undisturbed
    assert max(num_tokens for name, num_tokens in Watched.admitted if name == "a") > 0


def test_a_row_whose_grammar_is_slow_to_read_waits_alone_and_then_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_engine() as engine:
        undisturbed = run(engine, a=HELD, x=FREE)
    read = GrammarReader.read

    def read_slowly(self: GrammarReader, grammar: str) -> GrammarState:
        time.sleep(1.0)
        return read(self, grammar)

    monkeypatch.setattr(GrammarReader, "read", read_slowly)
    order: list[str] = []
    with make_engine() as engine:
        engine.add_request("a", "prompt of a", HELD)
        engine.add_request("x", "prompt of x", FREE)
        outputs: Outputs = {"a": (), "x": ()}
        while engine.has_work():
            for delivery in engine.step():
                outputs[delivery.request_id] += delivery.token_ids
                order += [delivery.request_id] * (delivery.finish is not None)

    assert outputs == undisturbed
    assert order == ["x", "a"]


def test_several_outputs_of_one_grammar_have_values_of_their_own() -> None:
    with make_engine() as engine:
        (completion,) = engine.generate(["prompt"], replace(HELD, n=4))
        outputs = (completion, *completion.others)
        for output in outputs:
            check(engine, output.token_ids)

    assert [output.finish for output in outputs] == [FinishReason.STOP] * 4
    assert len({output.token_ids for output in outputs}) > 1


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone_and_is_the_callers_fault() -> None:
    """B097: the text that admission tries has 64 tokens."""
    grammar = 'start: a a a a a a a a\na: "x" a | a "x" | "x" | a a | ""'
    growing = replace(HELD, structured_output=StructuredOutput(grammar=grammar), min_tokens=200, max_tokens=200)
    with make_engine() as engine:
        undisturbed = run(engine, x=FREE)["x"]
        engine.add_request("a", "prompt of a", growing)
        engine.add_request("x", "prompt of x", FREE)
        errors: list[ServingError] = []
        tokens: list[TokenId] = []
        while engine.has_work():
            for delivery in engine.step():
                errors += [delivery.error] if delivery.error is not None else []
                tokens += delivery.token_ids if delivery.request_id == "x" else ()

    assert [(error.code, error.reason) for error in errors] == [(Code.INVALID_ARGUMENT, "GRAMMAR_TOO_COMPLEX")]
    assert tuple(tokens) == undisturbed
