"""A process that reads grammars for admission, so that one that takes too long can be killed.

`python -m control_plane.admission.grammar_child` answers each line of JSON on its input with one on its output, and
ends with its input. It forks for each grammar: the fork has the tokenizer at hand, and may die of the grammar. How a
constraint becomes a grammar is the business of `grammar_text.py`, who asks that of `grammar_process.py`.
"""

import contextlib
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from random import Random
from typing import Any, Final

from control_plane.admission.grammar_text import Refused, grammar_text
from plugins.grammar_limits import PARSER_LIMITS

MAX_BYTES: Final = 512 << 20  # that one grammar may take
NICENESS: Final = 5  # whoever computes tokens goes first
NUM_WALKED: Final = 64  # tokens of the text that is tried
_TOO_COMPLEX: Final = (
    "too large",
    "too many",
    "too complex",
    "limit",
    "fuel",
    "current row has",
    "unable to determine",
)
_UNSUPPORTED: Final = ("unimplemented keys", "not supported", "only supported", "unknown format")
_SAID_BETTER: Final = {  # what is unsupported too, where the parser's words name no remedy that a caller has
    "coerce_one_of": "has a oneOf whose alternatives could both fit; write anyOf, or alternatives of different types",
    "retrieving it failed": "has a $ref to another document; put what it refers to under $defs",
}
_FOR_GRAMMARS: Final = re.compile("; (consider|try) .*", re.DOTALL)  # advice on rules, which a schema has none of
_FOR_SCHEMAS: Final = "; make the schema simpler: fewer optional properties and alternatives, and values that end"
_NO_TEXT: Final = "no text fits it that the model can write"
_DEAD_END: Final = (
    "begins texts that cannot go on: an end-of-sequence token, which it ends with by itself, and tokens that the model "
    "does not have can be no part of it"
)
_TOO_SLOW: Final = "takes longer than {timeout_s:g} s or more than 512 MiB to read; make it simpler"


class GrammarChild:
    """The tokenizers that this process has been given, by name. Answers one question after the other."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Any] = {}

    def answer(self, question: Mapping[str, Any]) -> dict[str, str]:
        """Take a tokenizer, or judge a grammar: {"grammar": ...} or {"reason": ..., "message": ...}."""
        if "tokenizer_json" in question:
            return self._take_tokenizer(question)
        return self._judge_in_a_fork(question)

    def _take_tokenizer(self, question: Mapping[str, Any]) -> dict[str, str]:
        try:
            from llguidance import LLTokenizer

            self._tokenizers[question["tokenizer"]] = LLTokenizer(
                question["tokenizer_json"], eos_token=question["eos_token_ids"]
            )
        except ImportError:
            return {"reason": "UNSUPPORTED", "message": "the package llguidance is not installed"}
        except ValueError as error:
            return {"reason": "UNSUPPORTED", "message": f"the model's tokenizer cannot be used for it: {error}"}
        return {}

    def _judge_in_a_fork(self, question: Mapping[str, Any]) -> dict[str, str]:
        timeout_s = question["timeout_s"]
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _judge_and_exit(question, self._tokenizers[question["tokenizer"]], writing, timeout_s)
        os.close(writing)
        try:
            answer = _read_all(reading, time.monotonic() + timeout_s)
        finally:
            os.close(reading)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not answer:
            return {"reason": "TIMEOUT", "message": _TOO_SLOW.format(timeout_s=timeout_s)}
        told: dict[str, str] = json.loads(answer)
        return told


def _judge_and_exit(question: Mapping[str, Any], tokenizer: Any, writing: int, timeout_s: float) -> None:
    """Be the fork: write the answer and end. Ends by itself too, should the process that waits for it be gone."""
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
        num_bytes = _address_space() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        try:
            answer = {"grammar": judge(question["kind"], question["text"], tokenizer)}
        except Refused as refused:
            answer = {"reason": refused.reason, "message": refused.message}
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(writing, data) :]
    finally:
        os._exit(0)


def _address_space() -> int:
    """Return the bytes that this process has mapped."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _read_all(fd: int, deadline_s: float) -> bytes:
    """Return what a pipe brings until it ends; nothing if that takes too long."""
    data = b""
    while select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        more = os.read(fd, 1 << 16)
        if not more:
            return data
        data += more
    return b""


def judge(kind: str, text: str, tokenizer: Any) -> str:
    """Return the grammar of a constraint as workers read it.

    A text is made up after it, token by token, to find what only shows on the way.
    Raises: Refused: it is no grammar, no text fits it, or it is too complex.
    """
    from llguidance import LLMatcher, LLParserLimits

    grammar = grammar_text(kind, text)
    limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise _refusal(matcher, kind)
    dice = Random(0)
    for num_walked in range(NUM_WALKED):
        mask = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            if num_walked == 0 or _is_too_complex(matcher):
                raise _refusal(matcher, kind)
            break  # a way that leads nowhere, beside others that do
        for token_id in tokenizer.eos_tokens:
            mask[token_id // 8] &= ~(1 << token_id % 8)
        chosen = _choose(mask, dice)
        if chosen is None:
            if not matcher.is_accepting():
                raise Refused("INVALID_GRAMMAR", _NO_TEXT if num_walked == 0 else _DEAD_END)
            break
        if not matcher.consume_token(chosen):
            if _is_too_complex(matcher):
                raise _refusal(matcher, kind)
            break
    return grammar


def _choose(mask: bytearray, dice: Random) -> int | None:
    """Return a token that the mask allows; None if there is none."""
    start = dice.randrange(len(mask))
    for first, part in ((start, mask[start:]), (0, mask[:start])):
        stripped = part.lstrip(b"\0")
        if stripped:
            allowed = [bit for bit in range(8) if stripped[0] >> bit & 1]
            return (first + len(part) - len(stripped)) * 8 + dice.choice(allowed)
    return None


def _is_too_complex(matcher: Any) -> bool:
    return matcher.stop_reason() in ("ParserTooComplex", "LexerTooComplex") or _has(matcher.get_error(), _TOO_COMPLEX)


def _refusal(matcher: Any, kind: str) -> Refused:
    message = matcher.get_error().partition("\n<non-verbose/>")[0]
    if "regex parse error" not in message:
        for sign, description in _SAID_BETTER.items():
            if sign in message:
                return Refused("UNSUPPORTED_KEYWORD", description)
        if _has(message, _UNSUPPORTED):
            return Refused("UNSUPPORTED_KEYWORD", message)
    if _is_too_complex(matcher):
        if kind == "json_schema":
            message = _FOR_GRAMMARS.sub(_FOR_SCHEMAS, message)
        return Refused("GRAMMAR_TOO_COMPLEX", message)
    if message == "NoExtensionBias":
        return Refused("INVALID_GRAMMAR", "no text fits it")
    return Refused("INVALID_GRAMMAR", message)


def _has(message: str, parts: tuple[str, ...]) -> bool:
    return any(part in message.lower() for part in parts)


def main() -> None:
    """Answer until the input ends."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child = GrammarChild()
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(child.answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
