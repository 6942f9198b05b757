"""Checks a conversation before its template sees it: roles, tools and variables, and how large it all is.

Which variables a template lets a caller set is the business of `control_plane/text/chat.py`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.admission.json_values import JsonSizes, json_fault
from control_plane.admission.submission import ChatMessage
from control_plane.admission.texts import is_unicode
from plugins.errors import FieldViolation, InvalidRequest

MAX_FAULTS = 32  # of one conversation are told
MAX_ROLE_CHARACTERS = 64
MAX_TOOLS = 1024
MAX_TOOL_CALLS = 8192  # of all messages together
ROLE = re.compile(r"[A-Za-z0-9_-]+")  # templates build special tokens from roles: nothing else may get into one

Check = Callable[[Any, JsonSizes], tuple[str, str] | None]  # returns reason and description of a fault


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as templates expect it: JSON values that are no larger than they may be."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    template_kwargs: Mapping[str, Any]


def read_conversation(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
    max_bytes: int,
) -> Conversation:
    """Return it with those keys in each message that were given.

    `max_bytes` bounds all texts as UTF-8 and all else as JSON, together; what goes beyond is not looked at.
    Raises: InvalidRequest: there are faults, of which the first MAX_FAULTS are told.
    """
    violations = list(_number_violations(messages, tools))
    if violations:
        raise InvalidRequest(violations)
    sizes = JsonSizes(max_bytes)
    for field, value, check in _parts(messages, tools, template_kwargs):
        fault = check(value, sizes)
        if sizes.is_full:
            description = f"makes the conversation larger than the {max_bytes} bytes of admission.max_prompt_bytes"
            whole, _, _ = field.partition("[")
            raise InvalidRequest([*violations, FieldViolation(whole, "PROMPT_TOO_LARGE", description)])
        if fault is not None:
            violations.append(FieldViolation(field, *fault))
        if len(violations) == MAX_FAULTS:
            break
    if violations:
        raise InvalidRequest(violations)
    return Conversation(tuple(map(_turn, messages)), tuple(dict(tool) for tool in tools), dict(template_kwargs))


def _number_violations(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Iterator[FieldViolation]:
    """Look at numbers before contents: millions of empty objects are soon sent, and long looked at."""
    num_calls = sum(len(message.tool_calls) for message in messages)
    if num_calls > MAX_TOOL_CALLS:
        description = f"have {num_calls} tool calls together; at most {MAX_TOOL_CALLS} are allowed"
        yield FieldViolation("chat.messages", "TOO_MANY", description)
    if len(tools) > MAX_TOOLS:
        yield FieldViolation("chat.tools", "TOO_MANY", f"has {len(tools)} tools; at most {MAX_TOOLS} are allowed")


def _parts(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Check]]:
    """Yield what is to be checked, with its place, and how."""
    for index, message in enumerate(messages):
        place = f"chat.messages[{index}]"
        yield f"{place}.role", message.role, _role_fault
        yield f"{place}.content", message.content, _text_fault
        yield f"{place}.tool_call_id", message.tool_call_id, _text_fault
        yield f"{place}.name", message.name, _text_fault
        for call in message.tool_calls:
            yield f"{place}.tool_calls", call, json_fault
    for index, tool in enumerate(tools):
        yield f"chat.tools[{index}]", tool, json_fault
    if template_kwargs:
        yield "chat.template_kwargs", template_kwargs, json_fault


def _role_fault(role: str, sizes: JsonSizes) -> tuple[str, str] | None:
    if len(role) > MAX_ROLE_CHARACTERS or not ROLE.fullmatch(role):
        return "INVALID_ROLE", f"must be 1 to {MAX_ROLE_CHARACTERS} letters, digits, '_' or '-', such as user"
    sizes.add(len(role))
    return None


def _text_fault(text: str, sizes: JsonSizes) -> tuple[str, str] | None:
    """A text counts with its length, without what JSON would add."""
    if not is_unicode(text):
        return "NOT_UNICODE", "is not valid Unicode"
    sizes.add(len(text.encode()))
    return None


def _turn(message: ChatMessage) -> dict[str, Any]:
    """Templates ask whether a message has a key: those that were not given are left out."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [dict(call) for call in message.tool_calls]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.name:
        turn["name"] = message.name
    return turn
