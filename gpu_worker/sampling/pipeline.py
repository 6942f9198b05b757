"""From the model's scores to tokens: every stage in between, in the order that docs/sampling.md tells.

Calls the stages and gathers what became of each row; what a stage does to the scores is its own business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gpu_worker.runner.inputs import Ints, StepInputs
from gpu_worker.sampling.logprobs import Logprobs, SampledLogprobs, tell
from gpu_worker.sampling.processors import ProcessorChain
from gpu_worker.sampling.sampler import sample
from plugins.types import Admission, Row, RowFailure

Bools = npt.NDArray[np.bool_]


class Grammars(Protocol):
    """The grammars of the rows that have one. The device thread alone calls it."""

    def admit(self, admission: Admission) -> None:
        """Take a new occupant of a row, and begin to read its grammar elsewhere if it has one."""

    def release(self, rows: Sequence[Row]) -> None:
        """Forget some rows."""

    def clear(self) -> None:
        """Forget every row."""

    def close(self) -> None:
        """End what runs beside the device thread."""

    def begin(self, rows_R: Ints) -> None:
        """Begin to find out what these rows allow, while the forward runs: all their tokens so far are known."""

    def mask(self, logits_RV: Tensor, rows_R: Ints, is_alone: bool) -> tuple[Bools, list[RowFailure]]:
        """Set to -inf, in place, what the grammars of the rows do not allow. `is_alone`: the step has no other rows.

        Returns which rows must wait, [R], because their grammar is not read yet, and those whose grammar failed.
        """


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one forward pass led to. R = sequences that sample."""

    tokens: Tensor  # [R] int64, on the device; NO_TOKEN where the scores were not finite
    is_waiting: Bools  # [R], on the host: no token was chosen, and none of the known ones is lost
    failures: Mapping[Row, RowFailure]  # rows that a stage failed; their tokens mean nothing
    logprobs: SampledLogprobs | None  # None: nobody asked


class SamplingPipeline:
    """All stages of one worker. Owned by the runner; called from the device thread alone."""

    def __init__(self, processors: ProcessorChain, grammars: Grammars | None) -> None:
        self._processors = processors
        self._grammars = grammars
        self._logprobs = Logprobs()

    def clear(self) -> None:
        """Forget every row."""
        self._processors.clear()
        self._logprobs.clear()
        if self._grammars is not None:
            self._grammars.clear()

    def close(self) -> None:
        """End what runs beside the device thread. Nothing may follow."""
        if self._grammars is not None:
            self._grammars.close()

    def release(self, rows: Sequence[Row]) -> None:
        """Forget some rows."""
        self._processors.release(rows)
        self._logprobs.release(rows)
        if self._grammars is not None:
            self._grammars.release(rows)

    def admit(self, admissions: Sequence[Admission]) -> list[RowFailure]:
        """Offer new occupants of rows to every stage. Returns the rows that one of them failed."""
        failures: list[RowFailure] = []
        for admission in admissions:
            self._logprobs.admit(admission)
            failure = self._processors.add_request(admission.row, admission.sampling)
            if failure is not None:
                failures.append(failure)
            elif self._grammars is not None:
                self._grammars.admit(admission)
        return failures

    def apply_staged_writes(self) -> list[RowFailure]:
        """Bring the stages' state to the device: once a step, after the row table is written, before the forward.

        Returns the rows, of this step or not, that one of them failed.
        """
        return self._processors.apply_staged_writes()

    def begin(self, inputs: StepInputs) -> None:
        """Start what may run beside the forward."""
        if self._grammars is not None:
            self._grammars.begin(inputs.sampled_rows)

    def sample(self, logits_RV: Tensor, inputs: StepInputs) -> Sampled:
        """Choose one token per row. Overwrites the logits, [R, V] float32."""
        is_waiting: Bools = np.zeros(len(inputs.sampled_rows), dtype=np.bool_)
        failures: list[RowFailure] = []
        asked = self._logprobs.look(logits_RV, inputs.sampled_rows)
        if self._grammars is not None:
            is_alone = len(inputs.rows) == len(inputs.sampled_rows)
            is_waiting, failures = self._grammars.mask(logits_RV, inputs.sampled_rows, is_alone)
        logits_RV, broken = self._processors.apply(logits_RV, inputs.context)
        failures += broken
        tokens_R = sample(logits_RV, inputs.sampling)
        told = None if asked is None else tell(asked, logits_RV, inputs.sampling, tokens_R)
        return Sampled(tokens_R, is_waiting, {failure.row: failure for failure in failures}, told)
