"""The default scheduler: first come, first served, continuous batching, preemption by recompute.

Decides which tokens run next; block tables are the allocator's, and what the tokens mean is nobody's business here.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from control_plane.kv.allocator import Allocator
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.sequence import Sequence, State
from plugins.errors import InvariantBroken
from plugins.scheduler import Scheduler, SchedulerLoad
from plugins.types import (
    Admission,
    BlockId,
    Chunk,
    Finished,
    FinishReason,
    Request,
    RequestId,
    Row,
    StepPlan,
    StepResult,
    WorkerInfo,
)

_ARRIVAL = attrgetter("arrival")


@dataclass(slots=True)
class _Draft:
    """A plan in the making, and who is in it."""

    budget: int  # tokens that may still be added
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    sequences: dict[Row, Sequence] = field(default_factory=dict)
    sampling: set[Row] = field(default_factory=set)  # rows whose chunk samples a token
    has_preempted: bool = False

    def add(self, sequence: Sequence, num_tokens: int, new_blocks: tuple[BlockId, ...]) -> None:
        row = sequence.row
        if row is None:
            raise InvariantBroken(f"request {sequence.request_id!r} is planned without a row")
        self.chunks.append(Chunk(row, num_tokens, new_blocks))
        self.sequences[row] = sequence
        if sequence.plan(num_tokens):
            self.sampling.add(row)
        self.budget -= num_tokens


@dataclass(frozen=True, slots=True)
class _PlanInFlight:
    """Who was in a plan when it was made: results are read through this, never through today's rows."""

    seq: int
    sequences: dict[Row, Sequence]
    sampling: set[Row]


