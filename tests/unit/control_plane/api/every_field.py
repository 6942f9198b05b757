"""Every field of GenerateRequest with every kind of value, and what becomes of such a request.

A table: each row is one request that is right but for one field. A field that is new must get rows here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from protos.inference.v1.inference_pb2 import GenerateRequest
from tests.unit.control_plane.api.values import (
    KINDS,
    NOBODY,
    Case,
    bad,
    biases,
    extra_args,
    fine,
    json_cases,
    reals,
    switches,
    texts,
    token_lists,
    unsendable,
    wholes,
    words,
)

SAMPLING: Final = "sampling"
GRAMMAR: Final = "sampling.structured_output"
BASE: Final = {"tokens.ids": [3, 4, 5], "sampling.max_tokens": 2, "sampling.seed": 1}


@dataclass(frozen=True, slots=True)
class Served:
    """The model that the requests are for, as far as answers depend on it."""

    name: str
    vocab_size: int
    max_model_len: int
    has_grammars: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One request."""

    path: str  # of the field that is tried
    kind: str  # of its value
    fields: Mapping[str, Any]  # by path: the field, and what else it needs
    refusal: tuple[str, str] | None = None  # field and reason of the one violation; None: it is served
    is_unsendable: bool = False  # the client's own protobuf runtime takes no such value

    def __str__(self) -> str:
        return f"{self.path} {self.kind}"

    def request(self) -> GenerateRequest:
        """Make the message. Raises: TypeError, ValueError: the runtime takes no such value."""
        message = GenerateRequest()
        for path, value in self.fields.items():
            _put(message, path, value)
        return message


def rows(served: Served) -> list[Row]:
    """All of them."""
    return [*_sampling_rows(served), *_other_rows(served), *_input_rows(served), *_chat_rows()]


def paths(message: Descriptor = GenerateRequest.DESCRIPTOR, prefix: str = "") -> Iterator[str]:
    """Every field of the message, by path, and those of our messages within it."""
    for each in message.fields:
        path = f"{prefix}{each.name}"
        inner = each.message_type
        if inner is None or inner.GetOptions().map_entry or inner.full_name.startswith("google.protobuf."):
            yield path
        else:
            yield from paths(inner, f"{path}.")


def kind_of(path: str) -> str:
    """Of which kind of values a field takes: a key of `values.KINDS`."""
    message, found = GenerateRequest.DESCRIPTOR, None
    for name in path.split("."):
        found = message.fields_by_name[name]
        message = found.message_type or message
    assert found is not None
    if found.message_type is not None:
        return "map" if found.message_type.GetOptions().map_entry else "json"
    kind = {
        FieldDescriptor.CPPTYPE_BOOL: "switch",
        FieldDescriptor.CPPTYPE_STRING: "text",
        FieldDescriptor.CPPTYPE_FLOAT: "real",
        FieldDescriptor.CPPTYPE_DOUBLE: "real",
        FieldDescriptor.CPPTYPE_ENUM: "whole",
    }.get(found.cpp_type, "whole")
    return f"{kind}s" if found.is_repeated else kind


def _sampling_rows(served: Served) -> Iterator[Row]:
    logprobs = {"sampling.logprobs": 0}
    for name, cases in {
        "max_tokens": wholes(1, None),
        "n": wholes(1, 128),
        "min_tokens": wholes(0, 2),  # which is max_tokens
        "top_k": wholes(0, 2**32 - 1),
        "logprobs": wholes(0, 20),
        "prompt_logprobs": wholes(0, 20),
        "stream_interval": wholes(1, 1024),
        "seed": wholes(0, 2**64 - 1, num_bits=64),
        "temperature": reals(0, 100),
        "top_p": reals(0, 1, is_low_open=True),
        "min_p": reals(0, 1),
        "presence_penalty": reals(-2, 2),
        "frequency_penalty": reals(-2, 2),
        "repetition_penalty": reals(0, 100, is_low_open=True),
        "ignore_eos": switches(),
        "include_stop_str_in_output": switches(),
        "skip_special_tokens": switches(),
        "detokenize": switches(),
        "stop": words(16, 256),
        "bad_words": words(64, 256, beyond=129),  # each in two ways
        "stop_token_ids": token_lists(128, served.vocab_size),
        "allowed_token_ids": token_lists(1024, served.vocab_size),
        "logit_bias": biases(1024, served.vocab_size),
        "logprobs_mode": [
            fine("zero", 0),  # unset
            fine("limit-1", 1),
            fine("limit", 2),
            bad("limit+1", 3, "OUT_OF_RANGE"),
            bad("negative", -1, "OUT_OF_RANGE"),
            bad("huge", 2**31 - 1, "OUT_OF_RANGE"),
            *(unsendable(kind, value) for kind, value in NOBODY),
        ],
        "extra_args": extra_args(),
    }.items():
        yield from _of(f"{SAMPLING}.{name}", cases)
    yield from _of("sampling.logprob_token_ids", token_lists(128, served.vocab_size), logprobs)
    yield from _of("sampling.max_tokens", [fine("huge", 10_000)], {"sampling.ignore_eos": True})
    yield from _grammar_rows(served)


