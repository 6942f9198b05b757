"""Reads the sampling parameters of a request: checks the fields that were given, and fills the others in.

Each kind of value has a module of its own; here is which field is of which kind. What depends on the prompt's length is
checked in `validator.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, Protocol

from control_plane.admission.bad_words import bad_word_tokens
from control_plane.admission.conflicts import conflict_violations
from control_plane.admission.constraint import FIELD as STRUCTURED_OUTPUT
from control_plane.admission.constraint import constraint_violations
from control_plane.admission.json_values import json_violations
from control_plane.admission.texts import text_list_violations
from control_plane.admission.tokens import logit_bias_violations, token_list_violations
from control_plane.engine.served import ServedModel
from plugins.errors import FieldViolation, InvalidRequest
from plugins.sampling_ranges import RANGES, NumberRange, told
from plugins.types import LogprobsMode, SamplingLimits, SamplingParams, StructuredOutput, WorkerInfo

MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_BAD_WORD_CHARACTERS: Final = 256

Check = Callable[[str, Any, WorkerInfo], list[FieldViolation]]  # of a field's path and its value
_DEFAULTS: Final = {each.name: each.default for each in fields(SamplingParams)}


class ExtraArgChecker(Protocol):
    """Knows what the logits processors read of extra_args."""

    def violations(self, sampling: SamplingParams) -> list[FieldViolation]:
        """Tell what they refuse. Raises: PluginFailed: one of them raised what it must not."""


class Grammars(Protocol):
    """Turns constraints into grammars. May be called from any thread, and blocks while it works."""

    def compile(self, output: StructuredOutput, model: ServedModel) -> str:
        """Return the grammar as workers read it. Raises: InvalidRequest: it cannot be had."""


class SamplingReader:
    """Turns the given fields into parameters. Stateless; may be called from any thread."""

    def __init__(self, max_n: int, extra_args: ExtraArgChecker | None, grammars: Grammars | None) -> None:
        """None for `extra_args`: there is no processor that reads any; for `grammars`: none can be had."""
        self._checks = _checks(max_n)
        self._extra_args = extra_args
        self._grammars = grammars

    def read(self, given: Mapping[str, Any], model: ServedModel) -> tuple[SamplingParams, list[FieldViolation]]:
        """Return the parameters, and all that is wrong with them. A wrong field has the model's default.

        Raises: PluginFailed: a processor raised what it must not.
        """
        sampling, violations = model.worker.model.default_sampling, []
        if given:
            violations = self._field_violations(given, model.worker)
            wrong = {each.field.split(".", 2)[1] for each in violations}
            sampling = replace(sampling, **{name: _plain(given[name]) for name in given if name not in wrong})
            if sampling.structured_output is not None:
                sampling, found = self._compiled(sampling, sampling.structured_output, model)
                violations += found
            if sampling.bad_words:
                limits = model.worker.sampling_limits
                ids, found = bad_word_tokens(sampling.bad_words, model.text, model.worker.model, limits)
                sampling = replace(sampling, bad_word_ids=ids)
                violations += found
            violations += conflict_violations(sampling, model.worker.model, wrong)
        if self._extra_args is not None:
            violations += self._extra_args.violations(sampling)
        elif sampling.extra_args:
            description = "is read by no logits processor; ListPlugins tells which there are"
            violations += [
                FieldViolation(f"sampling.extra_args.{name}", "UNKNOWN_ARGUMENT", description)
                for name in sampling.extra_args
            ]
        return sampling, violations

    def _field_violations(self, given: Mapping[str, Any], worker: WorkerInfo) -> list[FieldViolation]:
        """Tell what is wrong with each field by itself, in the order of SamplingParams."""
        violations = []
        for name, check in self._checks.items():
            if name in given and (value := given[name]) is not _DEFAULTS[name]:
                violations += check(f"sampling.{name}", value, worker)
        return violations

    def _compiled(
        self, sampling: SamplingParams, output: StructuredOutput, model: ServedModel
    ) -> tuple[SamplingParams, list[FieldViolation]]:
        if self._grammars is None or not model.worker.has_grammars:
            description = "this model's worker cannot hold outputs to a grammar; leave it out"
            return sampling, [FieldViolation(STRUCTURED_OUTPUT, "UNSUPPORTED", description)]
        try:
            return replace(sampling, grammar=self._grammars.compile(output, model)), []
        except InvalidRequest as error:
            return sampling, list(error.violations)


def _checks(max_n: int) -> Mapping[str, Check]:
    checks: dict[str, Check] = {
        "n": _number(NumberRange(1, max_n, f"must be in [1, {max_n}]", is_whole=True)),
        "stop": _texts(MAX_STOPS, MAX_STOP_CHARACTERS),
        "stop_token_ids": _tokens(lambda limits: limits.max_stop_token_ids),
        "include_stop_str_in_output": _switch,
        "ignore_eos": _switch,
        "bad_words": _bad_words,
        "logit_bias": _logit_bias,
        "allowed_token_ids": _tokens(lambda limits: limits.max_allowed_token_ids),
        "structured_output": lambda field, value, worker: constraint_violations(value),
        "logprobs": _num_logprobs,
        "prompt_logprobs": _num_logprobs,
        "logprob_token_ids": _tokens(lambda limits: limits.max_logprob_token_ids),
        "logprobs_mode": _logprobs_mode,
        "skip_special_tokens": _switch,
        "detokenize": _switch,
        "extra_args": lambda field, value, worker: json_violations(field, value),
        **{name: _number(allowed) for name, allowed in RANGES.items()},
    }
    return {name: checks[name] for name in _DEFAULTS if name in checks}


def _number(allowed: NumberRange) -> Check:
    def check(field: str, value: Any, worker: WorkerInfo) -> list[FieldViolation]:
        fault = allowed.fault(value)
        return [] if fault is None else [FieldViolation(field, *fault)]

    return check


def _tokens(limit_of: Callable[[SamplingLimits], int]) -> Check:
    def check(field: str, value: Any, worker: WorkerInfo) -> list[FieldViolation]:
        return token_list_violations(field, value, limit_of(worker.sampling_limits), worker.model.vocab_size)

    return check


def _texts(max_texts: int, max_characters: int) -> Check:
    def check(field: str, value: Any, worker: WorkerInfo) -> list[FieldViolation]:
        return text_list_violations(field, value, max_texts, max_characters)

    return check


def _bad_words(field: str, value: Any, worker: WorkerInfo) -> list[FieldViolation]:
    """Each word is at least one sequence of tokens."""
    return text_list_violations(field, value, worker.sampling_limits.max_bad_words, MAX_BAD_WORD_CHARACTERS)


def _logit_bias(field: str, value: Any, worker: WorkerInfo) -> list[FieldViolation]:
    return logit_bias_violations(field, value, worker.sampling_limits.max_logit_bias, worker.model.vocab_size)


def _num_logprobs(field: str, value: Any, worker: WorkerInfo) -> list[FieldViolation]:
    most = worker.sampling_limits.max_logprobs
    fault = NumberRange(0, most, f"must be in [0, {most}], or left out", is_whole=True, is_optional=True).fault(value)
    return [] if fault is None else [FieldViolation(field, *fault)]


def _switch(field: str, value: Any, worker: WorkerInfo) -> list[FieldViolation]:
    if isinstance(value, bool):
        return []
    return [FieldViolation(field, "WRONG_TYPE", f"is {told(value)}; must be true or false")]


def _logprobs_mode(field: str, value: Any, worker: WorkerInfo) -> list[FieldViolation]:
    if isinstance(value, LogprobsMode):
        return []
    is_number = isinstance(value, int) and not isinstance(value, bool)
    rule = "must be one of " + ", ".join(f"{mode.name} ({mode.value})" for mode in LogprobsMode)
    return [FieldViolation(field, "OUT_OF_RANGE" if is_number else "WRONG_TYPE", f"is {told(value)}; {rule}")]


def _plain(value: Any) -> Any:
    """Copy what its owner may still change; anything else stays what it is."""
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, tuple) else value
