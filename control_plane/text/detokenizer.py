"""Turns the tokens of one output stream into text while they arrive.

Knows when text is certain; what is sent when, and to whom, is its user's business.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from plugins.types import TokenId

REPLACEMENT = "\ufffd"  # what decoders make of bytes that are no character, or not yet one
MAX_HELD = 16  # tokens; a character has at most 4 bytes and a token at least one, so more can only be rubbish


class Detokenizer:
    """The text of one output stream. Owned by the task that serves the request.

    `tokenizers.DecodeStream` does the fast part: it gives text once its last character is whole. It never gives up
    what it holds, so the tokens since its last text are kept here too, to flush them at the end and to let go of
    them when they are too many (its cost per token grows with them).

    Invariant: the pieces given out, joined, are the start of `tokenizer.decode` of all tokens without special ones.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[TokenId]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._stream = DecodeStream()
        self._held: list[TokenId] = []  # no text was given for these yet
        self._before: list[TokenId] = []  # those of the last text; a decoder may treat the first token of all otherwise

    def push(self, token_ids: Sequence[TokenId]) -> str:
        """Take the next tokens; return the text that is certain now. Special tokens have none."""
        text = ""
        for token_id in token_ids:
            if token_id in self._special_ids:
                continue
            self._held.append(token_id)
            try:
                piece = self._stream.step(self._tokenizer, token_id)
            except Exception:  # the decoder reads earlier tokens anew and takes back text that was given out
                text += self.flush()
                continue
            if piece is not None:
                self._before = self._held
                self._held = []
                text += piece
            elif len(self._held) >= MAX_HELD:
                text += self._give_up()
        return text

    def flush(self) -> str:
        """Return what was held back: characters that stayed incomplete become U+FFFD. "" when called again."""
        piece = self._text(self._held)
        self._before, self._held = self._held or self._before, []
        self._stream = DecodeStream()
        return piece

    def peek(self) -> str:
        """Return the start of what is held back that is certain: the characters before an incomplete one.

        `push` and `flush` still give it out, with what follows. Costs a decoding while something is held.
        """
        return self._text(self._held).rstrip(REPLACEMENT) if self._held else ""

    def _give_up(self) -> str:
        """Return the held text but for its last character, which may still become whole."""
        text = self._text(self._held)
        for end in range(len(self._held) - 1, 0, -1):
            start, rest = self._text(self._held[:end]), self._text(self._held[end:])
            if start + rest == text:  # no character lies across the cut
                break
        else:
            return self.flush()
        self._before, self._held = self._held[:end], self._held[end:]
        self._stream = DecodeStream()
        self._stream.step(self._tokenizer, self._held)
        return start

    def _text(self, token_ids: list[TokenId]) -> str:
        """Decode tokens as they read behind those of the last text."""
        before = self._tokenizer.decode(self._before, skip_special_tokens=False)
        both = self._tokenizer.decode(self._before + token_ids, skip_special_tokens=False)
        if not both.startswith(before):
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return both[len(before) :]