def _grammar_rows(served: Served) -> Iterator[Row]:
    able = served.has_grammars
    most = 64 * 1024

    def sized(make: Callable[[int], object]) -> list[Case]:
        return [
            fine("limit-1", make(most - 1)),
            fine("limit", make(most)),
            bad("limit+1", make(most + 1), "TOO_LARGE"),
            bad("huge", make(1_000_000), "TOO_LARGE"),
        ]

    for name, cases in {
        "json_schema": [
            bad("empty", "", "EMPTY"),
            bad("NUL", '{"type": "\x00"}', "INVALID_GRAMMAR"),
            *sized(lambda size: '{"type": "null"}' + " " * (size - 16)),
        ],
        "regex": [bad("empty", "", "EMPTY"), fine("NUL", "\x00"), *sized(lambda size: "(?x)a" + " " * (size - 5))],
        "grammar": [
            bad("empty", "", "EMPTY"),
            bad("NUL", "start: \x00", "INVALID_GRAMMAR"),
            *sized(lambda size: 'start: "a"' + "\n" * (size - 10)),
        ],
        "json_object": [
            bad("zero", False, "REQUIRED", GRAMMAR),
            fine("limit", True),
            unsendable("wrong type", "yes"),
        ],
        "choice.texts": [
            bad("empty", [], "REQUIRED", GRAMMAR),
            bad("empty", ["a", ""], "EMPTY", f"{GRAMMAR}.choice"),
            fine("NUL", ["\x00"]),
            fine("limit-1", [f"{number:03}" for number in range(999)]),
            fine("limit", [f"{number:03}" for number in range(1000)]),
            bad("limit+1", ["a"] * 1001, "TOO_MANY", f"{GRAMMAR}.choice"),
            bad("huge", ["a" * 1025], "TOO_LONG", f"{GRAMMAR}.choice"),
        ],
    }.items():
        for each in cases:
            is_read = each.reason in (None, "TOO_LARGE", "INVALID_GRAMMAR") and not each.is_unsendable
            case = each if able or not is_read else bad(each.kind, each.value, "UNSUPPORTED", GRAMMAR)
            yield from _of(f"{GRAMMAR}.{name}", [case])


def _other_rows(served: Served) -> Iterator[Row]:
    for name, cases in {
        "request_id": texts(128, refused={"NUL": "NOT_PRINTABLE_ASCII"}),
        "cache_salt": texts(256),
        "priority": [
            fine("zero", 0),
            fine("negative", -1),
            fine("negative", -1000),
            bad("negative", -1001, "OUT_OF_RANGE"),
            fine("limit-1", 999),
            fine("limit", 1000),
            bad("limit+1", 1001, "OUT_OF_RANGE"),
            bad("huge", 2**31 - 1, "OUT_OF_RANGE"),
            *(unsendable(kind, value) for kind, value in NOBODY),
        ],
        "max_queue_time_s": [
            bad("zero", 0.0, "OUT_OF_RANGE"),
            bad("negative", -1.0, "OUT_OF_RANGE"),
            fine("limit-1", 299.0),  # above the server's own limit it is that
            fine("limit", 300.0),
            fine("limit+1", 301.0),
            fine("huge", 1e308),
            *(bad(kind, value, "OUT_OF_RANGE") for kind, value in NOBODY),
        ],
        "echo": switches(),
    }.items():
        yield from _of(name, cases)
    yield Row("model", "empty", BASE | {"model": ""})
    yield Row("model", "limit", BASE | {"model": served.name})
    yield Row("model", "limit+1", BASE | {"model": "m" * 129}, ("model", "TOO_LONG"))
    yield Row("model", "huge", BASE | {"model": "m" * 20_000}, ("model", "TOO_LONG"))
    yield Row("model", "unset", BASE)


