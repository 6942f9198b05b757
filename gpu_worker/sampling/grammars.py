"""Holds the outputs of rows to their grammars.

Grammars are read in one thread and followed in others, so that the device thread and the rows without a grammar go
on. What a grammar allows is the business of `grammar_reader.py`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.sampling.grammar_reader import GrammarFault, GrammarReader, GrammarState
from plugins.types import Admission, Row, RowFailure, TokenId

logger = logging.getLogger(__name__)

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

# A mask takes 0.01 to 2 ms, and is made while the forward runs. One that takes longer is waited for so long; then its
# row waits for the next step, and its neighbours do not.
MAX_WAIT_S: Final = 0.01
# A step all of whose rows would wait has nothing else to do: to compute it again would take a core from the reading.
MAX_IDLE_S: Final = 0.05


class KnownTokens(Protocol):
    """What is read of the row table."""

    num_tokens: Ints  # on the host, by row

    @property
    def all_token_ids(self) -> Tensor:
        """[rows, max_model_len] int32, on the device."""


class GrammarStage:
    """The grammars of the rows that have one. The device thread alone calls it; it is the pipeline's `Grammars`.

    Invariant: of each row at most one mask is being made, and it is that of the place after all its known tokens.
    """

    def __init__(
        self,
        table: KnownTokens,
        make_reader: Callable[[], GrammarReader],
        num_threads: int,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        """`make_reader` is called in the reading thread, at once: it holds up all threads of Python, and the first
        grammar may come beside rows that decode."""
        self._table = table
        self._make_reader = make_reader
        self._reader: GrammarReader | None = None  # of the reading thread
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="grammar-reader")
        self._following = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._max_wait_s = max_wait_s
        self._rows: dict[Row, _Output] = {}
        self._reading.submit(self._prepared)

    def admit(self, admission: Admission) -> None:
        """Take a new occupant of a row, and begin to read its grammar elsewhere if it has one."""
        self.release((admission.row,))
        grammar = admission.sampling.grammar
        if grammar:
            state = self._reading.submit(self._read, grammar)
            output = admission.token_ids[admission.num_prompt_tokens :]
            self._rows[admission.row] = _Output(state, output, len(admission.token_ids))

    def release(self, rows: Sequence[Row]) -> None:
        """Forget some rows."""
        for row in rows:
            output = self._rows.pop(row, None)
            if output is not None:
                output.drop()

    def clear(self) -> None:
        """Forget every row."""
        self.release(tuple(self._rows))

    def close(self) -> None:
        """End the threads, after what they are at: at most the time that one grammar takes to read."""
        self.clear()
        for threads in (self._reading, self._following):
            threads.shutdown(cancel_futures=True)

    def begin(self, rows_R: Ints) -> None:
        """Begin to find out what these rows allow, while the forward runs: all their tokens so far are known."""
        for row in map(Row, rows_R.tolist() if self._rows else ()):
            output = self._rows.get(row)
            if output is not None:
                num_tokens = int(self._table.num_tokens[row])
                if output.mask is None or output.num_tokens < num_tokens:
                    output.follow(self._table.all_token_ids[row, output.num_tokens : num_tokens], self._following)

    def mask(self, logits_RV: Tensor, rows_R: Ints, is_alone: bool) -> tuple[Bools, list[RowFailure]]:
        """Set to -inf, in place, what the grammars of the rows do not allow. `begin` was called for the same rows.

        `is_alone` says that the step computes no other rows, which could not go on if all of these wait for longer.
        Returns which rows must wait, [R], because their grammar is not read yet, and those whose grammar failed.
        """
        is_waiting: Bools = np.zeros(len(rows_R), dtype=np.bool_)
        rows = [Row(row) for row in rows_R.tolist()] if self._rows else []
        outputs = {index: self._rows[row] for index, row in enumerate(rows) if row in self._rows}
        if not outputs:
            return is_waiting, []
        answers = _collect(outputs, self._max_wait_s)
        if is_alone and not answers and len(outputs) == len(rows):
            wait([output.mask for output in outputs.values() if output.mask is not None], MAX_IDLE_S, FIRST_COMPLETED)
            answers = _collect(outputs, 0.0)
        is_waiting[[index for index in outputs if index not in answers]] = True
        masks = {index: answer for index, answer in answers.items() if isinstance(answer, bytes)}
        if masks:
            _apply(logits_RV, masks)
        faults = ((rows[index], answer) for index, answer in answers.items() if isinstance(answer, GrammarFault))
        return is_waiting, [RowFailure(row, fault.reason, f"the grammar {fault}") for row, fault in faults]

    def _read(self, grammar: str) -> GrammarState:
        return self._prepared().read(grammar)

    def _prepared(self) -> GrammarReader:
        if self._reader is None:
            self._reader = self._make_reader()
        return self._reader


class _Output:
    """The output of one row: what its grammar has been told, and what it answers."""

    def __init__(self, state: "Future[GrammarState]", token_ids: Sequence[TokenId], num_tokens: int) -> None:
        self._state = state
        self._arrivals = [_Arrival.known(token_ids)]  # of the output's tokens, those that the next mask counts in
        self.num_tokens = num_tokens  # of prompt and output, as far as the grammar knows or is being told
        self.mask: Future[bytes] | None = None  # of what may come at `num_tokens`

    def follow(self, token_ids: Tensor, threads: ThreadPoolExecutor) -> None:
        """Tell the grammar of further tokens, as soon as it is read and they are there, and ask for a mask."""
        arrivals = [*(self._arrivals if self.mask is None else ()), _Arrival(token_ids)]
        mask: Future[bytes] = Future()
        self.num_tokens += len(token_ids)
        self._arrivals, self.mask = arrivals, mask
        self._state.add_done_callback(lambda state: _start(threads, state, arrivals, mask))

    def wait(self, deadline_s: float) -> bytes | None:
        """Return the mask; None if it is not there in time. Raises: GrammarFault, and again each time."""
        if self.mask is None:
            return None
        for arrival in self._arrivals:
            arrival.wait()  # it is the device that is waited for, which works on something useful
        try:
            return self.mask.result(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            return None

    def drop(self) -> None:
        """Nobody asks for it any more: its grammar need not be read, if that has not begun."""
        self._state.cancel()


def _collect(outputs: "Mapping[int, _Output]", max_wait_s: float) -> dict[int, bytes | GrammarFault]:
    """Return the masks that are there in time, and why there is none; what is missing must be waited for."""
    deadline_s = time.monotonic() + max_wait_s
    answers: dict[int, bytes | GrammarFault] = {}
    for index, output in outputs.items():
        try:
            mask = output.wait(deadline_s)
        except GrammarFault as fault:
            answers[index] = fault
            continue
        if mask is not None:
            answers[index] = mask
    return answers


def _start(
    threads: ThreadPoolExecutor, state: "Future[GrammarState]", arrivals: "Sequence[_Arrival]", mask: "Future[bytes]"
) -> None:
    """A grammar has been read, or it is known why it cannot be."""
    if state.cancelled():
        return

    def follow() -> None:
        try:
            token_ids = [token_id for arrival in arrivals for token_id in arrival.token_ids()]
            mask.set_result(state.result().advance(token_ids))
        except GrammarFault as fault:
            mask.set_exception(fault)
        except BaseException as error:  # whatever the library met, it is the fate of one row
            logger.error("grammar_failed", exc_info=error)
            mask.set_exception(GrammarFault("GRAMMAR_FAILED", f"met {type(error).__name__}, see the worker's log"))

    threads.submit(follow)


class _Arrival:
    """Tokens on their way from the device."""

    def __init__(self, token_ids: Tensor) -> None:
        self._event: torch.Event | None = None
        if token_ids.device.type == "cpu":
            self._token_ids = token_ids.clone()
        else:
            self._token_ids = torch.empty(len(token_ids), dtype=token_ids.dtype, pin_memory=True)
            self._token_ids.copy_(token_ids, non_blocking=True)
            self._event = torch.Event(token_ids.device)
            self._event.record()

    @classmethod
    def known(cls, token_ids: Sequence[TokenId]) -> "_Arrival":
        """Tokens that are here."""
        return cls(torch.tensor(token_ids, dtype=torch.int32))

    def wait(self) -> None:
        """Wait for the device. Any thread may."""
        if self._event is not None:
            self._event.synchronize()

    def token_ids(self) -> list[TokenId]:
        """Return them, when they are there."""
        self.wait()
        return [TokenId(token_id) for token_id in self._token_ids.tolist()]


def _apply(logits_RV: Tensor, masks: dict[int, bytes]) -> None:
    """Set to -inf what the masks, by index of their row, do not have. What lies past a mask's end it does not have."""
    num_rows, vocab_size = len(masks), logits_RV.shape[1]
    packed = np.frombuffer(b"".join(masks.values()), dtype=np.uint8).reshape(num_rows, -1)
    is_allowed = np.unpackbits(packed, axis=1, count=min(vocab_size, packed.shape[1] * 8), bitorder="little")
    is_forbidden_GV = np.ones((num_rows, vocab_size), dtype=np.bool_)
    is_forbidden_GV[:, : is_allowed.shape[1]] = is_allowed == 0
    for index, is_forbidden_V in zip(masks, torch.from_numpy(is_forbidden_GV).to(logits_RV.device), strict=True):
        logits_RV[index].masked_fill_(is_forbidden_V, -torch.inf)
