"""Names the content of KV blocks: a block's hash stands for all tokens up to its end, and for what else must be equal.

Turns tokens and scopes into hashes; which block holds what is the prefix cache's business.
"""

import functools
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

from plugins.types import Request, TokenId

BlockHash = NewType("BlockHash", bytes)  # HASH_BYTES of them

HASH_BYTES = 16
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheScope:
    """What must be equal, besides the tokens, for two blocks to hold the same keys and values."""

    cache_salt: str = ""  # the caller's; not content, but who may know of it
    adapter: str = ""
    kv_cache_dtype: str = ""
    weights_version: str = ""
    model: str = ""


class PromptHashes(NamedTuple):
    """The hashes of a prompt."""

    root: BlockHash  # the parent of the first block
    hashes: tuple[BlockHash, ...]  # of its full blocks


class BlockHasher:
    """Hashes chains of blocks under one secret key. May be shared; what it remembers changes no answer.

    The hash is BLAKE2b: keyed, so that nobody without the key can make two prompts meet; equal in every process that
    has the key, unlike Python's own `hash`; 128 bits, so that a hit needs no comparison of tokens; and in the standard
    library.
    """

    def __init__(self, key: bytes, block_size: int) -> None:
        digest = hashlib.blake2b(key).digest()  # a key may be longer than the 64 bytes that BLAKE2b takes
        # Copying a keyed state costs a third less than making one, and there is one for each block of a prompt.
        self._scope_state = hashlib.blake2b(key=digest, digest_size=HASH_BYTES, person=b"kv scope")
        self._block_state = hashlib.blake2b(key=digest, digest_size=HASH_BYTES, person=b"kv block")
        self._block_size = block_size
        # One attribute, set at once: two threads at work make each other hash again, and mix nothing up.
        self._last: tuple[tuple[TokenId, ...], CacheScope, PromptHashes] | None = None

    def root(self, scope: CacheScope) -> BlockHash:
        """Return the parent of every first block in this scope."""
        state = self._scope_state.copy()
        state.update(encode_scope(scope))
        return BlockHash(state.digest())

    def chain(self, parent: BlockHash, token_ids: Sequence[TokenId]) -> list[BlockHash]:
        """Hash each full block of the tokens, the first one as the child of `parent`; tokens after them are ignored."""
        columns = struct.pack(f"<{len(token_ids)}i", *token_ids)
        block_bytes = self._block_size * _TOKEN_BYTES
        fresh = self._block_state.copy
        hashes: list[BlockHash] = []
        for end in range(block_bytes, len(columns) + 1, block_bytes):
            state = fresh()
            state.update(parent + columns[end - block_bytes : end])
            parent = BlockHash(state.digest())
            hashes.append(parent)
        return hashes

    def prompt_hashes(self, request: Request, scope: CacheScope) -> PromptHashes:
        """Hash a request's prompt. Asking about the same tuple of tokens again costs nothing.

        A router asks about one request several times, and the outputs of a request share their prompt.
        """
        last = self._last
        if last is not None and last[0] is request.prompt_token_ids and last[1] == scope:
            return last[2]
        root = self.root(scope)
        hashes = PromptHashes(root, tuple(self.chain(root, request.prompt_token_ids)))
        self._last = (request.prompt_token_ids, scope, hashes)
        return hashes


@functools.lru_cache(maxsize=16)
def hasher_for(key: str | bytes, block_size: int) -> BlockHasher:
    """Return the one hasher for this key and block size, so that schedulers hash a prompt once for all of them."""
    return BlockHasher(key.encode() if isinstance(key, str) else key, block_size)


def encode_scope(scope: CacheScope) -> bytes:
    """Write a scope as bytes that no other scope has: each field as tag, length and content."""
    tagged = (
        (b"S", scope.cache_salt),
        (b"A", scope.adapter),
        (b"D", scope.kv_cache_dtype),
        (b"W", scope.weights_version),
        (b"M", scope.model),
    )
    parts: list[bytes] = []
    for tag, text in tagged:
        content = text.encode("utf-8", "surrogatepass")  # any text of the caller's has a name, also a broken one
        parts += (tag, struct.pack("<I", len(content)), content)
    return b"".join(parts)
