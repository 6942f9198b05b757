"""A processor whose module cannot be imported where there is no torch."""

import torch

from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingParams


class Eager(LogitsProcessor):
    """Adds nothing to the scores."""

    extra_arg_names = ()

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        self._nothing = torch.zeros(config.vocab_size)

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        return True

    def apply_staged_writes(self) -> None:
        pass  # nothing changes

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        return logits + self._nothing
