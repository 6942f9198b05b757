"""Keeps the block table of every sequence: how many blocks its tokens need, which ones it has, which it shares.

Counts tokens and blocks; when a sequence may start, grow, wait or lose its blocks is the scheduler's decision.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.kv.block_pool import BlockPool
from control_plane.kv.hashing import BlockHash
from control_plane.kv.prefix_cache import PrefixCache
from plugins.errors import InvariantBroken
from plugins.kv_events import KvEvent
from plugins.types import BlockCopy, BlockId, RequestId, TokenId


@dataclass(frozen=True, slots=True)
class Start:
    """The first blocks of a sequence, in the order of its tokens."""

    cached: tuple[BlockId, ...]  # hold its leading tokens already
    new: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """The first blocks of a sibling, in the order of its tokens."""

    shared: tuple[BlockId, ...]  # its source's
    copy: BlockCopy | None  # of the source's next block, if the shared tokens end in it; its destination comes next
    new: tuple[BlockId, ...]  # after that


class Allocator:
    """Block tables of the sequences on one worker. Owned by the scheduler; called from the engine task alone.

    Without caching no block gets a name, and every block is empty once nobody holds it.

    Invariant: a block's reference count is the number of tables that hold it, and the blocks that the pool keeps are
    those that the prefix cache has names for.
    """

    def __init__(self, num_blocks: int, block_size: int, is_caching: bool = True) -> None:
        self._cache = PrefixCache(block_size)
        self._pool = BlockPool(num_blocks, on_evict=self._cache.forget)
        self._block_size = block_size
        self._is_caching = is_caching
        self._tables: dict[RequestId, list[BlockId]] = {}
        self._outdated: set[RequestId] = set()  # began before the last reset: what they compute gets no name

    @property
    def num_blocks(self) -> int:
        """Blocks of the worker, free and used."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached or not."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix could hit, held or not."""
        return len(self._cache)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def records_events(self) -> bool:
        """Does somebody take events? At first nobody does, and none are kept."""
        return self._cache.records_events

    @records_events.setter
    def records_events(self, records_events: bool) -> None:
        self._cache.records_events = records_events

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self._block_size)

    def num_matched(self, hashes: Sequence[BlockHash]) -> int:
        """Count the leading blocks of a chain that a sequence could share. Changes nothing."""
        return len(self._cache.match(hashes))

    def start(
        self, request_id: RequestId, num_tokens: int, hashes: Sequence[BlockHash], spare: int = 0
    ) -> Start | None:
        """Give a sequence its first blocks: those of `hashes` that are cached, and others for the rest.

        `hashes` are of blocks that it may share, in order; at least one of its tokens is in none of them.
        Returns None if fewer than `spare` blocks would be free afterwards; then nothing has changed.
        Raises: InvariantBroken: the sequence has blocks, or `hashes` cover all its tokens.
        """
        if len(hashes) * self._block_size >= num_tokens:
            raise InvariantBroken(f"{len(hashes)} blocks to share leave nothing to compute of {num_tokens} tokens")
        cached = tuple(self._cache.match(hashes))
        added = self._take(request_id, cached, self.num_blocks_for(num_tokens) - len(cached), spare)
        return None if added is None else Start(cached, added)

    def fork(
        self, request_id: RequestId, source: RequestId, num_shared_tokens: int, num_tokens: int, spare: int = 0
    ) -> Fork | None:
        """Give a sequence its first blocks: the leading ones of another sequence, and others for the rest.

        It shares the source's first `num_shared_tokens`, which are all computed once the copy is made. A block that
        they fill in part is copied, because each of the two goes on in its own.
        Returns None if fewer than `spare` blocks would be free afterwards; then nothing has changed.
        Raises: InvariantBroken: the sequence has blocks, or fewer tokens than it shares, or the source has too few
        blocks.
        """
        held = self._tables.get(source, [])
        if num_shared_tokens > min(num_tokens, len(held) * self._block_size):
            raise InvariantBroken(
                f"{request_id} with {num_tokens} tokens cannot share {num_shared_tokens} with {source}, "
                f"which has {len(held)} blocks of {self._block_size}"
            )
        num_shared, num_copied = divmod(num_shared_tokens, self._block_size)
        shared = tuple(held[:num_shared])
        added = self._take(request_id, shared, self.num_blocks_for(num_tokens) - num_shared, spare)
        if added is None:
            return None
        if source in self._outdated:
            self._outdated.add(request_id)
        if not num_copied:
            return Fork(shared, None, added)
        return Fork(shared, BlockCopy(held[num_shared], added[0]), added[1:])

    def grow(self, request_id: RequestId, num_tokens: int) -> tuple[BlockId, ...] | None:
        """Extend a sequence's table, empty at first, until it holds `num_tokens`.

        Returns the blocks that were added, () if it holds them already, None if not all of them are free; then
        nothing has changed.
        """
        table = self._tables.get(request_id, ())
        num_added = -(-num_tokens // self._block_size) - len(table)
        if num_added <= 0:
            return ()
        added = self._pool.allocate(num_added)
        if added:
            self._tables.setdefault(request_id, []).extend(added)
        return added

    def publish(
        self,
        request_id: RequestId,
        hashes: Sequence[BlockHash],
        first: int,
        parent: BlockHash,
        token_ids: Sequence[TokenId],
    ) -> None:
        """Let other sequences share the table's blocks [first, first + len(hashes)), which are full and verified.

        `parent` is the hash before the first of them; `token_ids` are their tokens. Does nothing without caching, and
        nothing for a sequence that began before the last reset: its blocks rest on what was to be forgotten.
        Raises: InvariantBroken: the table is shorter, or a block has another name.
        """
        if not self._is_caching or not hashes or request_id in self._outdated:
            return
        block_ids = self._tables.get(request_id, [])[first : first + len(hashes)]
        if len(block_ids) != len(hashes):
            raise InvariantBroken(
                f"{request_id} publishes blocks [{first}, {first + len(hashes)}) and has "
                f"{len(self._tables.get(request_id, ()))}"
            )
        for block_id in self._cache.name(block_ids, hashes, parent, token_ids):
            self._pool.keep(block_id)

    def release(self, request_id: RequestId) -> None:
        """Give back all blocks of a sequence. A sequence that has none is left alone.

        The last block goes first, so that of a chain that nobody holds the end is given up before the beginning,
        which more prompts could hit.
        """
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._outdated.discard(request_id)
            self._pool.release(reversed(table))

    def table(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """Return a sequence's blocks in the order of its tokens."""
        return tuple(self._tables.get(request_id, ()))

    def reset(self) -> None:
        """Forget all names: no block that was computed so far is hit again. Tables stay as they are."""
        self._cache.clear()
        self._pool.keep_none()
        self._outdated.update(self._tables)

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return what happened to cached blocks since the last call, in order."""
        return self._cache.take_events()

    def num_sole(self, request_id: RequestId) -> int:
        """Count the blocks that `release` would free: those that no other table holds."""
        return sum(1 for block_id in self._tables.get(request_id, ()) if self._pool.reference_count(block_id) == 1)

    def check(self) -> None:
        """Compare pool, names and tables. Costs one pass over all blocks. Raises: InvariantBroken."""
        self._pool.check()
        self._cache.check()
        held = Counter(block_id for table in self._tables.values() for block_id in table)
        for block_id, count in held.items():
            if self._pool.reference_count(block_id) != count:
                raise InvariantBroken(
                    f"block {block_id} is in {count} tables and has {self._pool.reference_count(block_id)} references"
                )
        if len(held) != self._pool.num_used:
            raise InvariantBroken(f"{self._pool.num_used} blocks are used, but tables hold {len(held)}")
        if self._pool.kept() != self._cache.named():
            raise InvariantBroken(
                f"the pool keeps {len(self._pool.kept())} blocks, the prefix cache names {len(self._cache)}; "
                f"{sorted(self._pool.kept() ^ self._cache.named())[:4]} differ"
            )
        if not self._outdated <= self._tables.keys():
            raise InvariantBroken(f"{len(self._outdated - self._tables.keys())} outdated sequences have no table")

    def _take(
        self, request_id: RequestId, shared: tuple[BlockId, ...], num_added: int, spare: int
    ) -> tuple[BlockId, ...] | None:
        """Make a table of blocks that are there and added ones; None if fewer than `spare` would stay free."""
        if request_id in self._tables:
            raise InvariantBroken(f"{request_id} starts with {len(self._tables[request_id])} blocks")
        if self._pool.num_waiting_among(shared) + num_added > self._pool.num_free - spare:
            return None
        self._pool.share(shared)  # first, or the added blocks could be the very ones that were matched
        added = self._pool.allocate(num_added)
        if added is None:
            raise InvariantBroken(f"{self._pool.num_free} blocks are free, yet {num_added} were not handed out")
        self._tables[request_id] = [*shared, *added]
        return added
