"""Chat templates: how a conversation becomes one prompt.

Renders; how a special token that somebody typed is told from the template's is the business of `typed_tokens.py`.
Templates come with the operator's model, never with a request.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from control_plane.text.typed_tokens import PRIVATE_USE, TypedTokens, texts_in, unused_mark
from plugins.errors import FieldViolation, InvalidRequest

MESSAGES_FIELD: Final = "chat.messages"
VARIABLES_FIELD: Final = "chat.template_kwargs"
MAX_DESCRIPTION = 500  # characters of a template's error; statuses travel in headers
BEYOND_ASCII = re.compile(f"[^\\x00-\\x7f{chr(PRIVATE_USE[0])}-{chr(PRIVATE_USE[-1])}]")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as one text."""

    text: str
    break_mark: str  # stands inside each special token that the caller's texts contained; "" if none did


class ChatTemplate:
    """One model's template. Immutable; may be used from several threads.

    The names and filters are those that Hugging Face's templates expect: `messages`, `tools` and `documents` (None if
    there are none), `add_generation_prompt`, `bos_token`, `eos_token`, `raise_exception`, `strftime_now`, `tojson`,
    loop controls. A template that does not look at tools ignores them.
    """

    def __init__(self, source: str, bos_token: str, eos_token: str, now: Callable[[], datetime]) -> None:
        self._source = source
        self._variables = {
            "add_generation_prompt": True,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "documents": None,
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.filters["tojson"] = _to_json
        self._reserved = frozenset({"messages", "tools", "bos_token", "eos_token", *environment.globals})
        self._template: Template | None = None
        self._broken = ""
        try:
            self._template = environment.from_string(source) if source else None
        except TemplateError as error:  # plain text is still served
            self._broken = f"the model's chat template cannot be used: {error}; send text or tokens instead"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        typed_tokens: TypedTokens,
    ) -> RenderedChat:
        """Render a conversation, with the start of the assistant's answer unless the variables say otherwise.

        All three are JSON values and reach the template as they are, so that it may trim or compare them, but for
        one thing: special tokens in them are broken, wherever the template moves them. A template that looks for
        special tokens in contents finds none. Those that it puts together itself, say from a role, stay special.
        Raises: InvalidRequest: there is no template, it refuses the messages, it fails on them, or a variable has the
        name of one that is not the caller's.
        """
        if self._template is None:
            raise _refusal("NO_CHAT_TEMPLATE", self._broken or "the model has no chat template; send text or tokens")
        if violations := self.variable_violations(variables):
            raise InvalidRequest(violations)
        typed = [value for message in messages for name, value in message.items() if name != "role"]
        texts = list(texts_in([*typed, *tools, *variables.values()]))
        mark = self._unused_mark(texts) if any(map(typed_tokens.is_in, texts)) else ""
        given = {
            "messages": [
                {
                    name: value if name == "role" else typed_tokens.break_up(value, mark)
                    for name, value in message.items()
                }
                for message in messages
            ],
            "tools": [typed_tokens.break_up(tool, mark) for tool in tools] or None,
            **{name: typed_tokens.break_up(value, mark) for name, value in variables.items()},
        }
        try:
            return RenderedChat(self._template.render({**self._variables, **given}), mark)
        except Exception as error:  # a template is foreign code: what it raises is its answer to these messages
            why = f"the model's chat template refuses these messages: {error}"
            raise _refusal("CHAT_TEMPLATE_FAILED", why[:MAX_DESCRIPTION]) from error

    def variable_violations(self, variables: Mapping[str, Any]) -> list[FieldViolation]:
        """Tell which of a caller's variables are not the caller's to set, or are not what every template expects."""
        violations = [
            FieldViolation(VARIABLES_FIELD, "RESERVED", f"may not set {name!r}, which is not the caller's to choose")
            for name in variables
            if name in self._reserved
        ]
        if not isinstance(variables.get("add_generation_prompt", True), bool):
            description = "add_generation_prompt must be true or false"
            violations.append(FieldViolation(VARIABLES_FIELD, "WRONG_TYPE", description))
        return violations

    def _unused_mark(self, texts: Sequence[str]) -> str:
        mark = unused_mark(self._source, texts)
        if mark is None:
            raise _refusal(
                "NO_UNUSED_CHARACTER",
                f"texts that name special tokens must leave one of {len(PRIVATE_USE)} characters of private use free",
            )
        return mark


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt: unlike Jinja's own filter it does not escape HTML, nor letters beyond ASCII if not asked to.

    Characters of private use are never escaped, for one of them may be the mark that breaks a special token.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return BEYOND_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _refusal(reason: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(MESSAGES_FIELD, reason, description)])
