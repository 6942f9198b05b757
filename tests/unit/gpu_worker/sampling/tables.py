"""Rows of a worker as stages see them, without a worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.sampling.builtin import builtin_processors
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig
from plugins.types import Row, SamplingLimits, SamplingParams, TokenId

NUM_ROWS = 8
MAX_LEN = 96
EOS = TokenId(2)


@dataclass
class Tables:
    """RequestStates made of plain tensors."""

    vocab_size: int = 32
    max_num_reqs: int = NUM_ROWS
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.all_token_ids = torch.zeros((self.max_num_reqs, MAX_LEN), dtype=torch.int32)
        self.prompt_len = torch.zeros(self.max_num_reqs, dtype=torch.int32)
        self.prefill_len = torch.zeros(self.max_num_reqs, dtype=torch.int32)
        self.total_len = torch.zeros(self.max_num_reqs, dtype=torch.int32)

    def put(self, row: int, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Write a row; what its last occupant left beyond stays there."""
        tokens = (*prompt, *output)
        self.all_token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.prompt_len[row] = len(prompt)
        self.prefill_len[row] = len(tokens)
        self.total_len[row] = len(tokens)

    def config(self) -> ProcessorConfig:
        return ProcessorConfig(
            model="tiny",
            dtype="float32",
            vocab_size=self.vocab_size,
            max_model_len=MAX_LEN,
            max_num_reqs=self.max_num_reqs,
            eos_token_ids=(EOS,),
            device="cpu",
        )

    def stages(self, limits: SamplingLimits | None = None) -> tuple[LogitsProcessor, ...]:
        return builtin_processors(self.config(), self, limits or SamplingLimits())

    def context(self, *rows: int) -> LogitsContext:
        """One row of logits each, at the last known token."""
        index = torch.tensor(rows)
        places = self.total_len[index].long() - 1
        return LogitsContext(
            expanded_idx_mapping=index,
            expanded_local_pos=torch.zeros_like(index),
            idx_mapping=index,
            idx_mapping_np=index.numpy(),
            input_ids=self.all_token_ids[index, places].long(),
            pos=places,
            seq_lens_upper_bound_np=places.numpy() + 1,
        )

    def context_of_drafts(self, *drafts: tuple[int, Sequence[int]]) -> LogitsContext:
        """One row of logits behind the last known token and one behind each draft, for each (row, drafts)."""
        lines = [
            (row, local, int(self.total_len[row]) - 1 + local, token_id)
            for row, tokens in drafts
            for local, token_id in enumerate(
                (int(self.all_token_ids[row, int(self.total_len[row]) - 1]), *tokens),
            )
        ]
        rows, local, places, token_ids = (torch.tensor(column) for column in zip(*lines, strict=True))
        index = torch.tensor([row for row, _ in drafts])
        lengths = [int(self.total_len[row]) + len(tokens) for row, tokens in drafts]
        return LogitsContext(
            expanded_idx_mapping=rows,
            expanded_local_pos=local,
            idx_mapping=index,
            idx_mapping_np=index.numpy(),
            input_ids=token_ids,
            pos=places,
            seq_lens_upper_bound_np=np.array(lengths),
        )


def take(stages: Sequence[LogitsProcessor], row: int, **sampling: Any) -> list[bool]:
    """Offer a row to each stage and let them bring their state to the device; return their answers."""
    answers = [stage.add_request(Row(row), SamplingParams(**sampling)) for stage in stages]
    for stage in stages:
        stage.apply_staged_writes()
    return answers


def apply(stages: Sequence[LogitsProcessor], logits: Tensor, ctx: LogitsContext) -> Tensor:
    for stage in stages:
        logits = stage.apply(logits, ctx)
    return logits
