"""Reads grammars, and says which tokens each allows next.

Knows `llguidance` and one model's tokenizer; which row a grammar belongs to, and which thread works when, is the
business of `grammars.py`.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from plugins.grammar_limits import PARSER_LIMITS
from plugins.types import TokenId

MAX_KEPT: Final = 64  # grammars that were read, for further outputs of the same one
_TOO_COMPLEX: Final = ("ParserTooComplex", "LexerTooComplex")
_LIMITS: Final = ("too many", "limit", "max is")  # in messages, where the reason does not say it
_DEAD_END: Final = "noextension"  # likewise: no text goes on from here


class GrammarFault(Exception):
    """A grammar is of no use any more. The message goes on after "the grammar", and quotes neither it nor the text."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class GrammarState:
    """How far one output has come in its grammar. One thread at a time may use it."""

    def __init__(self, matcher: Any, eos_token_ids: Sequence[TokenId]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_consumed = 0

    def advance(self, token_ids: Sequence[TokenId]) -> bytes:
        """Append tokens to the output and return which may come next: a bit each, the lowest of a byte first.

        An end-of-sequence token may come where the output is complete, and is all that may come if nothing else can.
        Raises: GrammarFault: the grammar does not allow a token, no token can come next, or it is too complex here.
        """
        if self._matcher.is_stopped():  # what runs ahead of an output that has ended ends it again
            token_ids = [token_id for token_id in token_ids if token_id not in self._eos_token_ids]
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            raise self._fault(f"one of the tokens {self._num_consumed} to {self._num_consumed + len(token_ids) - 1}")
        self._num_consumed += len(token_ids)
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._fault("any token")
        has_end = any(mask[token_id // 8] >> token_id % 8 & 1 for token_id in self._eos_token_ids)
        if has_end and not self._matcher.is_accepting():  # a grammar may name the token itself
            mask = _without(mask, self._eos_token_ids)
        if not any(mask):
            raise self._dead_end()
        return mask

    def _fault(self, what: str) -> GrammarFault:
        message = self._matcher.get_error().lower()
        if self._matcher.stop_reason() in _TOO_COMPLEX or any(part in message for part in _LIMITS):
            description = f"is too complex after {self._num_consumed} tokens of the output; make it simpler"
            return GrammarFault("GRAMMAR_TOO_COMPLEX", description)
        if _DEAD_END in message:
            return self._dead_end()
        description = f"does not allow {what} of the output, or nothing can follow"
        return GrammarFault("GRAMMAR_FAILED", description)

    def _dead_end(self) -> GrammarFault:
        return GrammarFault("INVALID_GRAMMAR", f"leaves no token after {self._num_consumed} of the output; correct it")


class GrammarReader:
    """The tokenizer, and the grammars read with it. One thread at a time may use it; its states live by themselves."""

    def __init__(self, tokenizer_json: bytes, eos_token_ids: Sequence[TokenId]) -> None:
        """Raises: GrammarFault: the tokenizer is of a kind that cannot be used."""
        from llguidance import LLMatcher, LLParserLimits  # a worker serves without it

        self._tokenizer = _read_tokenizer(tokenizer_json, tuple(eos_token_ids))
        self._make_matcher = LLMatcher
        self._limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
        self._eos_token_ids = tuple(eos_token_ids)
        self._kept: OrderedDict[str, Any] = OrderedDict()  # at the start of the text; the one used last is the last

    def read(self, grammar: str) -> GrammarState:
        """Return the state of a new output. Takes 1 ms to 1 s for a grammar that admission has taken.

        Raises: GrammarFault: it cannot be read; admission would not have taken it.
        """
        matcher = self._kept.pop(grammar, None)
        if matcher is None:
            matcher = self._make_matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if matcher.is_error():
                raise GrammarFault("GRAMMAR_FAILED", "cannot be read")
        self._kept[grammar] = matcher
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return GrammarState(matcher.deep_copy(), self._eos_token_ids)


@lru_cache(maxsize=4)  # the workers of one process share them
def _read_tokenizer(tokenizer_json: bytes, eos_token_ids: tuple[TokenId, ...]) -> Any:
    """Takes 0.2 s for 49,152 tokens, in which no other thread of Python runs. Raises: GrammarFault."""
    from llguidance import LLTokenizer

    try:
        # A file may carry the settings of its training.
        tree = {**json.loads(tokenizer_json), "truncation": None, "padding": None}
        return LLTokenizer(json.dumps(tree), eos_token=list(eos_token_ids))
    except ValueError as error:
        raise GrammarFault("GRAMMAR_FAILED", f"cannot be used with the model's tokenizer: {error}") from error


def _without(mask: bytes, token_ids: Sequence[TokenId]) -> bytes:
    left = bytearray(mask)
    for token_id in token_ids:
        left[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(left)
