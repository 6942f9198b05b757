"""What is read out of a caller's message: what was given, and nothing else."""

from dataclasses import replace
from typing import Any

from control_plane.admission.submission import ChatMessage, Submission
from control_plane.api.submissions import read_submission, read_text
from plugins.types import StructuredOutput, TokenId
from protos.common.v1 import common_pb2
from protos.inference.v1.inference_pb2 import Chat, GenerateRequest, TokenizeRequest
from protos.inference.v1.inference_pb2 import ChatMessage as Message


def test_an_empty_message_gives_nothing() -> None:
    assert read_submission(GenerateRequest(), "") == Submission()


def test_every_field_of_a_request_is_read() -> None:
    message = GenerateRequest(
        request_id="mine",
        model="small",
        text="hello",
        sampling=common_pb2.SamplingParams(n=2, stop=["x"]),
        priority=-3,
        cache_salt="pinch",
        max_queue_time_s=0.0,
        echo=True,
    )

    assert read_submission(message, "red") == Submission(
        request_id="mine",
        model="small",
        text="hello",
        sampling={"n": 2, "stop": ("x",)},
        priority=-3,
        cache_salt="pinch",
        tenant="red",
        max_queue_time_s=0.0,
        echo=True,
    )


def test_a_field_that_is_given_with_its_default_is_given() -> None:
    sampling = common_pb2.SamplingParams(temperature=1.0, n=1, min_tokens=0, detokenize=True, seed=0)

    submission = read_submission(GenerateRequest(text="", sampling=sampling), "")

    assert submission.text == ""
    assert submission.sampling == {"temperature": 1.0, "n": 1, "min_tokens": 0, "detokenize": True, "seed": 0}


def test_maps_lists_and_grammars_become_plain_values() -> None:
    sampling = common_pb2.SamplingParams(
        logit_bias={5: -1.5, -1: 2.0},
        stop_token_ids=[7],
        structured_output=common_pb2.StructuredOutput(choice=common_pb2.Choice(texts=["yes", "no"])),
    )
    sampling.extra_args.update({"budget": 3, "ratio": 0.5, "words": ["a", None, True], "deep": {"er": {}}})

    assert read_submission(GenerateRequest(sampling=sampling), "").sampling == {
        "logit_bias": {5: -1.5, -1: 2.0},
        "stop_token_ids": (TokenId(7),),
        "structured_output": StructuredOutput(choice=("yes", "no")),
        "extra_args": {"budget": 3, "ratio": 0.5, "words": ["a", None, True], "deep": {"er": {}}},
    }


def test_a_conversation_is_read_with_tools_calls_and_variables() -> None:
    chat = Chat(
        messages=[Message(role="user", content="How warm?"), Message(role="tool", content="21", name="weather")]
    )
    call: dict[str, Any] = {"type": "function", "function": {"name": "weather", "arguments": {"days": 2}}}
    chat.messages.add(role="assistant").tool_calls.add().update(call)
    chat.messages[1].tool_call_id = "c1"
    chat.tools.add().update({"type": "function", "function": {"name": "weather"}})
    chat.template_kwargs.update({"enable_thinking": False})

    for submission in (read_submission(GenerateRequest(chat=chat), ""), read_text(TokenizeRequest(chat=chat))):
        assert submission.text is None
        assert submission.messages is not None
        assert [replace(each, tool_calls=tuple(each.tool_calls)) for each in submission.messages] == [
            ChatMessage(role="user", content="How warm?"),
            ChatMessage(role="tool", content="21", name="weather", tool_call_id="c1"),
            ChatMessage(role="assistant", tool_calls=(call,)),
        ]
        assert list(submission.tools) == [{"type": "function", "function": {"name": "weather"}}]
        assert submission.template_kwargs == {"enable_thinking": False}


def test_the_turns_of_a_conversation_are_counted_without_being_read() -> None:
    chat = Chat(messages=[Message(role="user", content=word) for word in ("a", "b", "c")])

    messages = read_text(TokenizeRequest(chat=chat)).messages

    assert messages is not None
    assert (len(messages), messages[1].content, [each.content for each in messages[1:]]) == (3, "b", ["b", "c"])
