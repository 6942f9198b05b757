"""What a caller asks for, before anything about it has been checked, and what admission makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from control_plane.engine.served import ServedModel
from plugins.types import Request, SamplingParams

FILLED_IN: Final = frozenset({"bad_word_ids", "grammar"})  # fields of SamplingParams that are nobody's to give


def given(sampling: SamplingParams) -> dict[str, Any]:
    """Return every field as one that was given, so that none takes the model's default."""
    return {each.name: getattr(sampling, each.name) for each in fields(sampling) if each.name not in FILLED_IN}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()  # JSON objects, as the template expects them
    tool_call_id: str = ""  # "": it answers none
    name: str = ""  # "": it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as it was given. Exactly one of text, token_ids and messages is to be set."""

    request_id: str = ""  # "": admission draws one
    model: str = ""  # "": the only one
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[ChatMessage] | None = None
    tools: Sequence[Mapping[str, Any]] = ()  # JSON objects, as the template expects them
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams that were given, by name
    priority: int = 0  # lower goes first
    cache_salt: str = ""  # "": computed prompts are shared with all others that give none
    tenant: str = ""  # on whose account it runs; "" is everybody who gave no name
    max_queue_time_s: float | None = None  # None: the server's limit
    echo: bool = False  # tell the prompt too


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What the engine carries out for one submission."""

    requests: tuple[Request, ...]  # one for each output, in order; the first leads, the others are its siblings
    model: ServedModel
    max_queue_s: float
    echo: bool
