"""Counts and logs each request once: how it ended, how long it took, how many tokens it had.

Prompts and tokens appear nowhere here; ids and counts do.
"""

import logging
from collections.abc import Callable

from plugins.errors import InvalidRequest, InvariantBroken, ServingError
from plugins.metrics import (
    INTER_TOKEN,
    PROMPT_TOKENS,
    REQUEST_LATENCY,
    REQUEST_OUTPUT_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUESTS,
    TTFT,
    Metrics,
)
from plugins.types import Request

logger = logging.getLogger(__name__)


class RequestMeter:
    """One request's numbers, from its arrival, which is when this is made. Owned by the task that serves it."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock  # seconds, monotonic
        self._arrived_at = clock()
        self._first_at: float | None = None
        self._last_at: dict[int, float] = {}  # by output: when the last of its tokens that were given went
        self._request: Request | None = None
        self._model: str | None = None
        self._num_output_tokens = 0
        self._is_ended = False
        self.outcome: str | None = None  # of an answer that is complete; None: there is none yet

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were given to the client, of all outputs."""
        return self._num_output_tokens

    def admit(self, request: Request, model: str) -> None:
        """The engine has taken the request, or the first one of its outputs."""
        self._request, self._model = request, model
        self._metrics.count(PROMPT_TOKENS, len(request.prompt_token_ids))

    def deliver(self, num_tokens: int, output: int = 0) -> None:
        """So many tokens of an output go to the client now; they share the time since the last ones of that output."""
        if num_tokens == 0:
            return
        now = self._clock()
        num_gaps = num_tokens
        last_at = self._last_at.get(output)
        if self._first_at is None:
            self._first_at = now
            self._metrics.observe(TTFT, now - self._arrived_at)
        if last_at is None:
            last_at = self._arrived_at
            num_gaps -= 1
        for _ in range(num_gaps):
            self._metrics.observe(INTER_TOKEN, (now - last_at) / num_tokens)
        self._last_at[output] = now
        self._num_output_tokens += num_tokens

    def complete(self, outcome: str) -> None:
        """The answer is complete: what the client does from here on changes nothing."""
        self.outcome = outcome

    def end(self, outcome: str, error: ServingError | None = None) -> None:
        """The request is over: stop, length, or the name of a status and the error that led to it.

        Of an error the log tells reason and fields, and not the message, which may quote the request.
        Raises: InvariantBroken: it was over before.
        """
        if self._is_ended:
            raise InvariantBroken(f"a request that has ended ended again with {outcome}")
        self._is_ended = True
        total_s = self._clock() - self._arrived_at
        self._metrics.count(REQUESTS, 1, outcome)
        self._metrics.observe(REQUEST_LATENCY, total_s, outcome)
        fields: dict[str, object] = {"outcome": outcome, "total_s": round(total_s, 4)}
        if self._request is not None:
            num_prompt_tokens = len(self._request.prompt_token_ids)
            self._metrics.observe(REQUEST_PROMPT_TOKENS, num_prompt_tokens)
            self._metrics.observe(REQUEST_OUTPUT_TOKENS, self._num_output_tokens)
            fields |= {
                "request_id": self._request.request_id,
                "model": self._model,
                "num_prompt_tokens": num_prompt_tokens,
                "num_output_tokens": self._num_output_tokens,
            }
        if error is not None:
            fields["reason"] = error.reason
        if isinstance(error, InvalidRequest):
            fields["violations"] = [f"{violation.field} {violation.reason}" for violation in error.violations]
        if self._first_at is not None:
            fields["first_token_s"] = round(self._first_at - self._arrived_at, 4)
        logger.info("request_finished", extra=fields)