def _input_rows(served: Served) -> Iterator[Row]:
    others = {path: value for path, value in BASE.items() if path != "tokens.ids"}
    last = served.vocab_size - 1
    most = served.max_model_len - 1
    for path, cases in {
        "text": [
            bad("unset", None, "REQUIRED", "input"),
            bad("empty", "", "EMPTY_PROMPT"),
            fine("NUL", "\x00"),
            fine("limit-1", "a" * (most - 1)),
            fine("limit", "a" * most),
            bad("limit+1", "a" * (most + 1), "PROMPT_TOO_LONG"),
            bad("huge", "a" * 20_000, "PROMPT_TOO_LONG"),
            unsendable("wrong type", "\ud800"),
        ],
        "tokens.ids": [
            bad("unset", None, "REQUIRED", "input"),
            bad("empty", [], "EMPTY_PROMPT"),
            fine("zero", [0]),
            fine("limit-1", [last - 1]),
            fine("limit", [last]),
            bad("limit+1", [last + 1], "TOKEN_OUT_OF_VOCABULARY"),
            bad("huge", [2**32 - 1], "TOKEN_OUT_OF_VOCABULARY"),
            fine("limit", [3] * most),
            bad("limit+1", [3] * (most + 1), "PROMPT_TOO_LONG"),
            bad("huge", [3] * 20_000, "PROMPT_TOO_LONG"),
            unsendable("negative", [-1]),
            *(unsendable(kind, [value]) for kind, value in NOBODY),
        ],
    }.items():
        yield from _of(path, cases, others, is_alone=True)


def _chat_rows() -> Iterator[Row]:
    others = {path: value for path, value in BASE.items() if path != "tokens.ids"}
    turn = {"chat.messages.role": "user", "chat.messages.content": "a"}
    message = "chat.messages[0]"
    for path, cases in {
        "chat.messages.role": [
            bad("empty", "", "INVALID_ROLE", f"{message}.role"),
            bad("NUL", "\x00", "INVALID_ROLE", f"{message}.role"),
            fine("limit-1", "r" * 63),
            fine("limit", "r" * 64),
            bad("limit+1", "r" * 65, "INVALID_ROLE", f"{message}.role"),
            bad("huge", "r" * 20_000, "INVALID_ROLE", f"{message}.role"),
            unsendable("wrong type", "\ud800"),
        ],
        "chat.messages.content": [
            fine("empty", ""),
            fine("NUL", "\x00"),
            bad("huge", "a" * 20_000, "PROMPT_TOO_LONG", "chat.messages"),
            unsendable("wrong type", 5),
        ],
        "chat.messages.tool_call_id": [fine("empty", ""), fine("NUL", "\x00"), fine("huge", "a" * 20_000)],
        "chat.messages.name": [fine("empty", ""), fine("NUL", "\x00"), fine("huge", "a" * 20_000)],
        "chat.messages.tool_calls": json_cases(f"{message}.tool_calls", is_list=True),
        "chat.tools": json_cases("chat.tools[0]", is_list=True),
        "chat.template_kwargs": json_cases("chat.template_kwargs", is_list=False),
    }.items():
        yield Row(path, "unset", others | turn)
        for case in cases:
            yield from _of(path, [case], others | turn, is_alone=True)


def _of(
    path: str, cases: Sequence[Case], others: Mapping[str, Any] | None = None, is_alone: bool = False
) -> Iterator[Row]:
    """Turn a field's cases into rows, on top of the base or, if it is alone, of `others` only."""
    base = dict(others or {}) if is_alone else BASE | dict(others or {})
    if not is_alone:
        yield Row(path, "unset", base if path not in BASE else {k: v for k, v in base.items() if k != path})
    for case in cases:
        fields = base if case.value is None else base | {path: case.value}
        refusal = None if case.reason is None else (case.field or path, case.reason)
        yield Row(path, case.kind, fields, refusal, case.is_unsendable)


def _put(message: Any, path: str, value: Any) -> None:
    """Set one field. Of a repeated message the last one is meant; the first value makes it."""
    *outer, name = path.split(".")
    for each in outer:
        inner = getattr(message, each)
        if message.DESCRIPTOR.fields_by_name[each].is_repeated:
            message = inner[-1] if len(inner) else inner.add()
        else:
            inner.SetInParent()
            message = inner
    found = message.DESCRIPTOR.fields_by_name[name]
    if found.message_type is not None and not found.is_repeated:
        getattr(message, name).SetInParent()
        getattr(message, name).update(value)
    elif found.message_type is not None and not found.message_type.GetOptions().map_entry:
        for each in value:
            getattr(message, name).add().update(each)
    elif isinstance(value, Mapping):
        getattr(message, name).update(value)
    elif found.is_repeated:
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


__all__ = ["KINDS", "Row", "Served", "kind_of", "paths", "rows"]