class FCFSScheduler(Scheduler):
    """Oldest first, with run-ahead. Owned by the engine; called from its task alone.

    There is no prefill or decode phase: each step hands out a token budget so that computed tokens catch up with
    known ones, one for each sequence that decodes, then prompts in order of arrival, in chunks. A sequence gets the
    blocks of all its known tokens when it is admitted, and one more whenever it outgrows them; if none is free,
    the youngest sequence that the plan does not name yet gives its own back and starts over later, with the tokens
    it has. So the oldest always moves, and nobody waits for ever.

    Invariant: a running sequence has a row, `_running` is sorted by arrival, and a preempted sequence is admitted
    again only when no plan in flight names it.
    """

    max_plans_in_flight = 2

    def __init__(self, config: SchedulerConfig, worker: WorkerInfo) -> None:
        self.kv = Allocator(worker.num_blocks, worker.block_size)
        self._max_step_tokens = min(config.max_step_tokens or worker.max_step_tokens, worker.max_step_tokens)
        num_rows = min(config.max_sequences or worker.max_sequences, worker.max_sequences, self._max_step_tokens)
        self._watermark = int(config.watermark_ratio * worker.num_blocks)
        self._free_rows = [Row(row) for row in reversed(range(num_rows))]
        self._released: list[Row] = []  # rows that the next plan tells the worker to forget
        self._sequences: dict[RequestId, Sequence] = {}
        self._waiting: dict[RequestId, Sequence] = {}  # never admitted, in order of arrival
        self._preempted: list[Sequence] = []  # sorted by arrival; all older than those that never ran
        self._running: list[Sequence] = []
        self._in_flight: deque[_PlanInFlight] = deque()
        self._num_arrivals = 0
        self._num_plans = 0
        self._num_preemptions = 0

    # -- what the engine asks -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.request_id in self._sequences:
            raise InvariantBroken(f"request {request.request_id!r} is scheduled twice")
        self._num_arrivals += 1
        sequence = Sequence(request, self._num_arrivals)
        self._sequences[request.request_id] = sequence
        self._waiting[request.request_id] = sequence

    def cancel_request(self, request_id: RequestId) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._retire(sequence)

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        draft = _Draft(budget=self._max_step_tokens)
        self._plan_decodes(draft)
        if not (throttle_prefills and draft.chunks):
            self._plan_prefills(draft)
            if not draft.has_preempted:
                self._admit(draft)
        released, self._released = tuple(self._released), []
        plan = StepPlan(
            seq=self._num_plans + 1,
            released_rows=released,
            admitted=tuple(draft.admitted),
            chunks=tuple(draft.chunks),
        )
        if not plan.is_empty:
            self._num_plans += 1
            self._in_flight.append(_PlanInFlight(plan.seq, draft.sequences, draft.sampling))
        return plan

    def update(self, result: StepResult) -> tuple[Finished, ...]:
        if not self._in_flight or self._in_flight[0].seq != result.seq:
            expected = self._in_flight[0].seq if self._in_flight else "none"
            raise InvariantBroken(f"result {result.seq} came, expected {expected}")
        plan = self._in_flight.popleft()
        for row, sequence in plan.sequences.items():
            sequence.num_plans -= 1
            if row in plan.sampling:
                sequence.num_sampling -= 1
        finished: list[Finished] = []
        start = 0
        for row, count, finish in zip(result.rows, result.counts, result.finishes, strict=True):
            sequence = self._sequence_of(plan, row)
            tokens = result.token_ids[start : start + count]
            start += count
            if sequence.state is State.FINISHED:
                continue  # cancelled, or ended by an earlier result, while this plan was on its way
            sequence.token_ids.extend(tokens)
            if finish is not None:
                self._retire(sequence)
                finished.append(Finished(sequence.request_id, finish))
        for failure in result.failures:
            sequence = self._sequence_of(plan, failure.row)
            if sequence.state is not State.FINISHED:
                self._retire(sequence)
                finished.append(Finished(sequence.request_id, FinishReason.FAILED))
        return tuple(finished)

    def has_work(self) -> bool:
        return bool(self._sequences or self._released)

    def load(self) -> SchedulerLoad:
        return SchedulerLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._preempted),
            num_blocks=self.kv.num_blocks,
            num_free_blocks=self.kv.num_free,
            num_preemptions=self._num_preemptions,
        )

    # -- the stages of a plan -----------------------------------------------------------------------------------

    def _plan_decodes(self, draft: _Draft) -> None:
        for sequence in tuple(self._running):
            if sequence.state is not State.RUNNING or sequence.is_prefilling or sequence.is_complete:
                continue
            if draft.budget == 0:
                return
            new_blocks = self._grow(sequence, draft)
            if new_blocks is not None:
                draft.add(sequence, 1, new_blocks)

    def _plan_prefills(self, draft: _Draft) -> None:
        for sequence in self._running:
            if draft.budget == 0:
                return
            if sequence.is_prefilling:
                draft.add(sequence, min(sequence.num_unplanned, draft.budget), ())

    def _admit(self, draft: _Draft) -> None:
        while draft.budget > 0 and self._free_rows:
            sequence = self._next_to_admit()
            if sequence is None:
                return
            num_tokens = len(sequence.token_ids)
            # A request may need the whole pool: the watermark is waived when nobody is there to grow.
            spare = self._watermark if self._running else 0
            if self.kv.num_blocks_for(num_tokens) > self.kv.num_free - spare:
                return
            new_blocks = self.kv.grow(sequence.request_id, num_tokens)
            if new_blocks is None:
                raise InvariantBroken(f"{self.kv.num_free} blocks are free, yet {num_tokens} tokens got none")
            self._start(sequence, draft)
            draft.add(sequence, min(num_tokens, draft.budget), new_blocks)

    def _next_to_admit(self) -> Sequence | None:
        """The oldest that waits; None if nobody does, or if it was preempted and a plan in flight names it."""
        if self._preempted:
            sequence = self._preempted[0]
            return sequence if sequence.num_plans == 0 else None
        return next(iter(self._waiting.values()), None)

    # -- moves of one sequence ----------------------------------------------------------------------------------

    def _start(self, sequence: Sequence, draft: _Draft) -> None:
        if self._preempted and self._preempted[0] is sequence:
            del self._preempted[0]
        else:
            del self._waiting[sequence.request_id]
        row = self._free_rows.pop()
        sequence.start(row)
        insort(self._running, sequence, key=_ARRIVAL)
        draft.admitted.append(
            Admission(
                row=row,
                request_id=sequence.request_id,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.request.sampling,
                block_ids=(),
                num_cached_tokens=0,
            )
        )

    def _grow(self, sequence: Sequence, draft: _Draft) -> tuple[BlockId, ...] | None:
        """Get the blocks for one more token, from younger sequences if need be; None: it lost its own instead."""
        while (new_blocks := self.kv.grow(sequence.request_id, sequence.num_planned + 1)) is None:
            victim = next(other for other in reversed(self._running) if other.row not in draft.sequences)
            self._preempt(victim, draft)
            if victim is sequence:
                return None
        return new_blocks

    def _preempt(self, sequence: Sequence, draft: _Draft) -> None:
        draft.has_preempted = True
        self._num_preemptions += 1
        self._leave(sequence, State.WAITING)
        insort(self._preempted, sequence, key=_ARRIVAL)

    def _retire(self, sequence: Sequence) -> None:
        """End a sequence wherever it is, and let go of all it holds."""
        del self._sequences[sequence.request_id]
        if sequence.state is State.RUNNING:
            self._leave(sequence, State.FINISHED)
        elif self._waiting.pop(sequence.request_id, None) is None:
            self._preempted.remove(sequence)
        sequence.state = State.FINISHED

    def _leave(self, sequence: Sequence, state: State) -> None:
        # Row and blocks may be given out by the very plan that releases them: a worker releases before it admits.
        self._running.remove(sequence)
        self.kv.release(sequence.request_id)
        row = sequence.stop(state)
        self._released.append(row)
        self._free_rows.append(row)

    def _sequence_of(self, plan: _PlanInFlight, row: Row) -> Sequence:
        try:
            return plan.sequences[row]
        except KeyError:
            raise InvariantBroken(f"result {plan.seq} tells of row {row}, which its plan does not name") from None
