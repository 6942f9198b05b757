"""Reads a prompt, whether it comes as text, as tokens or as a conversation.

Refuses before it tokenizes what is too large to be tokenized in reasonable time.
"""

from collections.abc import Sequence
from typing import cast

from control_plane.admission.conversation import read_conversation
from control_plane.admission.submission import ChatMessage, Submission
from control_plane.admission.tokens import token_id_violations
from control_plane.engine.served import ServedModel
from plugins.errors import FieldViolation, InvalidRequest
from plugins.types import TokenId, WorkerInfo


class PromptReader:
    """Turns a submission's input into tokens. Stateless."""

    def __init__(self, max_prompt_bytes: int) -> None:
        self._max_prompt_bytes = max_prompt_bytes

    def read(self, submission: Submission, model: ServedModel) -> tuple[TokenId, ...]:
        """Return the tokens of a prompt that leaves room for at least one more. Raises: InvalidRequest."""
        token_ids = self.encode(submission, model)
        field = _field(submission)
        if not token_ids:
            raise _refusal(field, "EMPTY_PROMPT", "the prompt has no tokens; it needs at least one")
        _check_length(field, len(token_ids), model.worker)
        return token_ids

    def encode(self, submission: Submission, model: ServedModel) -> tuple[TokenId, ...]:
        """Return the tokens of a text or a conversation of any length, or the given ones. Raises: InvalidRequest."""
        inputs = (submission.text, submission.token_ids, submission.messages)
        if sum(given is not None for given in inputs) != 1:
            raise _refusal("input", "REQUIRED", "set exactly one of text, tokens and chat")
        if submission.text is not None:
            self._check_text("text", submission.text)
            return model.text.encode(submission.text)
        if submission.messages is not None:
            return self._encode_chat(submission, submission.messages, model)
        return _checked(submission.token_ids or (), model.worker)

    def _encode_chat(
        self, submission: Submission, messages: Sequence[ChatMessage], model: ServedModel
    ) -> tuple[TokenId, ...]:
        violations = _number_violations(len(messages), model.worker.model.max_model_len - 1)
        turns = () if violations else tuple(messages)  # too many are not read
        tools, variables = submission.tools, submission.template_kwargs
        try:
            conversation = read_conversation(turns, tools, variables, self._max_prompt_bytes)
        except InvalidRequest as error:
            violations += error.violations
        violations += model.text.variable_violations(variables)
        if violations:
            raise InvalidRequest(violations)
        return model.text.encode_chat(conversation.messages, conversation.tools, conversation.template_kwargs)

    def _check_text(self, field: str, text: str) -> None:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise _refusal(field, "NOT_UNICODE", f"is not valid Unicode: {error.reason}") from error
        if num_bytes > self._max_prompt_bytes:
            raise _refusal(
                field,
                "PROMPT_TOO_LARGE",
                f"has {num_bytes} bytes; admission.max_prompt_bytes allows {self._max_prompt_bytes}",
            )


def _field(submission: Submission) -> str:
    if submission.text is not None:
        return "text"
    return "chat.messages" if submission.messages is not None else "tokens.ids"


def _number_violations(num_messages: int, most: int) -> list[FieldViolation]:
    """Compare the number of messages with what could fit into the context."""
    if not num_messages:
        description = "the conversation has no messages; it needs at least one"
        return [FieldViolation("chat.messages", "EMPTY_PROMPT", description)]
    if num_messages > most:
        description = (
            f"the conversation has {num_messages} messages; this model's context has room for at most {most}, of one "
            "token each"
        )
        return [FieldViolation("chat.messages", "PROMPT_TOO_LONG", description)]
    return []


def _checked(token_ids: Sequence[int], worker: WorkerInfo) -> tuple[TokenId, ...]:
    """Check tokens that were given as such: their number first, because there may be millions."""
    if len(token_ids) >= worker.model.max_model_len:
        _check_length("tokens.ids", len(token_ids), worker)
    violations = token_id_violations("tokens.ids", token_ids, worker.model.vocab_size)
    if violations:
        raise InvalidRequest(violations)
    return cast("tuple[TokenId, ...]", tuple(token_ids))  # TokenId is a call for each, for nothing


def _check_length(field: str, num_tokens: int, worker: WorkerInfo) -> None:
    max_model_len = worker.model.max_model_len
    if num_tokens >= max_model_len:
        raise _refusal(
            field,
            "PROMPT_TOO_LONG",
            f"the prompt has {num_tokens} tokens; this model's context of {max_model_len} tokens must leave room for "
            f"at least 1 output token, so at most {max_model_len - 1} are allowed",
        )
    pool = worker.num_blocks * worker.block_size
    if num_tokens >= pool:
        raise _refusal(
            field,
            "EXCEEDS_KV_CACHE",
            f"the prompt has {num_tokens} tokens; the whole KV cache holds {pool} ({worker.num_blocks} blocks of "
            f"{worker.block_size}) and must leave room for at least 1 output token; shorten the prompt, or give the "
            "worker a larger cache (worker.kv_cache_gib)",
        )


def _refusal(field: str, reason: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(field, reason, description)])
