"""What happened to a worker's cached blocks, for routers that stand outside and want to send prompts where they hit.

Values only; who makes them and who is told is the business of the control plane.
"""

from dataclasses import dataclass

from plugins.types import TokenId


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks can be hit from now on: one chain, each block the child of the one before it."""

    block_hashes: tuple[bytes, ...]  # at least one
    parent_hash: bytes  # of the block before the first; of the chain's root if there is none
    token_ids: tuple[TokenId, ...]  # of all these blocks, block_size each
    block_size: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks cannot be hit any more: their memory went to others."""

    block_hashes: tuple[bytes, ...]  # at least one


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """No block can be hit any more."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared
