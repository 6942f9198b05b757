"""A logits processor that keeps its promises, and bugs planted in it, each of which breaks one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLES: tuple[Mapping[str, Any], ...] = ({"fee": 2.5}, {"fee": 0.5})


class Fee(LogitsProcessor):
    """Takes a fee off the score of each token that the output has, drafts included."""

    extra_arg_names: ClassVar[Sequence[str] | None] = ("fee",)
    parameter_schema: ClassVar[Mapping[str, Any] | None] = {"type": "object", "properties": {"fee": {}}}

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        self.states = req_states
        self.fees: dict[int, float] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        fee = sampling_params.extra_args.get("fee", 0.0)
        if not isinstance(fee, int | float):
            raise ValueError(f"fee must be a number, and is {fee!r}")

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self.fees[req_idx] = float(sampling_params.extra_args.get("fee", 0.0))
        return self.fees[req_idx] != 0.0

    def apply_staged_writes(self) -> None:
        pass

    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        for place, req_idx in self.places(ctx):
            if self.fees.get(req_idx):
                said = sorted(set(self.output(place, req_idx, ctx)))
                logits[place, said] -= self.fees[req_idx]
        return logits

    def places(self, ctx: LogitsContext) -> Iterator[tuple[int, int]]:
        return enumerate(ctx.expanded_idx_mapping.tolist())

    def output(self, place: int, req_idx: int, ctx: LogitsContext) -> list[int]:
        start, end = int(self.states.prompt_len[req_idx]), int(self.states.total_len[req_idx])
        committed = self.states.all_token_ids[req_idx, start:end].tolist()
        num_drafts = int(ctx.expanded_local_pos[place])
        return [*committed, *ctx.input_ids[place + 1 - num_drafts : place + 1].tolist()]


class NoClassMethod(Fee):
    def validate_params(self, sampling_params: SamplingParams) -> None:  # type: ignore[override]  # the bug
        pass


class RaisesOnJunk(Fee):
    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if sampling_params.extra_args.get("fee", 0.0) < 0:
            raise ValueError("fee must not be negative")


class OtherSignature(Fee):
    def __init__(self, config: ProcessorConfig, device: str, req_states: RequestStates) -> None:
        super().__init__(config, req_states)


class OtherSchema(Fee):
    parameter_schema: ClassVar[Mapping[str, Any] | None] = {"type": "object", "properties": {"price": {}}}


class SaysNothing(Fee):
    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        super().add_request(req_idx, sampling_params)
        return None  # type: ignore[return-value]  # the bug


class AcceptsAll(Fee):
    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        super().add_request(req_idx, sampling_params)
        return True


class KeepsThePreviousOccupant(Fee):
    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        return "fee" in sampling_params.extra_args and super().add_request(req_idx, sampling_params)


class NeedsAdditions(Fee):
    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        super().__init__(config, req_states)
        self.staged: list[int] = []

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self.staged.append(req_idx)
        return super().add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        self.staged.pop()


class Leaves(Fee):
    """Would end the process, and tell nothing."""

    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        raise SystemExit(0)


class OtherType(Fee):
    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        return super().apply(logits, ctx).double()


class OneRow(Fee):
    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        return super().apply(logits, ctx)[:1]


class WritesDeclinedRows(Fee):
    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        return super().apply(logits, ctx) * 1.0001


class AddsNothingToDeclinedRows(Fee):
    """What was -0.0 is 0.0 then."""

    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        return super().apply(logits, ctx) + 0.0


class RaisesMinusInfinity(Fee):
    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        for place, req_idx in self.places(ctx):
            if self.fees.get(req_idx):
                logits[place, 3] = 5.0
                logits[place] = logits[place].clamp(min=-100.0)
        return logits


class MakesNan(Fee):
    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        for place, req_idx in self.places(ctx):
            if self.fees.get(req_idx):
                logits[place] -= logits[place] * 0
        return logits


class LeavesNothing(Fee):
    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        for place, req_idx in self.places(ctx):
            if self.fees.get(req_idx):
                logits[place] = float("-inf")
        return logits


class TakesPlacesForRows(Fee):
    def places(self, ctx: LogitsContext) -> Iterator[tuple[int, int]]:
        return ((place, place) for place in range(len(ctx.expanded_idx_mapping)))


class LooksAtNeighbours(Fee):
    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        for place, req_idx in self.places(ctx):
            if self.fees.get(req_idx):
                logits[place] -= self.fees[req_idx] * len(ctx.idx_mapping)
        return logits


class ForgetsHistory(Fee):
    """Counts what is fed to it, and knows nothing of what was said before."""

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        super().__init__(config, req_states)
        self.said: dict[int, list[int]] = {}

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self.said[req_idx] = []
        return super().add_request(req_idx, sampling_params)

    def output(self, place: int, req_idx: int, ctx: LogitsContext) -> list[int]:
        if ctx.pos[place] >= self.states.prompt_len[req_idx]:
            self.said[req_idx].append(int(ctx.input_ids[place]))
        return self.said[req_idx]


class IgnoresDrafts(Fee):
    def output(self, place: int, req_idx: int, ctx: LogitsContext) -> list[int]:
        start, end = int(self.states.prompt_len[req_idx]), int(self.states.total_len[req_idx])
        return list(self.states.all_token_ids[req_idx, start:end].tolist())


class WantsTheWholePrompt(Fee):
    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        if (ctx.pos < self.states.prompt_len[ctx.expanded_idx_mapping] - 1).any():
            raise IndexError("a row before the end of its prompt")
        return super().apply(logits, ctx)


class WritesStates(Fee):
    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        self.states.total_len[7] = 0
        return super().apply(logits, ctx)


class SharesItsRows(Fee):
    rows: ClassVar[dict[int, float]] = {}

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        super().__init__(config, req_states)
        self.fees = self.rows
