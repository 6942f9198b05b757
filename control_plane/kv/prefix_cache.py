"""Remembers which block holds which content, so that prompts that begin alike are computed once.

Knows names and blocks, and tells what happened to them; how long a block lives is the pool's business.
"""

from collections.abc import Iterable, Sequence

from control_plane.kv.hashing import BlockHash
from plugins.errors import InvariantBroken
from plugins.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from plugins.types import BlockId, TokenId


class PrefixCache:
    """The names of one worker's blocks. Owned by the allocator; called from the engine task alone.

    A block's name is its hash, which covers all tokens before it too.

    Invariant: a name has one block and a block one name. Of two blocks with the same content the second has none.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[BlockHash, BlockId] = {}
        self._names: dict[BlockId, BlockHash] = {}
        self._records_events = False
        self._events: list[KvEvent] = []

    def __len__(self) -> int:
        """How many blocks a prefix could hit."""
        return len(self._blocks)

    @property
    def records_events(self) -> bool:
        """Are events kept until they are taken? At first they are not; those left when it ends are forgotten."""
        return self._records_events

    @records_events.setter
    def records_events(self, records_events: bool) -> None:
        self._records_events = records_events
        if not records_events:
            self._events.clear()

    def match(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Find the blocks of a chain, from its first on, until one is missing."""
        found: list[BlockId] = []
        for block_hash in hashes:
            block_id = self._blocks.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def name(
        self,
        block_ids: Sequence[BlockId],
        hashes: Sequence[BlockHash],
        parent: BlockHash,
        token_ids: Sequence[TokenId],
    ) -> list[BlockId]:
        """Name blocks that are one chain, the first one the child of `parent`; return those that got a name.

        A block that has the name already, and one whose name another block has, are left as they are. `token_ids` are
        those of all the blocks, for events.
        Raises: InvariantBroken: a block has another name.
        """
        named: list[BlockId] = []
        start = 0  # of the run of blocks that got names; an event tells of one run
        for index, (block_id, block_hash) in enumerate(zip(block_ids, hashes, strict=True)):
            if self._names.get(block_id, block_hash) != block_hash:
                raise InvariantBroken(
                    f"block {block_id} is {self._names[block_id].hex()} and should be named {block_hash.hex()}"
                )
            if block_hash in self._blocks:
                self._record_stored(hashes, start, index, parent, token_ids)
                start = index + 1
                continue
            self._blocks[block_hash] = block_id
            self._names[block_id] = block_hash
            named.append(block_id)
        self._record_stored(hashes, start, len(hashes), parent, token_ids)
        return named

    def forget(self, block_ids: Sequence[BlockId]) -> None:
        """Take the names of blocks that have one."""
        hashes = tuple(self._names.pop(block_id) for block_id in block_ids)
        for block_hash in hashes:
            del self._blocks[block_hash]
        if self._records_events:
            self._events.append(BlocksRemoved(hashes))

    def clear(self) -> None:
        """Take all names."""
        self._blocks.clear()
        self._names.clear()
        if self._records_events:
            self._events.append(BlocksCleared())

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return what was recorded since the last call, in order."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def named(self) -> frozenset[BlockId]:
        """Return the blocks that have a name."""
        return frozenset(self._names)

    def check(self) -> None:
        """Compare names and blocks. Costs one pass over them. Raises: InvariantBroken."""
        strays = [block_id for block_hash, block_id in self._blocks.items() if self._names.get(block_id) != block_hash]
        if strays or len(self._blocks) != len(self._names):
            raise InvariantBroken(
                f"{len(self._blocks)} names have blocks and {len(self._names)} blocks have names; "
                f"{len(strays)} differ, such as {strays[:4]}"
            )

    def _record_stored(
        self, hashes: Sequence[BlockHash], start: int, end: int, parent: BlockHash, token_ids: Sequence[TokenId]
    ) -> None:
        if not self._records_events or start == end:
            return
        self._events.append(
            BlocksStored(
                block_hashes=tuple(hashes[start:end]),
                parent_hash=hashes[start - 1] if start else parent,
                token_ids=tuple(token_ids[start * self._block_size : end * self._block_size]),
                block_size=self._block_size,
            )
        )
