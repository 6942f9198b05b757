"""A worker that computes nothing: it knows which rows of a plan sample a token, and when they end.

What a token is, and how long a step takes, is told from outside; plans are trusted, `tests/fakes.py` checks them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from plugins.types import FinishReason, RequestId, Row, StepPlan, StepResult, TokenId


@dataclass(slots=True)
class _Progress:
    request_id: RequestId
    num_known: int
    num_computed: int
    num_output: int
    max_tokens: int
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """What one step would have to compute."""

    num_prompt_tokens: int  # in chunks of more than a decode
    num_decodes: int
    num_context_tokens: int  # keys that all chunks together attend to


class FakeRows:
    """The rows of one worker. A request ends when it has max_tokens; end-of-sequence tokens end nothing."""

    def __init__(self, token: Callable[[RequestId, int], TokenId]) -> None:
        """`token` gives the nth output token of a request."""
        self._token = token
        self._rows: dict[Row, _Progress] = {}

    def execute(self, plan: StepPlan) -> tuple[StepResult, Work]:
        """Carry a plan out."""
        for row in plan.released_rows:
            del self._rows[row]
        for admission in plan.admitted:
            num_known = len(admission.token_ids)
            self._rows[admission.row] = _Progress(
                admission.request_id,
                num_known,
                admission.num_cached_tokens,
                num_known - admission.num_prompt_tokens,
                admission.sampling.max_tokens or num_known,
            )
        rows: list[Row] = []
        counts: list[int] = []
        token_ids: list[TokenId] = []
        finishes: list[FinishReason | None] = []
        num_prompt_tokens = num_decodes = num_context_tokens = 0
        for chunk in plan.chunks:
            progress = self._rows[chunk.row]
            if progress.has_ended:
                rows.append(chunk.row)
                counts.append(0)
                finishes.append(None)
                continue
            progress.num_computed += chunk.num_tokens
            num_context_tokens += progress.num_computed
            if chunk.num_tokens > 1:
                num_prompt_tokens += chunk.num_tokens
            else:
                num_decodes += 1
            if progress.num_computed < progress.num_known:
                continue
            rows.append(chunk.row)
            counts.append(1)
            token_ids.append(self._token(progress.request_id, progress.num_output))
            progress.num_known += 1
            progress.num_output += 1
            progress.has_ended = progress.num_output >= progress.max_tokens
            finishes.append(FinishReason.LENGTH if progress.has_ended else None)
        result = StepResult(
            seq=plan.seq,
            rows=tuple(rows),
            counts=tuple(counts),
            token_ids=tuple(token_ids),
            finishes=tuple(finishes),
        )
        return result, Work(num_prompt_tokens, num_decodes, num_context_tokens)
