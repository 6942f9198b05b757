"""Runs the logits processors of a worker, in their order, between the forward and the draw of the tokens.

Knows which processor accepted which row, and keeps what one of them does wrong to the rows that it accepted; what a
processor does to the scores is its own business.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plugins.errors import InvalidConfig, PluginFailed
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates, own_copy
from plugins.logits_loading import LoadedProcessor, failure_message
from plugins.types import ProcessorInfo, Row, RowFailure, SamplingParams

logger = logging.getLogger(__name__)

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LoadedInstance:
    """A processor from outside, built for this worker."""

    processor: LogitsProcessor
    info: ProcessorInfo


@dataclass(frozen=True, slots=True)
class ReadOnlyStates:
    """The worker's tables as processors see them: the tensors themselves, without what changes them."""

    device: torch.device
    max_num_reqs: int
    vocab_size: int
    all_token_ids: Tensor
    prompt_len: Tensor
    prefill_len: Tensor
    total_len: Tensor

    @classmethod
    def of(cls, states: RequestStates) -> "ReadOnlyStates":
        """Look at some tables, whose tensors stay where they are."""
        return cls(**{name: getattr(states, name) for name in cls.__slots__})


def build_instances(
    processors: Sequence[LoadedProcessor], config: ProcessorConfig, states: RequestStates
) -> tuple[LoadedInstance, ...]:
    """Build each processor with its section of the configuration.

    Raises: InvalidConfig: one of them raises while it is built.
    """
    visible = ReadOnlyStates.of(states)
    instances = []
    for loaded in processors:
        own = replace(config, section=loaded.section)
        try:
            instances.append(LoadedInstance(loaded.cls(own, visible), loaded.info))
        except (Exception, SystemExit) as error:  # it is a plug-in's
            owner = loaded.info.distribution or "no installed distribution"
            raise InvalidConfig(
                f"{failure_message(loaded.info, '__init__', error)}; it is of {owner}: repair it, "
                "or its section in plugins.logits_processor_config, or leave it out"
            ) from error
    return tuple(instances)


@dataclass(frozen=True, slots=True)
class _Stage:
    processor: LogitsProcessor
    info: ProcessorInfo | None  # None: built in; what it raises is a bug of ours


