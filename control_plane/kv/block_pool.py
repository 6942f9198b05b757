"""Hands out KV blocks and counts who uses them.

Knows block ids and reference counts; what the blocks hold, and whose table they are in, is others' business.
"""

from collections.abc import Iterable

from plugins.errors import InvariantBroken
from plugins.types import BlockId


class BlockPool:
    """All KV blocks of one worker. Owned by the allocator; called from the engine task alone.

    Invariant: every block is free or referenced, never both: `num_free + num_used == num_blocks`.
    """

    def __init__(self, num_blocks: int) -> None:
        self._reference_counts = [0] * num_blocks
        # A stack, lowest id on top: a block that was just given back is the likeliest to be warm in a cache.
        self._free = [BlockId(block_id) for block_id in reversed(range(num_blocks))]

    @property
    def num_blocks(self) -> int:
        """Blocks in all, free and used."""
        return len(self._reference_counts)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free

    def allocate(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Take blocks, with one reference each. All or none: None if fewer are free. Zero blocks are ()."""
        if num_blocks > len(self._free):
            return None
        if num_blocks == 0:
            return ()
        taken = tuple(reversed(self._free[-num_blocks:]))
        del self._free[-num_blocks:]
        for block_id in taken:
            self._reference_counts[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add one reference to each block; somebody must hold it already.

        Raises: InvariantBroken: a block is free, so that its content may change at any time.
        """
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                raise InvariantBroken(f"block {block_id} is shared while it is free")
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """Drop one reference from each block; those that nobody holds any more are free at once.

        A worker runs plans in order, so a freed block may go into the very plan that releases its last owner.
        Raises: InvariantBroken: a block is already free.
        """
        for block_id in block_ids:
            count = self._reference_counts[block_id]
            if count == 0:
                raise InvariantBroken(f"block {block_id} is released while it is free")
            self._reference_counts[block_id] = count - 1
            if count == 1:
                self._free.append(block_id)

    def reference_count(self, block_id: BlockId) -> int:
        """Return how many tables hold the block; 0 is free."""
        return self._reference_counts[block_id]

    def check(self) -> None:
        """Compare the free list with the counts. Costs one pass over all blocks.

        Raises: InvariantBroken: a block is both free and referenced, neither, or free twice.
        """
        free = set(self._free)
        unreferenced = {block_id for block_id, count in enumerate(self._reference_counts) if count == 0}
        if len(free) != len(self._free) or free != unreferenced:
            raise InvariantBroken(
                f"{len(self._free)} blocks on the free list, {len(free)} of them distinct, "
                f"{len(unreferenced)} without a reference"
            )
