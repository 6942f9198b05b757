"""Hands out KV blocks, counts who uses them, and decides whose content is given up first.

Knows block ids and reference counts; what the blocks hold is the prefix cache's business, whose table they are in the
allocator's.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from plugins.errors import InvariantBroken
from plugins.types import BlockId


class BlockPool:
    """All KV blocks of one worker. Owned by the allocator; called from the engine task alone.

    A block that is kept outlives its holders: it waits with its content until somebody shares it again, or until
    `allocate` runs out of empty blocks and takes the one that has waited longest.

    Invariant: every block is exactly one of empty, waiting and used: `num_empty + num_waiting + num_used ==
    num_blocks`. Used blocks have references, the others none; waiting blocks are kept, empty ones are not.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[Sequence[BlockId]], None] = lambda block_ids: None) -> None:
        """`on_evict` is told which kept blocks `allocate` hands out; they are kept no longer."""
        self._reference_counts = [0] * num_blocks
        # A stack, lowest id on top: a block that was just given back is the likeliest to be warm in a cache.
        self._empty = [BlockId(block_id) for block_id in reversed(range(num_blocks))]
        # Oldest first. An ordered dictionary, because a hit takes blocks out of the middle.
        self._waiting: OrderedDict[BlockId, None] = OrderedDict()
        self._kept: set[BlockId] = set()
        self._on_evict = on_evict

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._reference_counts)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out: the empty and the waiting ones."""
        return len(self._empty) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Blocks that are kept while nobody holds them."""
        return len(self._waiting)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Take blocks, with one reference each: empty ones first, then those that have waited longest.

        All or none: None if fewer are free. Zero blocks are ().
        """
        if num_blocks > self.num_free:
            return None
        if num_blocks == 0:
            return ()
        taken = tuple(reversed(self._empty[-num_blocks:]))
        del self._empty[-num_blocks:]
        if len(taken) < num_blocks:
            taken += self._evict(num_blocks - len(taken))
        for block_id in taken:
            self._reference_counts[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add one reference to each block; it is used or waiting.

        Raises: InvariantBroken: a block is empty, so that its content may change at any time.
        """
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                if block_id not in self._waiting:
                    raise InvariantBroken(f"block {block_id} is shared while it is empty")
                del self._waiting[block_id]
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """Drop one reference from each block; those that nobody holds any more are free at once.

        Of the kept ones among them, the first is given up first. A worker runs plans in order, so a freed block may go
        into the very plan that releases its last owner.
        Raises: InvariantBroken: nobody holds a block.
        """
        for block_id in block_ids:
            count = self._reference_counts[block_id]
            if count == 0:
                raise InvariantBroken(f"block {block_id} is released while nobody holds it")
            self._reference_counts[block_id] = count - 1
            if count == 1:
                if block_id in self._kept:
                    self._waiting[block_id] = None
                else:
                    self._empty.append(block_id)

    def keep(self, block_id: BlockId) -> None:
        """Let a block that somebody holds outlive its holders. Twice is once.

        Raises: InvariantBroken: nobody holds it, so that its content is not certain.
        """
        if self._reference_counts[block_id] == 0:
            raise InvariantBroken(f"block {block_id} is to be kept while nobody holds it")
        self._kept.add(block_id)

    def keep_none(self) -> None:
        """Let no block outlive its holders; those that wait are empty."""
        self._kept.clear()
        self._empty += self._waiting
        self._waiting.clear()

    def reference_count(self, block_id: BlockId) -> int:
        """Return how many holders the block has; none: it is free."""
        return self._reference_counts[block_id]

    def num_waiting_among(self, block_ids: Iterable[BlockId]) -> int:
        """Count the blocks that `share` would take from the free ones."""
        return sum(1 for block_id in block_ids if block_id in self._waiting)

    def kept(self) -> frozenset[BlockId]:
        """Return the blocks that outlive their holders, used or waiting."""
        return frozenset(self._kept)

    def check(self) -> None:
        """Compare what is empty, waiting, kept and counted. Costs one pass over all blocks.

        Raises: InvariantBroken: a block is in two states, in none, or in one that its keeping contradicts.
        """
        empty = set(self._empty)
        if len(empty) != len(self._empty):
            raise InvariantBroken(f"{len(self._empty)} empty blocks, {len(empty)} of them distinct")
        unreferenced = {block_id for block_id, count in enumerate(self._reference_counts) if count == 0}
        free = empty | self._waiting.keys()
        if free != unreferenced or len(free) != self.num_free:
            raise InvariantBroken(
                f"{len(empty)} empty and {len(self._waiting)} waiting blocks, {len(free)} of them distinct, "
                f"{len(unreferenced)} of {self.num_blocks} without a reference"
            )
        if not self._waiting.keys() <= self._kept or empty & self._kept:
            raise InvariantBroken(
                f"{len(self._waiting.keys() - self._kept)} waiting blocks are not kept, "
                f"{len(empty & self._kept)} empty ones are"
            )

    def _evict(self, num_blocks: int) -> tuple[BlockId, ...]:
        evicted = tuple(self._waiting.popitem(last=False)[0] for _ in range(num_blocks))
        self._kept.difference_update(evicted)
        self._on_evict(evicted)
        return evicted
