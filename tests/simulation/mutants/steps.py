"""Bugs in what plans say and how results are read: blocks, rows, limits, the prefix cache (I2, I3, I4, I6)."""

from collections.abc import Sequence as Many
from dataclasses import replace

from control_plane.engine.lane import Lane
from control_plane.engine.row_book import PlanInFlight
from control_plane.kv.allocator import Allocator
from control_plane.kv.block_pool import BlockPool
from control_plane.kv.hashing import BlockHash, BlockHasher, CacheScope
from control_plane.kv.prefix_cache import PrefixCache
from control_plane.scheduling.batching import BatchingScheduler
from control_plane.scheduling.sequence import Sequence, State
from plugins.types import BlockId, Chunk, RequestId, StepPlan, StepResult, TokenId
from tests.simulation.mutants.mutant import Method, Mutant


def _gives_twice(right: Method) -> Method:
    """A block that was given out stays free."""

    def allocate(self: BlockPool, num_blocks: int) -> tuple[BlockId, ...] | None:
        taken: tuple[BlockId, ...] | None = right(self, num_blocks)
        if taken and len(taken) > 2:
            self._empty.insert(0, taken[-1])
        return taken

    return allocate


def _keeps_a_block(right: Method) -> Method:
    """The blocks of who is cancelled are not given back."""

    def cancel_request(self: BatchingScheduler, request_id: RequestId) -> None:
        table = self.kv._tables.get(request_id)
        right(self, request_id)
        if table:
            self.kv._pool.allocate(1)

    return cancel_request


def _forgets_release(right: Method) -> Method:
    """A worker is not told that a row is free."""

    def leave(self: BatchingScheduler, sequence: Sequence, state: State) -> None:
        right(self, sequence, state)
        if state is State.WAITING:
            self._released.pop()

    return leave


def _reads_todays_rows(right: Method) -> Method:
    """A result is read through the rows of today."""

    def take(self: Lane, result: StepResult) -> PlanInFlight:
        plan: PlanInFlight = right(self, result)
        held = self._rows._rows if self._rows is not None else {}
        return replace(plan, owners={row: held[row].live if row in held else plan.owners[row] for row in plan.owners})

    return take


def _grows_in_secret(right: Method) -> Method:
    """A sequence gets a block, and its worker is not told."""

    def grow(self: BatchingScheduler, *arguments: object) -> Chunk | None:
        chunk: Chunk | None = right(self, *arguments)
        return None if chunk is None else Chunk(chunk.row, chunk.num_tokens)

    return grow


def _readmits_early(right: Method) -> Method:
    """A preempted sequence does not wait for the plans that still name it."""

    def preempt(self: BatchingScheduler, sequence: Sequence) -> None:
        right(self, sequence)
        sequence.num_plans = 0

    return preempt


def _exceeds_budget(right: Method) -> Method:
    """One prompt may have a token more than the step."""

    def max_chunk(self: BatchingScheduler) -> int:
        self._max_step_tokens = self.worker.max_step_tokens + 1
        return int(right(self))

    return max_chunk


def _gives_a_row_twice(right: Method) -> Method:
    """The row of who ended is given out to two."""

    def leave(self: BatchingScheduler, sequence: Sequence, state: State) -> None:
        right(self, sequence, state)
        self._free_rows.append(self._free_rows[-1])

    return leave


def _plans_a_row_twice(right: Method) -> Method:
    """Who decodes alone decodes twice in one plan."""

    def schedule(self: BatchingScheduler, throttle_prefills: bool = False) -> StepPlan:
        plan: StepPlan = right(self, throttle_prefills)
        return replace(plan, chunks=plan.chunks * 2) if len(plan.chunks) == 1 else plan

    return schedule


def _trusts_waits(right: Method) -> Method:
    """A row that waits is taken for one that has its token."""

    def note_waits(self: BatchingScheduler, plan: object, result: StepResult) -> None:
        pass

    return note_waits


def _computes_twice(right: Method) -> Method:
    """The token before the one that is missing counts as computed."""

    def wait(self: Sequence) -> None:
        right(self)
        self.num_until_full -= 1

    return wait


def _ignores_salts(right: Method) -> Method:
    """All salts share one cache."""

    def root(self: BlockHasher, scope: CacheScope) -> BlockHash:
        return BlockHash(b"one root")

    return root


def _names_unverified(right: Method) -> Method:
    """The blocks of all known tokens have names before the last ones are computed."""

    def note_full(self: BatchingScheduler, sequence: Sequence, has_failed: bool) -> None:
        num_early = min(len(sequence.token_ids), sequence.num_slots) - sequence.num_computed
        sequence.num_until_full -= num_early
        right(self, sequence, has_failed)
        sequence.num_until_full += num_early

    return note_full


def _hits_by_last_block(right: Method) -> Method:
    """A block's name does not cover what came before it."""

    def chain(self: BlockHasher, parent: BlockHash, token_ids: Many[TokenId]) -> list[BlockHash]:
        size = self._block_size
        return [
            right(self, BlockHash(b""), token_ids[start : start + size])[0]
            for start in range(0, len(token_ids) - size + 1, size)
        ]

    return chain


def _forgets_nothing(right: Method) -> Method:
    """A reset of the cache leaves the names."""

    def reset(self: Allocator) -> None:
        self._outdated.update(self._tables)

    return reset


def _evicts_in_secret(right: Method) -> Method:
    """A block that was given to another keeps its old name."""

    def forget(self: PrefixCache, block_ids: Many[BlockId]) -> None:
        if len(block_ids) > 1:
            right(self, block_ids[1:])

    return forget


MUTANTS = (
    Mutant("I2", "block given twice", BlockPool, "allocate", _gives_twice),
    Mutant("I2", "blocks kept after a cancel", BatchingScheduler, "cancel_request", _keeps_a_block),
    Mutant("I3", "result read through todays rows", Lane, "take", _reads_todays_rows),
    Mutant("I3", "block the worker was not told of", BatchingScheduler, "_grow", _grows_in_secret),
    Mutant("I3", "row not released at a preemption", BatchingScheduler, "_leave", _forgets_release),
    Mutant("I3", "preempted admitted too early", BatchingScheduler, "_preempt", _readmits_early),
    Mutant("I3", "token of a waiting row expected", BatchingScheduler, "_note_waits", _trusts_waits),
    Mutant("I6", "cache hit of a waiting rows token", Sequence, "wait", _computes_twice),
    Mutant("I4", "budget exceeded", BatchingScheduler, "_max_chunk", _exceeds_budget),
    Mutant("I4", "row given twice", BatchingScheduler, "_leave", _gives_a_row_twice),
    Mutant("I4", "row planned twice", BatchingScheduler, "schedule", _plans_a_row_twice),
    Mutant("I6", "cache hit across salts", BlockHasher, "root", _ignores_salts),
    Mutant("I6", "cache hit of unverified tokens", BatchingScheduler, "_note_full", _names_unverified),
    Mutant("I6", "cache hit without its prefix", BlockHasher, "chain", _hits_by_last_block),
    Mutant("I6", "cache hit after a reset", Allocator, "reset", _forgets_nothing),
    Mutant("I6", "cache hit of an evicted block", PrefixCache, "forget", _evicts_in_secret),
)
