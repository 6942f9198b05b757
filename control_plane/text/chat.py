"""Chat templates: how a conversation becomes one prompt.

Renders, and sees to it that a special token which somebody typed cannot be taken for one of the template's.
Templates come with the operator's model, never with a request.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plugins.errors import FieldViolation, InvalidRequest

FIELD = "chat.messages"
PRIVATE_USE = range(0xE000, 0xF900)  # Unicode gives these characters no meaning
MAX_DESCRIPTION = 500  # characters of a template's error; statuses travel in headers


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as one text."""

    text: str
    break_mark: str  # stands inside each special token that a message contained; "" if none did


class ChatTemplate:
    """One model's template. Immutable; may be used from several threads.

    The names and filters are those that Hugging Face's templates expect: `messages`, `add_generation_prompt`,
    `bos_token`, `eos_token`, `tools` and `documents` (none), `raise_exception`, `strftime_now`, `tojson`, loop
    controls.
    """

    def __init__(self, source: str, bos_token: str, eos_token: str, now: Callable[[], datetime]) -> None:
        self._source = source
        self._variables = {
            "add_generation_prompt": True,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "tools": None,
            "documents": None,
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.filters["tojson"] = _to_json
        self._template: Template | None = None
        self._broken = ""
        try:
            self._template = environment.from_string(source) if source else None
        except TemplateError as error:  # plain text is still served
            self._broken = f"the model's chat template cannot be used: {error}; send text or tokens instead"

    def render(self, messages: Sequence[tuple[str, str]], special_tokens: Sequence[str]) -> RenderedChat:
        """Render (role, content) pairs, with the start of the assistant's answer.

        The template sees contents as they are, so that it may trim or compare them, but for one thing: a special
        token in a content has a character of private use behind its first letter, wherever the template moves it.
        A template that looks for special tokens in contents finds none. A special token of a single character
        cannot be broken and stays special, and so does one that the template itself puts together, say from a role.
        Raises: InvalidRequest: there is no template, it refuses the messages, or it fails on them.
        """
        if self._template is None:
            raise _refusal("NO_CHAT_TEMPLATE", self._broken or "the model has no chat template; send text or tokens")
        typed = [token for token in special_tokens if any(token in content for _, content in messages)]
        break_mark = self._unused_character(content for _, content in messages) if typed else ""
        turns = [{"role": role, "content": _break(content, typed, break_mark)} for role, content in messages]
        try:
            return RenderedChat(self._template.render(messages=turns, **self._variables), break_mark)
        except Exception as error:  # a template is foreign code: what it raises is its answer to these messages
            why = f"the model's chat template refuses these messages: {error}"
            raise _refusal("CHAT_TEMPLATE_FAILED", why[:MAX_DESCRIPTION]) from error

    def _unused_character(self, contents: Iterable[str]) -> str:
        used = set(self._source).union(*contents)
        for code in PRIVATE_USE:
            if chr(code) not in used:
                return chr(code)
        raise _refusal(
            "NO_UNUSED_CHARACTER",
            f"contents that name special tokens must leave one of {len(PRIVATE_USE)} characters of private use free",
        )


def _break(content: str, typed: Sequence[str], break_mark: str) -> str:
    """Put the mark behind the first letter of each special token."""
    for token in typed:
        if len(token) > 1:
            content = content.replace(token, token[0] + break_mark + token[1:])
    return content


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON for a prompt: unlike Jinja's own filter it escapes neither HTML nor letters beyond ASCII."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refusal(reason: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(FIELD, reason, description)])
