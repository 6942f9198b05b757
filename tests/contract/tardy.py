"""A processor that goes wrong in the middle of an output: it raises, or sleeps."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Tardy(LogitsProcessor):
    """At token `at` of an output, counted from 0, it sleeps for `sleep_s`, or raises if that is not given."""

    name = "tardy"
    extra_arg_names: ClassVar[Sequence[str] | None] = ("at", "sleep_s")

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        self._states = req_states
        self._asked: dict[int, dict[str, Any]] = {}  # by row

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self._asked[req_idx] = dict(sampling_params.extra_args)
        return bool(self._asked[req_idx])

    def apply_staged_writes(self) -> None:
        pass  # all of it is on the host

    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        for req_idx in ctx.idx_mapping_np.tolist():
            asked = self._asked[req_idx]
            if asked and int(self._states.total_len[req_idx] - self._states.prompt_len[req_idx]) == asked["at"]:
                if "sleep_s" not in asked:
                    raise LookupError("no such table")
                time.sleep(asked["sleep_s"])
        return logits
