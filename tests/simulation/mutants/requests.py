"""Bugs in what happens to requests: ends, inputs, recovery, time limits, wake-ups (I1, I5, I11 to I13)."""

import asyncio
from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

from control_plane.engine.core import EngineCore
from control_plane.engine.driver import EngineDriver
from control_plane.engine.lane import Lane
from control_plane.engine.ledger import Ledger
from control_plane.engine.live import Live
from control_plane.engine.outputs import Delivery
from control_plane.engine.recovery import Recovery
from control_plane.engine.streams import OutputStream
from control_plane.scheduling.batching import BatchingScheduler
from control_plane.scheduling.sequence import Sequence
from control_plane.workers.result_order import ResultOrder
from plugins.errors import RequestCancelled, ServingError
from plugins.types import Finished, FinishReason, GenerationId, Request, RequestId, Row, StepResult
from tests.simulation.mutants.mutant import Method, Mutant


def _ends_again(right: Method) -> Method:
    """A cancel of what has ended delivers an end of its own."""

    def cancel(self: EngineCore, request_id: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        if request_id in self._ledger.live:
            right(self, request_id, reason)
        else:
            self._ledger._deliveries.append(Delivery(request_id, (), reason, RequestCancelled("it was cancelled")))

    return cancel


def _misses_homeless(right: Method) -> Method:
    """Requests that wait for another worker cannot be ended."""

    def end(self: EngineCore, request_id: RequestId, reason: FinishReason, error: ServingError) -> None:
        live = self._ledger.live.get(request_id)
        if live is None or live.lane is not None:
            right(self, request_id, reason, error)

    return end


def _never_wakes(right: Method) -> Method:
    """A new request wakes nobody."""

    def submit(self: EngineDriver, *arguments: object) -> list[OutputStream]:
        wake, self._wake = self._wake, asyncio.Event()
        streams: list[OutputStream] = right(self, *arguments)
        self._wake = wake
        return streams

    return submit


def _forgets_homeless(right: Method) -> Method:
    """Who waits for a worker is not found by the one that comes."""

    def take_homeless(self: Recovery, generation: GenerationId) -> list[Live]:
        taken: list[Live] = right(self, generation)
        return taken[:-1]

    return take_homeless


def _drops_output(right: Method) -> Method:
    """A request goes to another worker without the output that it has."""

    def add(self: Lane, live: Live) -> None:
        output, live.token_ids = live.token_ids, []
        right(self, live)
        live.token_ids = output

    return add


def _resumes_short(right: Method) -> Method:
    """A preempted sequence comes back without its last token."""

    def start(self: Sequence, row: Row, *numbers: int) -> None:
        if self.num_output_tokens and not self.request.output_token_ids and not self.num_plans:
            self.token_ids[-1] = self.token_ids[0]
        right(self, row, *numbers)

    return start


def _takes_stale(right: Method) -> Method:
    """A result of an earlier epoch counts."""

    def accepts(self: ResultOrder, epoch: int, result: StepResult) -> bool:
        return epoch < self._epoch or bool(right(self, epoch, result))

    return accepts


def _blames_everybody(right: Method) -> Method:
    """Whoever was in a lost plan is taken for the culprit."""

    def detach(self: Lane) -> tuple[list[Live], Collection[Live]]:
        requests, lost = right(self)
        for live in lost:
            live.blame = 1.5
        return requests, lost

    return detach


def _tries_all_at_once(right: Method) -> Method:
    """A worker tries a suspect while it tries another."""

    def try_suspects(self: EngineCore) -> None:
        for lane in tuple(self._lanes.values()):
            while lane.scheduler is not None and (suspect := self._recovery.take_suspect(lane.generation)):
                lane.probe = suspect
                self._add(lane, suspect)

    return try_suspects


def _never_expires(right: Method) -> Method:
    """A deadline is taken for no deadline."""

    def submit(
        self: EngineDriver, requests: Many[Request], generation: GenerationId, deadline_s: float, *arguments: object
    ) -> list[OutputStream]:
        streams: list[OutputStream] = right(self, requests, generation, None, *arguments)
        return streams

    return submit


def _forgets_to_watch(right: Method) -> Method:
    """The text of a request is not watched any more when it goes to another worker."""

    def add(self: Lane, live: Live) -> None:
        if live.token_ids:
            live.watcher = None
        right(self, live)

    return add


def _reads_again(right: Method) -> Method:
    """The text of a request is read from its start again when it goes to another worker."""

    def add(self: Lane, live: Live) -> None:
        if live.watcher is not None and live.token_ids:
            live.watcher.push(live.token_ids)
        right(self, live)

    return add


def _tells_again(right: Method) -> Method:
    """A prompt is told about once more by another worker."""

    def add(self: Lane, live: Live) -> None:
        live.num_prompt_logprobs = 0
        right(self, live)

    return add


def _stops_late(right: Method) -> Method:
    """The scheduler does not hear of a stop string."""

    def update(self: BatchingScheduler, result: StepResult) -> tuple[Finished, ...]:
        finishes = [None if each is FinishReason.STOP else each for each in result.finishes]
        finished: tuple[Finished, ...] = right(self, replace(result, finishes=tuple(finishes)))
        return finished

    return update


def _cancels_one(right: Method) -> Method:
    """A cancel reaches the first output of a request, and no other."""

    def outputs_of(self: Ledger, request_id: RequestId) -> list[Live]:
        return [live for live in right(self, request_id) if live.request.request_id == request_id]

    return outputs_of


def _keeps_readers(right: Method) -> Method:
    """The timer of a request outlives it."""

    def end_reader(self: EngineDriver, request_id: RequestId, reader: Any) -> None:
        reader.timer = None
        right(self, request_id, reader)

    return end_reader


def _steps_while_paused(right: Method) -> Method:
    """A pause of the server does not reach the workers."""

    def may_step(self: EngineCore, lane: Lane) -> bool:
        return lane.facts.permit_step

    return may_step


MUTANTS = (
    Mutant("I1", "double finish", EngineCore, "cancel", _ends_again),
    Mutant("I1", "missed cancel of the homeless", EngineCore, "end", _misses_homeless),
    Mutant("I1", "forgotten homeless", Recovery, "take_homeless", _forgets_homeless),
    Mutant("I1", "stop string kept from the scheduler", BatchingScheduler, "update", _stops_late),
    Mutant("I1", "stop string forgotten at recovery", Lane, "add", _forgets_to_watch),
    Mutant("I1", "other outputs outlive a cancel", Ledger, "outputs_of", _cancels_one),
    Mutant("I5", "prompt told again at recovery", Lane, "add", _tells_again),
    Mutant("I7", "text read again at recovery", Lane, "add", _reads_again),
    Mutant("I5", "own output dropped at recovery", Lane, "add", _drops_output),
    Mutant("I5", "wrong token after a preemption", Sequence, "start", _resumes_short),
    Mutant("I11", "lost wake-up", EngineDriver, "submit", _never_wakes),
    Mutant("I11", "deadline ignored", EngineDriver, "submit", _never_expires),
    Mutant("I11", "timer left behind", EngineDriver, "_end_reader", _keeps_readers),
    Mutant("I12", "step while paused", EngineCore, "_may_step", _steps_while_paused),
    Mutant("I13", "stale epoch accepted", ResultOrder, "accepts", _takes_stale),
    Mutant("I13", "suspects tried together", EngineCore, "_try_suspects", _tries_all_at_once),
    Mutant("I13", "neighbours blamed for a death", Lane, "detach", _blames_everybody),
)
