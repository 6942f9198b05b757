"""The built-in stages pass the suite that processors of others have to pass, but for the check of their module:
admission imports none of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from gpu_worker.sampling.allowed_tokens import AllowedTokens
from gpu_worker.sampling.bad_words import BadWords
from gpu_worker.sampling.logit_bias import LogitBias
from gpu_worker.sampling.min_tokens import MinTokens
from gpu_worker.sampling.penalties import Penalties
from plugins.conformance.logits import LOGITS_CHECKS, its_module_is_imported_where_there_is_no_torch
from plugins.conformance.logits_driver import Subject
from plugins.conformance.report import run_checks
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingLimits, SamplingParams

LIMITS = SamplingLimits()
Build = Callable[[ProcessorConfig, RequestStates], LogitsProcessor]


def asked_by_arguments(build: Build) -> type[LogitsProcessor]:
    """A processor that takes the fields of a request from its arguments, and leaves the rest to a stage."""

    class Adapted(LogitsProcessor):
        def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
            self._stage = build(config, req_states)

        def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
            fields: dict[str, Any] = dict(sampling_params.extra_args)
            return self._stage.add_request(req_idx, replace(sampling_params, **fields))

        def apply_staged_writes(self) -> None:
            self._stage.apply_staged_writes()

        def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
            return self._stage.apply(logits, ctx)

    return Adapted


@pytest.mark.parametrize(
    ("build", "examples"),
    [
        (
            lambda config, states: AllowedTokens(config, states, LIMITS),
            ({"allowed_token_ids": (3, 4, 9, 17)}, {"allowed_token_ids": tuple(range(400))}),
        ),
        (
            lambda config, states: LogitBias(config, states, LIMITS),
            ({"logit_bias": {3: 2.0, 499: -5.0}}, {"logit_bias": {4: 100.0}}),
        ),
        (
            lambda config, states: MinTokens(config, states, LIMITS),
            ({"min_tokens": 12}, {"min_tokens": 40, "stop_token_ids": (3, 9)}),
        ),
        (
            Penalties,
            (
                {"repetition_penalty": 1.7},
                {"frequency_penalty": 0.6},
                {"presence_penalty": -1.5, "repetition_penalty": 0.7},
            ),
        ),
        (
            lambda config, states: BadWords(config, states, LIMITS),
            ({"bad_word_ids": ((3,), (4, 9), (9, 4, 3))}, {"bad_word_ids": ((3, 3), (4, 4), (9, 9))}),
        ),
    ],
    ids=["allowed_token_ids", "logit_bias", "min_tokens", "penalties", "bad_words"],
)
def test_a_stage_keeps_every_promise_of_the_hook(build: Build, examples: tuple[dict[str, Any], ...]) -> None:
    checks = [check for check in LOGITS_CHECKS if check is not its_module_is_imported_where_there_is_no_torch]

    results = run_checks(checks, Subject(asked_by_arguments(build), examples))

    assert {result.name: result.why for result in results if not result.passed} == {}
    assert len(results) >= 15
