"""Ends outputs where their text says so: a stop string is found here, before the scheduler sees the tokens.

How text comes of tokens is the business of `control_plane/text`; what becomes of a request that ended, of the core.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from plugins.errors import DetokenizerFailed, InvariantBroken
from plugins.types import FinishReason, Row, StepResult, TokenId, TokenLogprobs

if TYPE_CHECKING:
    from control_plane.engine.live import Live


class StopWatcher(Protocol):
    """Reads one output as it comes, and says where it ends."""

    def push(self, token_ids: Sequence[TokenId], is_stopped: bool = False) -> int | None:
        """Take the next tokens; how many of them belong to the output, if its text ends among them, else None.

        `is_stopped`: the worker ended the output, and the last token is what ended it.
        """


@dataclass(frozen=True, slots=True)
class Cut:
    """A result as it is once the texts of its outputs were read."""

    result: StepResult
    broken: tuple[tuple["Live", DetokenizerFailed], ...]  # outputs that have no text


def cut_at_stops(result: StepResult, owners: Mapping[Row, "Live"]) -> Cut:
    """Let the watchers read a result, each the tokens of its own row, and leave out what comes behind a stop.

    A row that ended so says STOP. Rows of requests that have ended are left as they are: nobody reads them.
    """
    stops: dict[int, int] = {}  # by index of the row: its tokens up to the stop
    broken: list[tuple[Live, DetokenizerFailed]] = []
    start = 0
    for index, (row, count) in enumerate(zip(result.rows, result.counts, strict=True)):
        end = start + count
        owner = owners[row]
        if count and owner.watcher is not None and owner.lane is not None:
            is_stopped = result.finishes[index] is FinishReason.STOP
            try:
                num_tokens = owner.watcher.push(result.token_ids[start:end], is_stopped)
                if num_tokens is not None:
                    if not 0 < num_tokens <= count:
                        raise InvariantBroken(f"an output ends after {num_tokens} of {count} tokens")
                    stops[index] = num_tokens
            except Exception as error:
                failed = DetokenizerFailed(error)
                failed.__cause__ = error
                broken.append((owner, failed))
        start = end
    return Cut(_shortened(result, stops) if stops else result, tuple(broken))


def _shortened(result: StepResult, stops: Mapping[int, int]) -> StepResult:
    counts, finishes = list(result.counts), list(result.finishes)
    token_ids: list[TokenId] = []
    logprobs: list[TokenLogprobs | None] = []
    start = 0
    for index, count in enumerate(result.counts):
        if index in stops:
            counts[index], finishes[index] = stops[index], FinishReason.STOP
        token_ids += result.token_ids[start : start + counts[index]]
        logprobs += result.logprobs[start : start + counts[index]]
        start += count
    return replace(
        result,
        counts=tuple(counts),
        finishes=tuple(finishes),
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
    )
