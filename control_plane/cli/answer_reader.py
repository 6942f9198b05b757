"""Reads the responses of one call, until they make a completion."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from control_plane.cli.results import Candidate, Completion, Output
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2


@dataclass(slots=True)
class _Parts:
    """What has come of one output."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[Candidate, ...]] = field(default_factory=list)
    finish_reason: str = ""
    stopped_by: str | int | None = None

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        self.texts.append(response.text)
        self.token_ids += response.token_ids
        self.logprobs += _candidates(response.logprobs)
        if response.finish_reason:
            name = common_pb2.FinishReason.Name(response.finish_reason)
            self.finish_reason = name.removeprefix("FINISH_REASON_").lower()
        match response.WhichOneof("stopped_by"):
            case "stop_string":
                self.stopped_by = response.stop_string
            case "stop_token_id":
                self.stopped_by = response.stop_token_id

    def output(self) -> Output:
        return Output(
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stopped_by=self.stopped_by,
            logprobs=tuple(self.logprobs),
        )


class AnswerReader:
    """One answer as it comes. Owned by the task that makes the call; made when the call is."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock  # seconds, monotonic
        self._started_at = clock()
        self._first_at: float | None = None
        self._outputs: dict[int, _Parts] = {0: _Parts()}
        self._prompt: list[inference_pb2.PromptPart] = []
        self._usage = inference_pb2.Usage()

    def read(self, response: inference_pb2.GenerateResponse) -> None:
        """Take the next response."""
        if self._first_at is None and response.token_ids:
            self._first_at = self._clock()
        self._outputs.setdefault(response.index, _Parts()).take(response)
        if response.HasField("prompt"):
            self._prompt.append(response.prompt)
        if response.HasField("usage"):
            self._usage = response.usage

    def complete(self) -> Completion:
        """Return the whole answer. Called once the final response was read."""
        now = self._clock()
        first, *others = (self._outputs[index].output() for index in sorted(self._outputs))
        return Completion(
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            stopped_by=first.stopped_by,
            logprobs=first.logprobs,
            others=tuple(others),
            prompt="".join(part.text for part in self._prompt),
            prompt_token_ids=tuple(token_id for part in self._prompt for token_id in part.token_ids),
            prompt_logprobs=tuple(place for part in self._prompt for place in _candidates(part.logprobs)),
            prompt_tokens=self._usage.prompt_tokens,
            output_tokens=self._usage.output_tokens,
            cached_tokens=self._usage.cached_tokens,
            first_token_s=(now if self._first_at is None else self._first_at) - self._started_at,
            total_s=now - self._started_at,
        )


def _candidates(places: Iterable[inference_pb2.TokenLogprobs]) -> list[tuple[Candidate, ...]]:
    return [
        tuple(
            Candidate(token_id, logprob if math.isfinite(logprob) else None, rank)
            for token_id, logprob, rank in zip(place.token_ids, place.logprobs, place.ranks, strict=True)
        )
        for place in places
    ]
