"""Writes what a command was asked for as a request.

Its limits are the server's: what no message can carry is refused here, in the server's words.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from control_plane.cli.options import Account, Details, Sampling
from plugins.errors import FieldViolation, InvalidConfig, InvalidRequest
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2

MAX_TOLD: Final = 60  # characters of a value in an error
RANGES: Final = {  # what the fields of a message can carry, and what the server takes of it
    "max_tokens": "[1, 2**32), or left out",
    "top_k": "[0, 2**32), 0 keeps all tokens",
    "seed": "[0, 2**64), or left out",
}
NAMES: Final = {  # flags whose fields have other names, for they are given once for each
    "stop_token_id": "stop_token_ids",
    "bad_word": "bad_words",
    "allowed_token_id": "allowed_token_ids",
    "logprob_token_id": "logprob_token_ids",
    "include_stop": "include_stop_str_in_output",
}
SHAPES: Final = ("json_schema", "json_object", "regex", "choice", "grammar")
WRITTEN_APART: Final = {
    *SHAPES,
    "logit_bias",
    "extra_arg",
    "processed_logprobs",
    "keep_special_tokens",
    "echo",
    "max_queue_time",
}


def write_request(
    prompt: str | Sequence[tuple[str, str]], sampling: Sampling, details: Details, model: str, account: Account
) -> inference_pb2.GenerateRequest:
    """Write a request for the continuation of a text, or of a chat of (role, content).

    Raises: InvalidRequest: values that their fields cannot carry, all together; InvalidConfig: a file cannot be read.
    """
    message = inference_pb2.GenerateRequest(echo=details.echo)
    violations = []
    if -(2**31) <= account.priority < 2**31:
        message.priority = account.priority
    else:
        description = f"is {account.priority}; must be in [-1000, 1000], lower goes first"
        violations.append(FieldViolation("priority", "OUT_OF_RANGE", description))
    if details.max_queue_time is not None:
        message.max_queue_time_s = details.max_queue_time
    violations += _write_texts(message, prompt, model, account.cache_salt)
    violations += _write_sampling(message.sampling, sampling, details)
    if violations:
        raise InvalidRequest(violations)
    return message


def _write_texts(
    message: inference_pb2.GenerateRequest, prompt: str | Sequence[tuple[str, str]], model: str, cache_salt: str
) -> list[FieldViolation]:
    violations = []
    for field, text in (("model", model), ("cache_salt", cache_salt), ("prompt", prompt)):
        try:
            if not isinstance(text, str):
                turns = (inference_pb2.ChatMessage(role=role, content=content) for role, content in text)
                message.chat.messages.extend(turns)
            else:
                setattr(message, "text" if field == "prompt" else field, text)
        except UnicodeEncodeError as error:
            violations.append(FieldViolation(field, "NOT_UNICODE", f"is not valid Unicode: {error.reason}"))
    return violations


def _write_sampling(message: common_pb2.SamplingParams, sampling: Sampling, details: Details) -> list[FieldViolation]:
    """Write what was given; returns what could not be written."""
    violations: list[FieldViolation] = []
    for flags in (sampling, details):
        for field in fields(flags):
            value = getattr(flags, field.name)
            if field.name not in WRITTEN_APART and _is_given(value):
                violations += _write_field(message, NAMES.get(field.name, field.name), value)
    if details.processed_logprobs:
        message.logprobs_mode = common_pb2.LOGPROBS_MODE_PROCESSED
    if details.keep_special_tokens:
        message.skip_special_tokens = False
    violations += _write_biases(message, details.logit_bias)
    violations += _write_extra_args(message, details.extra_arg)
    violations += _write_shape(message, sampling, details)
    return violations


def _is_given(value: object) -> bool:
    return not (value is None or value is False or value == ())


def _write_field(message: common_pb2.SamplingParams, name: str, value: Any) -> list[FieldViolation]:
    try:
        if isinstance(value, tuple):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except UnicodeEncodeError as error:
        return [FieldViolation(f"sampling.{name}", "NOT_UNICODE", f"is not valid Unicode: {error.reason}")]
    except ValueError:  # such as a count below 0
        told = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        return [_out_of_range(name, str(told), RANGES.get(name, "[0, 2**32)"))]
    return []


def _write_biases(message: common_pb2.SamplingParams, biases: Sequence[str]) -> list[FieldViolation]:
    violations = []
    for each in biases:
        token_id, _, bias = each.partition("=")
        try:
            message.logit_bias[int(token_id)] = float(bias)
        except ValueError:
            description = f"is {each[:MAX_TOLD]!r}; must be a token and its bias, such as 42=-5"
            violations.append(FieldViolation("sampling.logit_bias", "WRONG_TYPE", description))
    return violations


def _write_extra_args(message: common_pb2.SamplingParams, arguments: Sequence[str]) -> list[FieldViolation]:
    violations = []
    for each in arguments:
        name, _, text = each.partition("=")
        try:
            message.extra_args.update({name: json.loads(text)})
        except (ValueError, RecursionError):
            description = f"is {each[:MAX_TOLD]!r}; must be a name and a JSON value, such as limit=3 or word='\"sea\"'"
            violations.append(FieldViolation("sampling.extra_args", "WRONG_TYPE", description))
    return violations


def _write_shape(message: common_pb2.SamplingParams, sampling: Sampling, details: Details) -> list[FieldViolation]:
    given = {name: getattr(sampling if name == "json_schema" else details, name) for name in SHAPES}
    given = {name: value for name, value in given.items() if _is_given(value)}
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        description = f"is given by {flags}; an output has one shape"
        return [FieldViolation("sampling.structured_output", "CONFLICT", description)]
    shape = message.structured_output
    for name, value in given.items():
        try:
            match name:
                case "json_schema":
                    shape.json_schema = value if value.lstrip().startswith("{") else _read(value, "--json-schema")
                case "json_object":
                    shape.json_object = True
                case "regex":
                    shape.regex = value
                case "choice":
                    shape.choice.texts.extend(value)
                case "grammar":
                    shape.grammar = _read(value, "--grammar")
        except UnicodeEncodeError as error:
            description = f"is not valid Unicode: {error.reason}"
            return [FieldViolation(f"sampling.structured_output.{name}", "NOT_UNICODE", description)]
    return []


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidConfig(f"{flag}: {path[:MAX_TOLD]!r} cannot be read: {why}") from error


def _out_of_range(name: str, told: str, values: str) -> FieldViolation:
    return FieldViolation(f"sampling.{name}", "OUT_OF_RANGE", f"is {told[:MAX_TOLD]}; must be in {values}")
