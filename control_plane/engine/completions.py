"""Whole outputs: what deliveries come to when nobody reads them as they come.

Collects; which requests there are and when they step is the business of `local.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.engine.outputs import Delivery
from control_plane.text.stream import TextStream
from plugins.errors import DetokenizerFailed, ServingError
from plugins.types import FinishReason, Request, RequestId, TokenId, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of one request, and its further outputs if it asked for several."""

    request_id: RequestId
    token_ids: tuple[TokenId, ...]
    text: str  # as the stop rule leaves it; empty without `detokenize`
    finish: FinishReason
    error: ServingError | None  # set when the end is not STOP or LENGTH
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's places from 1 on, if asked for
    stop_string: str | None = None  # what ended it, if a stop string did
    others: tuple["Completion", ...] = ()  # the outputs after the first, in order, each with a name of its own


class OutputCollector:
    """One output while its deliveries come. Owned by the thread that steps the engine."""

    def __init__(self, request: Request, text: TextStream) -> None:
        """The engine pushes to a text that is watching."""
        self._request_id = request.request_id
        self._text = text
        self._token_ids: list[TokenId] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._end: Delivery | None = None

    @property
    def is_complete(self) -> bool:
        """True once the end was delivered."""
        return self._end is not None

    def take(self, delivery: Delivery) -> None:
        """Take the next delivery of this output."""
        self._token_ids += delivery.token_ids
        self._logprobs += (place for place in delivery.logprobs if place is not None)
        self._prompt_logprobs += delivery.prompt_logprobs
        if delivery.finish is not None:
            self._end = delivery

    def complete(self, others: Sequence[Completion] = ()) -> Completion:
        """Return the whole output. Called once, after its end."""
        finish = FinishReason.FAILED if self._end is None else self._end.finish or FinishReason.FAILED
        error = None if self._end is None else self._end.error
        try:
            if not self._text.is_watching:
                self._text.push(self._token_ids, finish is FinishReason.STOP)
            stop_string = self._text.stop_string
            text = self._text.close()
        except Exception as raised:  # a decoder is foreign code: what it raises ends this output alone
            finish, error = FinishReason.FAILED, DetokenizerFailed(raised)
            text, stop_string = self._text.take(), None
        return Completion(
            request_id=self._request_id,
            token_ids=tuple(self._token_ids),
            text=text,
            finish=finish,
            error=error,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            stop_string=stop_string if finish is FinishReason.STOP else None,
            others=tuple(others),
        )