class ProcessorChain:
    """The processors of one worker, built-in ones first. Owned by the runner; called from the device thread alone.

    A processor that no row of a batch needs is not called for it. Invariants: a row is marked if any processor has
    accepted its present occupant, and a row that failed is accepted by none until somebody else moves in.
    """

    def __init__(
        self,
        builtin: Sequence[LogitsProcessor],
        custom: Sequence[LoadedInstance],
        num_rows: int,
        check_declined: bool = False,
    ) -> None:
        """With `check_declined` each custom processor is held to the rows that it accepted, which waits for the
        device."""
        self._stages = (
            *(_Stage(each, None) for each in builtin),
            *(_Stage(each.processor, each.info) for each in custom),
        )
        self._check_declined = check_declined
        self._is_accepted: Bools = np.zeros((len(self._stages), num_rows), dtype=np.bool_)
        self._is_taken = self._is_accepted.copy()  # what each said; of a row that failed it stays, for plans in flight
        self._is_marked: Bools = np.zeros(num_rows, dtype=np.bool_)
        self._has_come = False  # somebody, since staged writes were applied; built-in stages write for nobody else

    def clear(self) -> None:
        """Forget every row."""
        self._is_accepted[:] = False
        self._is_marked[:] = False

    def release(self, rows: Sequence[Row]) -> None:
        """Forget some rows."""
        for row in rows:
            self._forget(row)

    def add_request(self, row: Row, params: SamplingParams) -> RowFailure | None:
        """Offer a new occupant of the row to each processor. Returns why the row failed, if one of them did."""
        self._forget(row)
        self._is_taken[:, row] = False
        self._has_come = True
        for index, stage in enumerate(self._stages):
            if stage.info is None:
                self._is_accepted[index, row] = stage.processor.add_request(row, params)
                continue
            try:
                answer: object = stage.processor.add_request(row, own_copy(params))
                why: BaseException | str | None = None
            except BaseException as error:  # it is a plug-in's
                answer, why = False, error
            if why is None and not isinstance(answer, bool | np.bool_):
                why = f"it returned {type(answer).__name__}, not bool"
            if why is not None:
                return self._fail(stage.info, "add_request", why, [row])[0]
            self._is_accepted[index, row] = self._is_taken[index, row] = bool(answer)
        self._is_marked[row] = self._is_accepted[:, row].any()
        return None

    def apply_staged_writes(self) -> list[RowFailure]:
        """Let each processor bring its state to the device. Returns the rows, of this step or not, that failed."""
        failures: list[RowFailure] = []
        for index, stage in enumerate(self._stages):
            if stage.info is None:
                if self._has_come:
                    stage.processor.apply_staged_writes()
                continue
            try:
                stage.processor.apply_staged_writes()
            except BaseException as error:  # it is a plug-in's
                rows = self._is_accepted[index].nonzero()[0]
                failures += self._fail(stage.info, "apply_staged_writes", error, rows)
        self._has_come = False
        return failures

    def apply(self, logits: Tensor, ctx: LogitsContext) -> tuple[Tensor, list[RowFailure]]:
        """Change the scores of the step, and tell which rows failed. Shapes: logits and result [R, V] float32."""
        rows_S = ctx.idx_mapping_np
        failures: list[RowFailure] = []
        if not self._is_marked[rows_S].any():
            return logits, failures
        for index, stage in enumerate(self._stages):
            if not self._is_accepted[index, rows_S].any():
                continue
            if stage.info is None:
                logits = stage.processor.apply(logits, ctx)
                continue
            before = logits.clone()
            changed, why = self._applied(index, stage.processor, logits, before, ctx)
            if why is None:
                logits = changed
                continue
            logits = before  # the processor may still hold what it was given
            rows = np.unique(rows_S[self._is_accepted[index, rows_S]])
            failures += self._fail(stage.info, "apply", why, rows)
        return logits, failures

    def _applied(
        self, index: int, processor: LogitsProcessor, logits: Tensor, before: Tensor, ctx: LogitsContext
    ) -> tuple[Tensor, BaseException | str | None]:
        """Return what a custom processor made of the scores, and why that cannot be used, if it cannot."""
        try:
            changed: object = processor.apply(logits, _copy(ctx))
            if not isinstance(changed, Tensor):
                return logits, f"it returned {type(changed).__name__}, not a tensor"
            if _form(changed) != _form(before):
                return logits, f"it returned {_form(changed)}, not {_form(before)}"
            if type(changed) is not Tensor or changed.is_neg():
                changed = torch.empty_like(before).copy_(changed)  # of a kind that the stages behind it can read
            changed = changed.contiguous()  # they write in place
            if self._check_declined and not _left_declined(self._is_taken[index], changed, before, ctx):
                return logits, "it changed rows that it had declined"
            return changed, None
        except BaseException as error:  # it is a plug-in's
            return logits, error

    def _fail(
        self, info: ProcessorInfo, method: str, why: BaseException | str, rows: Sequence[int] | npt.NDArray[np.int64]
    ) -> list[RowFailure]:
        message = failure_message(info, method, why)
        failures = [RowFailure(Row(int(row)), PluginFailed.reason, message) for row in rows]
        for failure in failures:
            self._forget(failure.row)
        logger.log(
            logging.ERROR if failures else logging.DEBUG,  # one that fails for nobody does so each step
            "logits_processor_failed",
            extra={  # without what it said, which may hold tokens
                "processor": info.name,
                "place": info.place,
                "method": method,
                "error": type(why).__name__ if isinstance(why, BaseException) else "WrongResult",
                "num_rows": len(failures),
            },
        )
        return failures

    def _forget(self, row: Row) -> None:
        self._is_accepted[:, row] = False
        self._is_marked[row] = False


def _left_declined(is_taken_N: Bools, changed: Tensor, before: Tensor, ctx: LogitsContext) -> bool:
    """Tell whether the rows of logits whose request the processor declined are what they were, bit by bit."""
    rows_R = ctx.expanded_idx_mapping.cpu().numpy()
    declined = torch.from_numpy(~is_taken_N[rows_R]).to(before.device)
    return torch.equal(changed[declined].view(torch.int32), before[declined].view(torch.int32))


def _copy(ctx: LogitsContext) -> LogitsContext:
    """Copy a context: its columns belong to the runner, and a processor might write to them."""
    return LogitsContext(
        expanded_idx_mapping=ctx.expanded_idx_mapping.clone(),
        expanded_local_pos=ctx.expanded_local_pos.clone(),
        idx_mapping=ctx.idx_mapping.clone(),
        idx_mapping_np=ctx.idx_mapping_np.copy(),
        input_ids=ctx.input_ids.clone(),
        pos=ctx.pos.clone(),
        seq_lens_upper_bound_np=ctx.seq_lens_upper_bound_np.copy(),
    )


def _form(tensor: Tensor) -> str:
    """Everything in which what a processor returns must be like what it was given."""
    layout = "" if tensor.layout == torch.strided else f" {tensor.layout}"
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}{layout}"
