"""Continuous batching: the machine behind both built-in schedulers.

Decides which tokens run next. Block tables are the allocator's business, the order of requests the policy's, and
what the tokens mean nobody's here.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field, replace
from math import ceil
from operator import attrgetter
from typing import Final

from control_plane.kv.allocator import Allocator
from control_plane.kv.hashing import BlockHash, CacheScope, hasher_for
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.first_come import FirstComePolicy
from control_plane.scheduling.sequence import Sequence, State
from control_plane.scheduling.siblings import Siblings, leader_of
from control_plane.scheduling.waiting import WaitingQueue
from plugins.errors import InvariantBroken
from plugins.kv_events import KvEvent
from plugins.scheduler import Scheduler, SchedulerLoad, SchedulingPolicy
from plugins.types import (
    Admission,
    BlockCopy,
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

MAX_HALF_DONE: Final = 2  # prompts of which a part is computed: more would hold blocks and be done no sooner
NUM_CHEAP_PREEMPTIONS: Final = 2  # of one sequence for want of blocks; then it waits for more room than it has now
_PLACE = attrgetter("place")


@dataclass(slots=True)
class _Draft:
    """A plan in the making, and who is in it: `chunks[i]` is of `sequences[i]`, and has `counts[i]` tokens."""

    budget: int  # tokens that may still be added
    chunks: list[Chunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    half_done: list[Sequence] = field(default_factory=list)  # prompts that are not computed to their end
    has_preempted: bool = False


@dataclass(frozen=True, slots=True)
class _PlanInFlight:
    """Who was in a plan when it was made: results are read through this, never through today's rows.

    A sequence enters another row only when no plan names it: until then `last_row` is the one that it had here.
    """

    seq: int
    sequences: list[Sequence]  # of each chunk
    counts: list[int]  # tokens of each chunk


class BatchingScheduler(Scheduler):
    """Batches whatever there is to compute. Owned by the engine; called from its task alone.

    There is no prefill or decode phase: each step hands out a token budget so that computed tokens catch up with
    known ones, one for each sequence that decodes, then prompts in the policy's order, in chunks. A sequence gets the
    blocks of all its known tokens when it is admitted, those of a cached prefix among them, and one more whenever it
    outgrows them. If none is free, a sequence that the plan does not name yet, the last one if the policy has no
    other wish, gives its own back and starts over later, with the tokens it has. So the first always moves.

    Invariant: a running sequence has a row, `_running` is sorted by place, and a preempted sequence is admitted
    again only when no plan in flight names it.
    """

    def __init__(self, config: SchedulerConfig, worker: WorkerInfo, policy: SchedulingPolicy | None = None) -> None:
        super().__init__(config, worker, policy or FirstComePolicy())
        self.kv = Allocator(worker.num_blocks, worker.block_size, is_caching=config.prefix_caching)
        # Most policies let everybody in; those are not asked, because the question costs a list of who runs.
        self._policy_admits = type(self.policy).admit is not SchedulingPolicy.admit
        self._block_size = worker.block_size
        self._is_caching = config.prefix_caching
        self._hasher = hasher_for(config.prefix_hash_key or "", worker.block_size)
        self._scope = CacheScope(
            kv_cache_dtype=worker.kv_cache_dtype,
            weights_version=worker.weights_version,
            model=worker.model.name,
        )
        self._max_step_tokens = min(config.max_step_tokens or worker.max_step_tokens, worker.max_step_tokens)
        self._max_chunk_tokens = config.max_chunk_tokens or self._max_step_tokens
        num_rows = min(config.max_sequences or worker.max_sequences, worker.max_sequences, self._max_step_tokens)
        self._watermark = ceil(config.watermark_ratio * worker.num_blocks)
        self._free_rows = [Row(row) for row in reversed(range(num_rows))]
        self._released: list[Row] = []  # rows that the next plan tells the worker to forget
        self._sequences: dict[RequestId, Sequence] = {}
        self._waiting = WaitingQueue()
        self._siblings = Siblings()
        self._running: list[Sequence] = []
        self._in_flight: deque[_PlanInFlight] = deque()
        self._is_full = False  # the last admissions stopped for want of a row or of blocks
        self._num_uncomputed = 0  # known tokens of half-done prompts that no plan has named
        self._num_arrivals = 0
        self._num_plans = 0
        self._num_preemptions = 0
        self._num_prefix_tokens = 0
        self._num_prefix_hits = 0

    # -- what the engine asks -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.request_id in self._sequences:
            raise InvariantBroken(f"request {request.request_id!r} is scheduled twice")
        self._num_arrivals += 1
        place = (self.policy.order(request), self._num_arrivals)
        root, hashes = self._prompt_hashes(request)
        sequence = self._sequences[request.request_id] = Sequence(request, place, root, list(hashes))
        leader = leader_of(sequence, self._sequences)
        if leader is not None and not leader.is_prompt_computed:
            self._siblings.hold(sequence, leader.request_id)
        else:
            self._waiting.add(sequence)

    def cancel_request(self, request_id: RequestId) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._retire(sequence)

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        draft = _Draft(budget=self._max_step_tokens)
        self._displace()
        half_done = self._plan_decodes(draft)
        if not (throttle_prefills and draft.chunks and not self._is_full):
            self._plan_prompts(draft, half_done)
            self._num_uncomputed = sum(each.num_unplanned for each in draft.half_done)
        released, self._released = tuple(self._released), []
        plan = StepPlan(
            seq=self._num_plans + 1,
            released_rows=released,
            block_copies=tuple(draft.copies),
            admitted=tuple(draft.admitted),
            chunks=tuple(draft.chunks),
        )
        if not plan.is_empty:
            self._num_plans += 1
            self._in_flight.append(_PlanInFlight(plan.seq, draft.sequences, draft.counts))
        return plan

    def update(self, result: StepResult) -> tuple[Finished, ...]:
        if not self._in_flight or self._in_flight[0].seq != result.seq:
            expected = self._in_flight[0].seq if self._in_flight else "none"
            raise InvariantBroken(f"result {result.seq} came, expected {expected}")
        plan = self._in_flight.popleft()
        failed = {failure.row for failure in result.failures}
        rows, counts, token_ids, finishes = result.rows, result.counts, result.token_ids, result.finishes
        if len(token_ids) < len(rows):
            self._note_waits(plan, result)
        finished: list[Finished] = []
        told = start = 0  # entries of the result that were read, and their tokens
        for sequence, num_tokens in zip(plan.sequences, plan.counts, strict=True):
            row = sequence.last_row
            sequence.num_plans -= 1
            # A preempted sequence comes back only when no plan names it: one that runs was not away meanwhile.
            if sequence.row is not None:
                sequence.num_until_full -= num_tokens
                if sequence.num_until_full <= 0:
                    self._note_full(sequence, row in failed)
            if told < len(rows) and rows[told] == row:
                end = start + counts[told]
                if sequence.state is not State.FINISHED:  # else cancelled, or ended by an earlier result
                    if end == start + 1:  # as in nearly all entries: a slice of one costs three times as much
                        sequence.token_ids.append(token_ids[start])
                    else:
                        sequence.token_ids.extend(token_ids[start:end])
                    finish = finishes[told]
                    if finish is not None:
                        self._finish(sequence, finish, finished)
                told, start = told + 1, end
            if row in failed and sequence.state is not State.FINISHED:
                self._finish(sequence, FinishReason.FAILED, finished)
            if sequence.row is None and not sequence.num_plans and sequence.state is State.WAITING:
                self._waiting.drop_in_flight(sequence)
        if told < len(rows):
            raise InvariantBroken(f"result {result.seq} tells of row {rows[told]} out of the order of its plan")
        if self._siblings:
            self._free_siblings()
        return tuple(finished)

    def has_work(self) -> bool:
        return bool(self._sequences or self._released)

    def load(self) -> SchedulerLoad:
        return SchedulerLoad(
            num_running=len(self._running),
            num_waiting=len(self._sequences) - len(self._running),
            num_waiting_tokens=self._waiting.num_tokens + self._siblings.num_tokens,
            num_uncomputed_tokens=self._num_uncomputed,
            num_blocks=self.kv.num_blocks,
            num_free_blocks=self.kv.num_free,
            num_cached_blocks=self.kv.num_cached,
            num_preemptions=self._num_preemptions,
            num_prefix_tokens=self._num_prefix_tokens,
            num_prefix_hits=self._num_prefix_hits,
        )

    def num_cached_tokens(self, request: Request) -> int:
        if request.sampling.prompt_logprobs is not None:
            return 0  # it is told about each of them
        _, hashes = self._prompt_hashes(request)
        usable = hashes[: (len(request.prompt_token_ids) - 1) // self._block_size]
        return self.kv.num_matched(usable) * self._block_size

    def reset_prefix_cache(self) -> None:
        self.kv.reset()
        for sequence in self._running:  # their blocks were filled before: nobody may hit them, nor what follows
            sequence.can_publish = False

    def record_kv_events(self, is_on: bool) -> None:
        self.kv.records_events = is_on

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        return self.kv.take_events()

    # -- the stages of a plan -----------------------------------------------------------------------------------

    def _displace(self) -> None:
        """Let the first that waits take the place of the last that run, where the policy says so and it is enough."""
        first = self._waiting.first()
        if first is None or first.num_plans or not self._running:
            return
        num_missing = self.kv.num_blocks_for(first.num_known) - self.kv.num_free
        if self._free_rows and num_missing + self._watermark <= 0:
            return
        victims: list[Sequence] = []
        for last in reversed(self._running):
            if not self._goes_ahead(first, last):
                return
            victims.append(last)
            num_missing -= self.kv.num_sole(last.request_id)
            is_alone = len(victims) == len(self._running)
            if num_missing + (0 if is_alone else self._watermark) <= 0:
                break
        else:
            return  # all of them together are not enough
        for victim in victims:
            self._preempt(victim)

    def _plan_decodes(self, draft: _Draft) -> list[Sequence]:
        """Plan one token for everybody who has one to compute; return those that have more, prompts in the making."""
        half_done: list[Sequence] = []
        chunks, sequences = draft.chunks, draft.sequences
        for sequence in tuple(self._running):
            if sequence.num_unplanned > 1:
                half_done.append(sequence)
                continue
            left, chunk = sequence.num_left, sequence.decode_chunk
            if left == 0:
                continue  # its last token is sampled, in flight perhaps
            if sequence.num_spare_slots < 0 and chunk is not None:
                chunk = self._grow(sequence, draft)
            if chunk is None:
                continue  # it was preempted
            chunks.append(chunk)
            sequences.append(sequence)
            sequence.num_plans += 1
            sequence.num_left = left - 1  # it samples another token, which is the one left to plan
            sequence.num_spare_slots -= 1
        draft.counts = [1] * len(chunks)
        draft.budget -= len(chunks)  # there are no more rows than the budget has tokens
        return half_done

    def _plan_prompts(self, draft: _Draft, half_done: list[Sequence]) -> None:
        """Go on with prompts in the making, then begin others; who may displace one of the former goes before it."""
        self._is_full = False
        for sequence in half_done:
            self._admit(draft, sequence)
            if sequence.row is None:
                continue  # it was preempted
            if draft.budget == 0:
                draft.half_done.append(sequence)
                continue
            num_tokens = min(sequence.num_unplanned, draft.budget, self._max_chunk())
            self._add_chunk(draft, sequence, Chunk(sequence.row, num_tokens))
        self._admit(draft, None)

    def _admit(self, draft: _Draft, ahead_of: Sequence | None) -> None:
        """Admit those that wait, in order, while there is room; or only those that may displace a sequence."""
        while draft.budget > 0 and len(draft.half_done) < MAX_HALF_DONE and not draft.has_preempted:
            sequence = self._waiting.first()
            if sequence is None or sequence.num_plans:
                return  # nobody waits, or who does was preempted and a plan in flight still names it
            if ahead_of is not None and not self._goes_ahead(sequence, ahead_of):
                return
            if not self._free_rows:
                self._is_full = True
                return
            if self._policy_admits and self._running and not self.policy.admit(sequence.request, self._requests()):
                return
            if not self._start(sequence, draft, self._spare_blocks(sequence)):
                self._is_full = True
                return

    def _spare_blocks(self, sequence: Sequence) -> int:
        """How many blocks the admission of a sequence must leave free.

        A request may need the whole pool: nothing is spared when nobody is there to grow. One that lost its blocks
        twice comes back when it and those before it may grow to twice their length, and after the third time when
        they may grow to their ends: then nobody takes its blocks again.
        """
        if not self._running:
            return 0
        if sequence.num_preemptions < NUM_CHEAP_PREEMPTIONS:
            return self._watermark
        is_last_time = sequence.num_preemptions > NUM_CHEAP_PREEMPTIONS
        before = [each for each in self._running if each.place < sequence.place]
        return max(self._watermark, sum(self._growth(each, is_last_time) for each in (*before, sequence)))

    def _growth(self, sequence: Sequence, is_to_the_end: bool) -> int:
        """Blocks that a sequence may still need: to its end, or to twice its length if that comes first."""
        num_blocks = self.kv.num_blocks_for(sequence.num_known)
        # The last token of all is sampled and never computed: it needs no slot.
        growth = self.kv.num_blocks_for(sequence.max_known - 1) - num_blocks
        return max(0, growth if is_to_the_end else min(growth, num_blocks))

    def _goes_ahead(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.place < running.place and self.policy.displaces(waiting.request, running.request)

    def _requests(self) -> list[Request]:
        return [sequence.request for sequence in self._running]

    def _max_chunk(self) -> int:
        """The most tokens of one prompt in this step: whoever is alone may have them all."""
        is_alone = len(self._running) <= 1 and not self._waiting
        return self._max_step_tokens if is_alone else self._max_chunk_tokens

    def _add_chunk(self, draft: _Draft, sequence: Sequence, chunk: Chunk) -> None:
        draft.chunks.append(chunk)
        draft.sequences.append(sequence)
        draft.counts.append(chunk.num_tokens)
        draft.budget -= chunk.num_tokens
        sequence.plan(chunk.num_tokens)
        if sequence.num_unplanned > 1:
            draft.half_done.append(sequence)

    # -- moves of one sequence ----------------------------------------------------------------------------------

    def _start(self, sequence: Sequence, draft: _Draft, spare: int) -> bool:
        """Admit the first of those that wait. Returns False if its blocks are not free; then nothing changed."""
        num_tokens = sequence.num_known
        blocks = self._first_blocks(sequence, num_tokens, draft, spare)
        if blocks is None:
            return False
        held, new, num_cached = blocks
        self._waiting.take_first()
        if not sequence.has_started:
            self._num_prefix_tokens += num_tokens
            self._num_prefix_hits += num_cached
        row = self._free_rows.pop()
        sequence.start(row, num_cached, (len(held) + len(new)) * self._block_size, self._block_size)
        insort(self._running, sequence, key=_PLACE)
        draft.admitted.append(
            Admission(
                row=row,
                request_id=sequence.request_id,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.request.sampling,
                block_ids=held,
                num_cached_tokens=num_cached,
            )
        )
        self.policy.note_admitted(sequence.request)
        self._add_chunk(draft, sequence, Chunk(row, min(num_tokens - num_cached, draft.budget, self._max_chunk()), new))
        return True

    def _first_blocks(
        self, sequence: Sequence, num_tokens: int, draft: _Draft, spare: int
    ) -> tuple[tuple[BlockId, ...], tuple[BlockId, ...], int] | None:
        """Return the blocks whose tokens need no computing, further ones, and how many tokens the former hold."""
        leader = leader_of(sequence, self._sequences)
        num_shared = sequence.num_prompt_tokens - 1
        if leader is not None and leader.is_prompt_computed and not sequence.has_started and num_shared:
            fork = self.kv.fork(sequence.request_id, leader.request_id, num_shared, num_tokens, spare)
            if fork is None:
                return None
            if fork.copy is None:
                return fork.shared, fork.new, num_shared
            draft.copies.append(fork.copy)
            return (*fork.shared, fork.copy.destination), fork.new, num_shared
        num_usable = 0 if sequence.tells_prompt else (num_tokens - 1) // self._block_size
        usable = sequence.hashes[:num_usable]  # one token at least has to be computed
        start = self.kv.start(sequence.request_id, num_tokens, usable, spare)
        if start is None:
            return None
        return start.cached, start.new, len(start.cached) * self._block_size

    def _grow(self, sequence: Sequence, draft: _Draft) -> Chunk | None:
        """Get the block for one more token, from others if need be; None: the sequence lost its own instead."""
        num_tokens = sequence.num_known
        while (new_blocks := self.kv.grow(sequence.request_id, num_tokens)) is None:
            # Those before this one are in the plan already, as far as they have something to compute.
            candidates = self._running[bisect_left(self._running, sequence.place, key=_PLACE) :]
            victim = candidates[self.policy.victim([each.request for each in candidates])]
            draft.has_preempted = True
            victim.num_preemptions += 1
            self._preempt(victim)
            if victim is sequence:
                return None
        sequence.num_spare_slots += len(new_blocks) * self._block_size
        if sequence.row is None:
            raise InvariantBroken(f"request {sequence.request_id!r} grows without a row")
        return Chunk(sequence.row, 1, new_blocks)

    def _preempt(self, sequence: Sequence) -> None:
        self._num_preemptions += 1
        self._leave(sequence, State.WAITING)
        self._waiting.add(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """End a sequence wherever it is, and let go of all it holds."""
        del self._sequences[sequence.request_id]
        if sequence.state is State.RUNNING:
            self._leave(sequence, State.FINISHED)
        else:
            sequence.state = State.FINISHED
            if not self._siblings.discard(sequence):
                self._waiting.note_gone(sequence)
        self.policy.note_ended(sequence.request, sequence.num_output_tokens)
        self._free_siblings_of(sequence.request_id)

    def _note_waits(self, plan: _PlanInFlight, result: StepResult) -> None:
        """Take back what the plan promised of rows that have no token yet, and have not ended."""
        entries = zip(result.rows, result.counts, result.finishes, strict=True)
        waiting = {row for row, count, finish in entries if not count and finish is None}
        waiting.difference_update(failure.row for failure in result.failures)
        for sequence in plan.sequences:
            if sequence.row in waiting:
                sequence.wait()

    def _finish(self, sequence: Sequence, reason: FinishReason, finished: list[Finished]) -> None:
        self._retire(sequence)
        finished.append(Finished(sequence.request_id, reason))

    def _leave(self, sequence: Sequence, state: State) -> None:
        # Row and blocks may be given out by the very plan that releases them: a worker releases before it admits.
        self._running.remove(sequence)
        self.kv.release(sequence.request_id)
        row = sequence.stop(state)
        self._released.append(row)
        self._free_rows.append(row)

    # -- prefixes and siblings ----------------------------------------------------------------------------------

    def _prompt_hashes(self, request: Request) -> tuple[BlockHash, tuple[BlockHash, ...]]:
        if not self._is_caching:
            return BlockHash(b""), ()
        scope = self._scope if not request.cache_salt else replace(self._scope, cache_salt=request.cache_salt)
        found = self._hasher.prompt_hashes(request, scope)
        return found.root, found.hashes

    def _note_full(self, sequence: Sequence, has_failed: bool) -> None:
        """Blocks of a sequence are full and computed: name them, so that other prompts find them."""
        size, hashes = self._block_size, sequence.hashes
        first, end = sequence.num_named, sequence.pass_boundary(self._block_size)
        if not self._is_caching or not sequence.can_publish or has_failed:
            return
        if len(hashes) < end:
            parent = hashes[-1] if hashes else sequence.root
            hashes += self._hasher.chain(parent, sequence.token_ids[len(hashes) * size : end * size])
        parent = hashes[first - 1] if first else sequence.root
        token_ids = sequence.token_ids[first * size : end * size]
        self.kv.publish(sequence.request_id, hashes[first:end], first, parent, token_ids)
        sequence.num_named = end

    def _free_siblings(self) -> None:
        for leader_id in self._siblings.leaders:
            leader = self._sequences.get(leader_id)
            if leader is None or leader.is_prompt_computed:
                self._free_siblings_of(leader_id)

    def _free_siblings_of(self, leader_id: RequestId) -> None:
        for sequence in self._siblings.take(leader_id):
            self._waiting.add(sequence)
