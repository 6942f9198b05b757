"""Keeps the block table of every sequence: how many blocks its tokens need, and which ones it has.

Counts tokens and blocks; when a sequence may grow, wait or lose its blocks is the scheduler's decision.
"""

from collections import Counter

from control_plane.kv.block_pool import BlockPool
from plugins.errors import InvariantBroken
from plugins.types import BlockId, RequestId


class Allocator:
    """Block tables of the sequences on one worker. Owned by the scheduler; called from the engine task alone.

    Invariant: a block's reference count is the number of tables that hold it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._tables: dict[RequestId, list[BlockId]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of the worker, free and used."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self._block_size)

    def grow(self, request_id: RequestId, num_tokens: int) -> tuple[BlockId, ...] | None:
        """Extend a sequence's table, empty at first, until it holds `num_tokens`.

        Returns the blocks that were added, () if it holds them already, None if not all of them are free; then
        nothing has changed.
        """
        table = self._tables.get(request_id, ())
        added = self._pool.allocate(max(0, self.num_blocks_for(num_tokens) - len(table)))
        if added:
            self._tables.setdefault(request_id, []).extend(added)
        return added

    def release(self, request_id: RequestId) -> None:
        """Give back all blocks of a sequence, the last one first. A sequence that has none is left alone."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._pool.release(reversed(table))

    def table(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """Return a sequence's blocks in the order of its tokens."""
        return tuple(self._tables.get(request_id, ()))

    def check(self) -> None:
        """Compare pool and tables. Costs one pass over all blocks. Raises: InvariantBroken."""
        self._pool.check()
        held = Counter(block_id for table in self._tables.values() for block_id in table)
        for block_id, count in held.items():
            if self._pool.reference_count(block_id) != count:
                raise InvariantBroken(
                    f"block {block_id} is in {count} tables and has {self._pool.reference_count(block_id)} references"
                )
        if len(held) != self._pool.num_used:
            raise InvariantBroken(f"{self._pool.num_used} blocks are used, but tables hold {len(held)}")
