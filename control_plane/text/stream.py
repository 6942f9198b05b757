"""The text of one output: what is certain of it, and where a stop string ends it.

Joins tokens, stop strings and stop tokens to one text; when text is certain is the business of `detokenizer.py`, how
stop strings are found that of `stop.py`.
"""

from collections.abc import Sequence

from control_plane.text.detokenizer import Detokenizer
from control_plane.text.stop import StopStrings
from plugins.types import SamplingParams, TokenId


class TextStream:
    """The text of one output while its tokens arrive. Owned by the task that serves the request.

    The stop string that is complete first ends the output: the token with which it is complete is the last one, and
    the text ends before it, or right behind it with `include_stop_str_in_output`. Of stop strings that end at the
    same character the longest counts. One that is complete with token number k counts if k >= min_tokens.
    A stop token has no text without `include_stop_str_in_output`.

    Invariant: the pieces given out, joined, are the start of what `decode` gives for all tokens, cut by these rules;
    each is of whole characters. Held back is what could become part of a stop string, and nothing else.
    """

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams, stops: StopStrings | None = None) -> None:
        """`stops` are the stop strings of `sampling`, if they are ready; else they are made so here."""
        self._detokenizer = detokenizer
        self._has_text = sampling.detokenize
        self._keeps_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._stops = (stops or StopStrings(sampling.stop)) if sampling.stop and sampling.detokenize else None
        self._state = 0  # of the stop strings behind the text that they have read
        self._num_tokens = 0  # that were pushed
        self._num_ahead = 0  # characters that the stop strings have read and the detokenizer still holds
        self._certain: list[str] = []  # to be taken
        self._held = ""  # certain too, but it may begin a stop string
        self._stop_string: str | None = None

    @property
    def is_watching(self) -> bool:
        """True if a stop string can end this output."""
        return self._stops is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, None as long as none did."""
        return self._stop_string

    def push(self, token_ids: Sequence[TokenId], is_stopped: bool = False) -> int | None:
        """Take the next tokens; `is_stopped` says that the last one is a stop token.

        Returns how many of them, at least one, belong to the output if a stop string ends it among them, else None.
        0 after it has ended. Raises: whatever the tokenizer raises, for these tokens alone.
        """
        if not self._has_text:
            return None
        if is_stopped and not self._keeps_stop:
            token_ids = token_ids[:-1]
        if self._stops is None:
            self._certain.append(self._detokenizer.push(token_ids))
            return None
        return self._watch(token_ids, self._stops)

    def take(self) -> str:
        """Return the text that came to be certain since the last call and is not held back."""
        piece = "".join(self._certain)
        self._certain.clear()
        return piece

    def close(self) -> str:
        """Return the rest of the text, for the output has ended. "" when called again.

        A character that stays incomplete becomes U+FFFD, as `decode` makes it; a stop string that ends in it ends the
        text, and no longer the output.
        """
        if self._has_text and self._stop_string is None:
            piece = self._detokenizer.flush()
            if self._stops is None:
                self._certain.append(piece)
            else:
                self._read(piece[self._num_ahead :], self._stops)
                self._certain.append(self._held)
                self._num_ahead, self._held = 0, ""
        return self.take()

    def _watch(self, token_ids: Sequence[TokenId], stops: StopStrings) -> int | None:
        if self._stop_string is not None:
            return 0
        for index, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            piece = self._detokenizer.push([token_id])
            fresh = piece[self._num_ahead :]
            self._num_ahead = max(0, self._num_ahead - len(piece))
            # A token may end a stop string and begin a character that the detokenizer waits for.
            whole = self._detokenizer.peek()
            fresh += whole[self._num_ahead :]
            self._num_ahead = max(self._num_ahead, len(whole))
            if fresh and self._read(fresh, stops):
                return index
        return None

    def _read(self, text: str, stops: StopStrings) -> bool:
        """Add certain text. Returns whether it is the last, because a stop string is complete."""
        self._state, match = stops.read(self._state, text, self._num_tokens >= self._min_tokens)
        before, text = len(self._held), self._held + text
        if match is None:
            end = len(text) - stops.num_held(self._state)
            self._certain.append(text[:end])
            self._held = text[end:]
            return False
        end = before + match.end
        self._stop_string = text[end - match.length : end]
        self._certain.append(text[:end] if self._keeps_stop else text[: end - match.length])
        self._held = ""
        return True
