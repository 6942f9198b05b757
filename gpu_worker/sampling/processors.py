"""Runs the custom logits processors of a worker, in their order, between the forward and the sampler.

Knows which rows any of them accepted; what a processor does to the scores is its own business.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from plugins.errors import PluginFailed
from plugins.logits import LogitsContext, LogitsProcessor
from plugins.types import Row, SamplingParams


class ProcessorChain:
    """The processors of one worker. Owned by the runner; called from the device thread alone.

    Invariant: a row is marked if any processor accepted its present occupant. A step whose batch has no marked
    row skips the stage; else every processor sees the whole batch, in order.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], num_rows: int) -> None:
        self._processors = tuple(processors)
        self._is_accepted = np.zeros(num_rows, dtype=np.bool_)

    def add_request(self, row: Row, params: SamplingParams) -> None:
        """Offer a new occupant of the row to each processor. Raises: PluginFailed."""
        self._is_accepted[row] = False
        for each in self._processors:
            with _failing_as(each, "add_request"):
                self._is_accepted[row] |= each.add_request(row, params)

    def apply_staged_writes(self) -> None:
        """Let each processor bring its state to the device. Raises: PluginFailed."""
        for each in self._processors:
            with _failing_as(each, "apply_staged_writes"):
                each.apply_staged_writes()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Change the scores of the step. Shapes: logits and result [R, V] float32.

        Raises: PluginFailed: a processor raised, or returned another shape or dtype.
        """
        if not self._is_accepted[ctx.idx_mapping_np].any():
            return logits
        for each in self._processors:
            with _failing_as(each, "apply"):
                changed = each.apply(logits, ctx)
                if changed.shape != logits.shape or changed.dtype != logits.dtype:
                    raise ValueError(
                        f"returned {tuple(changed.shape)} {changed.dtype}, not {tuple(logits.shape)} {logits.dtype}"
                    )
            logits = changed
        return logits


@contextmanager
def _failing_as(processor: LogitsProcessor, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        name = f"{type(processor).__module__}.{type(processor).__qualname__}.{method}"
        raise PluginFailed(f"{name} failed: {type(error).__name__}: {error}") from error
