"""Logits processors of somebody else: one that turns scores round, and one that does what it must not.

Tests install this distribution as its users would, and find its processors by their entry points.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Turn(LogitsProcessor):
    """Gives each token the score of the one so many places before it, after so many tokens of output.

    It counts what it sees by itself, and so has to begin with what a row has already. One device thread owns it.
    """

    extra_arg_names = ("turn", "turn_after")
    parameter_schema: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"turn": {"type": "integer", "minimum": 1}, "turn_after": {"type": "integer", "minimum": 0}},
    }

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        self._states = req_states
        self._places = [0] * config.max_num_reqs
        self._num_left = [0] * config.max_num_reqs  # tokens until it begins
        self._new: list[Row] = []  # rows whose history is not read yet

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if sampling_params.extra_args.get("turn") == 13:
            raise ValueError("13 is unlucky")

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self._places[req_idx] = int(sampling_params.extra_args.get("turn", 0))
        self._num_left[req_idx] = int(sampling_params.extra_args.get("turn_after", 0))
        self._new.append(req_idx)
        return self._places[req_idx] > 0

    def apply_staged_writes(self) -> None:
        for row in self._new:
            self._num_left[row] -= int(self._states.prefill_len[row] - self._states.prompt_len[row])
        self._new.clear()

    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        for row, req_idx in enumerate(ctx.expanded_idx_mapping.tolist()):
            if not self._places[req_idx]:
                continue
            if self._num_left[req_idx] <= 0:
                logits[row] = logits[row].roll(self._places[req_idx])
            self._num_left[req_idx] -= 1
        return logits


class Trouble(LogitsProcessor):
    """Does what the argument `trouble` says: it raises in a method of that name, or returns something wrong."""

    extra_arg_names = ("trouble",)

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        self._troubles: dict[int, str] = {}  # of the rows that are accepted

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        trouble = sampling_params.extra_args.get("trouble")
        if trouble == "ValueError":
            raise ValueError("such trouble is not wanted")
        if trouble == "validate_params":
            raise KeyError("what it looked for")

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        trouble = sampling_params.extra_args.get("trouble", "")
        self._troubles[req_idx] = trouble
        if trouble == "add_request":
            raise KeyError("what it looked for")
        return bool(trouble)

    def apply_staged_writes(self) -> None:
        for req_idx, trouble in self._troubles.items():
            if trouble == "apply_staged_writes":
                self._troubles[req_idx] = ""
                raise KeyError("what it looked for")

    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        import torch

        troubles = {self._troubles.get(req_idx) for req_idx in ctx.idx_mapping_np.tolist()}
        if "apply" in troubles:
            logits.fill_(0.0)
            raise KeyError("what it looked for")
        if "wrong shape" in troubles:
            return logits[:, 1:]
        if "new tensor" in troubles:
            return torch.clone(logits)
        return logits
