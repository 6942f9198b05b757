"""Turns sampling parameters into messages and back.

What a request gives and what it leaves out is kept apart; which defaults it then gets, and which values are allowed,
is admission's business.

The wire carries the floats of SamplingParams with 32 bits, and samplers compute with 32. A value that came over the
public API is such a float already, so it is the same number wherever it goes; 0.7 written in Python is
rounded to the nearest one, 0.699999988079071, by its first message.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from google.protobuf import struct_pb2

from plugins.types import LogprobsMode, SamplingParams, StructuredOutput
from protos.common.v1 import common_pb2

DEFAULT_SAMPLING: Final = SamplingParams()
MAX_EXACT: Final = 2**53  # floats beyond it leave whole numbers out
_SCALARS: Final = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "detokenize",
    "stream_interval",
)
_TEXTS: Final = ("stop", "bad_words")
_MODES: Final = {mode.value: mode for mode in LogprobsMode}
_TOKENS: Final = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")


def encode_sampling(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Write every field that has a value; None stays unset. What admission filled in is left out."""
    message = common_pb2.SamplingParams(
        **{name: getattr(sampling, name) for name in (*_SCALARS, *_TEXTS, *_TOKENS)},
        logit_bias={int(token_id): bias for token_id, bias in sampling.logit_bias.items()},
        logprobs_mode=common_pb2.LogprobsMode.ValueType(sampling.logprobs_mode),
    )
    if sampling.extra_args:
        message.extra_args.update(sampling.extra_args)
    if sampling.structured_output is not None:
        message.structured_output.CopyFrom(_encode_structured_output(sampling.structured_output))
    return message


def decode_sampling(message: common_pb2.SamplingParams, defaults: SamplingParams = DEFAULT_SAMPLING) -> SamplingParams:
    """Read sampling parameters; an unset field takes its default. Ranges are admission's business."""
    return replace(defaults, **given_sampling(message))


def given_sampling(message: common_pb2.SamplingParams) -> dict[str, Any]:
    """Read the fields that are set, by name. An empty list or map is not set.

    A log-probability mode that does not exist is returned as the number that it is, for admission to refuse.
    """

    # Most requests set few of the fields: to ask for each one by its name takes seven times as long.
    given = {field.name: _READERS.get(field.name, _as_it_is)(value) for field, value in message.ListFields()}
    if given.get("logprobs_mode") == common_pb2.LOGPROBS_MODE_UNSPECIFIED:
        del given["logprobs_mode"]
    return given


def plain(message: struct_pb2.Struct) -> Mapping[str, Any]:
    """Turn a Struct into JSON values. It knows no whole numbers: those without a fraction become such, up to 2^53."""
    return {name: _plain(value) for name, value in message.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() and abs(number) <= MAX_EXACT else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "list_value":
            return [_plain(each) for each in value.list_value.values]
        case "struct_value":
            return plain(value.struct_value)
        case _:
            return None


def _as_it_is(value: Any) -> Any:
    return value


def _decode_logprobs_mode(number: int) -> LogprobsMode | int:
    return _MODES.get(number, number)


def _encode_structured_output(output: StructuredOutput) -> common_pb2.StructuredOutput:
    if output.choice:
        return common_pb2.StructuredOutput(choice=common_pb2.Choice(texts=output.choice))
    if output.json_object:
        return common_pb2.StructuredOutput(json_object=True)
    texts = {name: getattr(output, name) for name in ("json_schema", "regex", "grammar")}
    return common_pb2.StructuredOutput(**{name: text for name, text in texts.items() if text is not None})


def _decode_structured_output(message: common_pb2.StructuredOutput) -> StructuredOutput:
    match message.WhichOneof("constraint"):
        case "json_schema":
            return StructuredOutput(json_schema=message.json_schema)
        case "json_object":
            return StructuredOutput(json_object=message.json_object)
        case "regex":
            return StructuredOutput(regex=message.regex)
        case "choice":
            return StructuredOutput(choice=tuple(message.choice.texts))
        case "grammar":
            return StructuredOutput(grammar=message.grammar)
        case _:
            return StructuredOutput()


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys((*_TEXTS, *_TOKENS), tuple),
    "logit_bias": dict,
    "logprobs_mode": _decode_logprobs_mode,
    "extra_args": plain,
    "structured_output": _decode_structured_output,
}
