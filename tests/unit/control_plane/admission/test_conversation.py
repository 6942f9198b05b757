"""What a conversation may be before its template sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from control_plane.admission.conversation import Conversation, read_conversation
from control_plane.admission.submission import ChatMessage, Submission
from plugins.errors import InvalidRequest
from tests.unit.control_plane.admission.asking import validator

HI = ChatMessage(role="user", content="hi")


def read(
    *messages: ChatMessage,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    max_bytes: int = 1000,
) -> Conversation:
    return read_conversation(messages, tools, template_kwargs or {}, max_bytes)


def faults(*messages: ChatMessage, **others: Any) -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as refused:
        read(*messages, **others)
    return [(violation.field, violation.reason) for violation in refused.value.violations]


def nested(depth: int) -> dict[str, Any]:
    """An object of so many objects within one another."""
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def test_a_message_has_the_keys_that_were_given() -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}

    conversation = read(
        ChatMessage(role="assistant", tool_calls=[call]),
        ChatMessage(role="tool", content="2", tool_call_id="c1", name="f"),
        tools=[{"type": "function"}],
        template_kwargs={"enable_thinking": False},
    )

    assert conversation == Conversation(
        messages=(
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"},
        ),
        tools=({"type": "function"},),
        template_kwargs={"enable_thinking": False},
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param({"a": float("nan")}, "OUT_OF_RANGE", id="not a number"),
        pytest.param({"a": [1, float("inf")]}, "OUT_OF_RANGE", id="infinite"),
        pytest.param({"a": 10**400}, "OUT_OF_RANGE", id="huge"),
        pytest.param(nested(17), "TOO_DEEP", id="deep"),
        pytest.param({"a": "\ud800"}, "NOT_UNICODE", id="half a surrogate pair"),
        pytest.param({"a": b"x"}, "WRONG_TYPE", id="bytes"),
        pytest.param({"a": {1: 2}}, "WRONG_TYPE", id="a name that is no text"),
        pytest.param([1], "WRONG_TYPE", id="no object"),
        pytest.param({"a": "x" * 1000}, "PROMPT_TOO_LARGE", id="large"),
    ],
)
def test_what_is_no_json_of_some_size_is_refused_at_its_place(value: Any, reason: str) -> None:
    in_call = ChatMessage(role="assistant", tool_calls=[value])
    list_of_tools = "chat.tools" if reason == "PROMPT_TOO_LARGE" else "chat.tools[1]"
    list_of_messages = "chat.messages" if reason == "PROMPT_TOO_LARGE" else "chat.messages[1].tool_calls"

    assert faults(HI, tools=[{}, value]) == [(list_of_tools, reason)]
    assert faults(HI, in_call) == [(list_of_messages, reason)]
    assert faults(HI, template_kwargs=value) == [("chat.template_kwargs", reason)]


def test_values_sixteen_deep_are_let_through() -> None:
    assert read(HI, tools=[nested(16)], template_kwargs=nested(16)).tools == (nested(16),)


def test_nul_and_large_numbers_are_let_through() -> None:
    tool = {"a": "\x00", "b": 2**63, "c": -0.0, "d": None, "e": True}

    assert read(ChatMessage(role="user", content="\x00", name="\x00"), tools=[tool]).tools == (tool,)


def test_all_that_a_conversation_holds_counts_towards_its_size() -> None:
    message = ChatMessage(role="tool", content="é", tool_call_id="12", name="f", tool_calls=[{"a": 1}])
    num_bytes = 4 + 2 + 2 + 1 + 7

    assert read(message, max_bytes=num_bytes).messages[0]["content"] == "é"
    assert faults(message, max_bytes=num_bytes - 1) == [("chat.messages", "PROMPT_TOO_LARGE")]
    assert read(message, tools=[{}], template_kwargs={"b": []}, max_bytes=num_bytes + 2 + 8).tools == ({},)
    assert faults(message, tools=[{}], max_bytes=num_bytes + 1) == [("chat.tools", "PROMPT_TOO_LARGE")]
    assert faults(message, tools=[{}], template_kwargs={"b": []}, max_bytes=num_bytes + 2 + 7) == [
        ("chat.template_kwargs", "PROMPT_TOO_LARGE")
    ]


def test_texts_that_are_not_unicode_are_named_with_their_place() -> None:
    message = ChatMessage(role="tool", content="\ud800", tool_call_id="\ud800", name="\ud800")

    assert faults(HI, message) == [
        ("chat.messages[1].content", "NOT_UNICODE"),
        ("chat.messages[1].tool_call_id", "NOT_UNICODE"),
        ("chat.messages[1].name", "NOT_UNICODE"),
    ]


def test_of_very_many_faults_the_first_ones_are_told() -> None:
    assert len(faults(HI, tools=[{"a": float("nan")}] * 100)) == 32


def test_tools_and_calls_are_counted_before_anybody_looks_at_them() -> None:
    class Unread(Sequence[Any]):
        """So many that nobody should read them."""

        def __init__(self, length: int) -> None:
            self._length = length

        def __len__(self) -> int:
            return self._length

        def __getitem__(self, place: Any) -> Any:
            raise AssertionError("this was to be counted alone")

    calling = [ChatMessage(role="assistant", tool_calls=Unread(4097))] * 2

    assert faults(*calling, tools=Unread(1025)) == [("chat.messages", "TOO_MANY"), ("chat.tools", "TOO_MANY")]
    assert len(read(HI, tools=[{}] * 1024, max_bytes=4000).tools) == 1024
    (message,) = read(ChatMessage(role="assistant", tool_calls=[{}] * 8192), max_bytes=20_000).messages
    assert len(message["tool_calls"]) == 8192


def test_a_wrong_role_a_wrong_text_and_a_wrong_variable_are_told_together() -> None:
    submission = Submission(
        messages=[ChatMessage(role="the user", content="hi"), ChatMessage(role="user", content="\ud800")],
        template_kwargs={"bos_token": "<s>", "tools": []},
    )

    with pytest.raises(InvalidRequest) as refused:
        validator().validate(submission)

    assert [(each.field, each.reason) for each in refused.value.violations] == [
        ("chat.messages[0].role", "INVALID_ROLE"),
        ("chat.messages[1].content", "NOT_UNICODE"),
        ("chat.template_kwargs", "RESERVED"),
        ("chat.template_kwargs", "RESERVED"),
    ]


@pytest.mark.parametrize(("num_messages", "reason"), [(0, "EMPTY_PROMPT"), (128, "PROMPT_TOO_LONG")])
def test_with_a_wrong_number_of_messages_all_other_faults_are_told(num_messages: int, reason: str) -> None:
    submission = Submission(
        messages=[HI] * num_messages, tools=[{"a": float("nan")}], template_kwargs={"bos_token": "<s>"}
    )

    with pytest.raises(InvalidRequest) as refused:
        validator().validate(submission)

    assert [(each.field, each.reason) for each in refused.value.violations] == [
        ("chat.messages", reason),
        ("chat.tools[0]", "OUT_OF_RANGE"),
        ("chat.template_kwargs", "RESERVED"),
    ]


def test_a_conversation_with_tools_is_admitted_as_its_template_writes_it() -> None:
    plain = Submission(messages=[HI])
    with_tools = Submission(messages=[replace(HI, name="ann")], tools=[{"a": 1}])  # which the template does not read

    (first,), (second,) = (validator().validate(each).requests for each in (plain, with_tools))

    assert second.prompt_token_ids == first.prompt_token_ids


def test_a_variable_that_is_the_server_s_is_refused() -> None:
    submission = Submission(messages=[HI], template_kwargs={"bos_token": "<s>"})

    with pytest.raises(InvalidRequest) as refused:
        validator().validate(submission)

    assert [(each.field, each.reason) for each in refused.value.violations] == [("chat.template_kwargs", "RESERVED")]
