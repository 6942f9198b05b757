"""Reads what a caller asks for out of its message.

Translates and keeps apart what was given and what was not; what is allowed is admission's business.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from control_plane.admission.submission import ChatMessage, Submission
from protos.codec_sampling import given_sampling, plain
from protos.inference.v1 import inference_pb2

Context = grpc.aio.ServicerContext[Any, Any]


def read_tenant(context: Context, key: str) -> str:
    """Return what the call's metadata says under this key; values that are given several times count as one list."""
    values = [value for name, value in context.invocation_metadata() or () if name == key]
    return ",".join(value if isinstance(value, str) else value.decode("latin-1") for value in values)


def read_submission(request: inference_pb2.GenerateRequest, tenant: str) -> Submission:
    """Read a request for generation."""
    return Submission(
        request_id=request.request_id,
        model=request.model,
        token_ids=request.tokens.ids if request.WhichOneof("input") == "tokens" else None,
        **_read_input(request),
        sampling=given_sampling(request.sampling),
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=tenant,
        max_queue_time_s=request.max_queue_time_s if request.HasField("max_queue_time_s") else None,
        echo=request.echo,
    )


def read_text(request: inference_pb2.TokenizeRequest) -> Submission:
    """Read what is to be tokenized."""
    return Submission(model=request.model, **_read_input(request))


def _read_input(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> dict[str, Any]:
    """Read a text or a conversation: the fields of a submission that tell it."""
    match request.WhichOneof("input"):
        case "text":
            return {"text": request.text}
        case "chat":
            return {
                "messages": _Read(request.chat.messages, _read_message),
                "tools": _Read(request.chat.tools, plain),
                "template_kwargs": plain(request.chat.template_kwargs),
            }
        case _:
            return {}


class _Read(Sequence[Any]):
    """What a message lists, each read whenever it is asked for: there may be millions, which admission counts first."""

    def __init__(self, messages: Sequence[Any], read: Callable[[Any], Any]) -> None:
        self._messages = messages
        self._read = read

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, place: Any) -> Any:
        chosen = self._messages[place]
        return _Read(chosen, self._read) if isinstance(place, slice) else self._read(chosen)


def _read_message(message: inference_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=_Read(message.tool_calls, plain),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )
