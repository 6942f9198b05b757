"""Asks a logits processor for one request's scores, without a worker."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plugins.conformance.logits_driver import VOCAB_SIZE, Subject, Tables
from plugins.logits import LogitsContext, LogitsProcessor
from plugins.types import Row, SamplingParams

PROMPT = (11, 12, 13)
ROW = 5  # not 0, which is the place of its scores
RULED_OUT = float("-inf")


def scores(
    cls: type[LogitsProcessor],
    args: Mapping[str, Any],
    output: Sequence[int] = (),
    drafts: Sequence[int] = (),
    *,
    prompt: Sequence[int] = PROMPT,
    section: Mapping[str, Any] | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """Return [1 + drafts, VOCAB_SIZE]: what becomes of scores that are 0, or those `before`."""
    tables = Tables()
    processor = Subject(cls, (), section or {}).build(tables)
    processor.add_request(Row(ROW), SamplingParams(extra_args=args))
    tables.write(ROW, (*prompt, *output), len(prompt))
    processor.apply_staged_writes()
    fed = (*prompt, *output)[-1:] + tuple(drafts)
    first = len(prompt) + len(output) - 1
    ctx = LogitsContext(
        expanded_idx_mapping=torch.full((len(fed),), ROW),
        expanded_local_pos=torch.arange(len(fed)),
        idx_mapping=torch.tensor([ROW]),
        idx_mapping_np=np.array([ROW]),
        input_ids=torch.tensor(fed),
        pos=torch.arange(first, first + len(fed)),
        seq_lens_upper_bound_np=np.array([first + len(fed)]),
    )
    return processor.apply(torch.zeros((len(fed), VOCAB_SIZE)) if before is None else before.clone(), ctx)


def ruled_out(scores_V: Tensor) -> list[int]:
    """Return the tokens that cannot be chosen."""
    return [int(each) for each in (scores_V == RULED_OUT).nonzero().flatten()]


def allowed(scores_V: Tensor) -> list[int] | str:
    """Return the tokens that can be chosen; "all" if each of them can."""
    found = [int(each) for each in (scores_V > RULED_OUT).nonzero().flatten()]
    return "all" if len(found) == VOCAB_SIZE else found
