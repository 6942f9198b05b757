"""Which tokens are green after which, under a key: a hash in 32-bit words, once for one token and once for all of them.

Both bodies give the same bits. The key cannot be read off the marked text, but the hash is no cipher: who sees very
much of it can learn the pairs that are common.
"""

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

NUM_VALUES: Final = 2**32  # of a hash
_MASK: Final = NUM_VALUES - 1
_HALF: Final = NUM_VALUES // 2  # a word of 32 bits with a sign is in [-_HALF, _HALF)
# Of the lowbias32 hash of Chris Wellons' hash-prospector. The second is 0x846ca68b less 2**32: so no product of it
# and a 32-bit word leaves 64 bits, and the low 32 bits are the same.
_SHIFTS: Final = (16, 15)
_LAST_SHIFT: Final = 16
_MULTIPLIERS: Final = (0x7FEB352D, 0x846CA68B - NUM_VALUES)
_PERSON: Final = b"dihedral.green"

Word = TypeVar("Word", int, "Tensor")  # a number in [0, 2**32), or an int64 tensor of them


class Key(NamedTuple):
    """A secret as two words; both are in [0, 2**32)."""

    first: int
    second: int


def key_of(secret: str) -> Key:
    """Turn a text into a key."""
    digest = blake2b(secret.encode(), digest_size=8, person=_PERSON).digest()
    return Key(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))


def threshold_of(gamma: float) -> int:
    """Return the number that green tokens hash below, so that a share `gamma` of them does."""
    return int(gamma * NUM_VALUES)


def is_green(key: Key, previous: int, token_id: int, threshold: int) -> bool:
    """Say whether a token is green after another."""
    return _mix(_context(key, previous) ^ token_id) < threshold


def green_tokens(key: Key, previous_K: "Tensor", threshold_K: "Tensor", vocab_size: int) -> "Tensor":
    """Say for each row which tokens are green. Shapes: both [K] int64; returns [K, vocab_size] bool."""
    import torch

    # Words of 32 bits, which wrap around: 7 ms for 32 rows of 49,152 tokens where 64 bits take 36 (one thread).
    # A shift fills up with the sign, which is cut off.
    context_K1 = _signed(_context(key, previous_K))[:, None]
    words_KV = context_K1 ^ torch.arange(vocab_size, dtype=torch.int32, device=previous_K.device)
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=True):
        words_KV ^= (words_KV >> shift) & (_MASK >> shift)
        words_KV *= multiplier
    words_KV ^= (words_KV >> _LAST_SHIFT) & (_MASK >> _LAST_SHIFT)
    words_KV ^= -_HALF  # now they are ordered as their unsigned values are
    return words_KV < (threshold_K - _HALF).to(torch.int32)[:, None]


def _context(key: Key, previous: Word) -> Word:
    return _mix(_mix(previous ^ key.first) ^ key.second)


def _mix(word: Word) -> Word:
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=True):
        word = ((word ^ (word >> shift)) * multiplier) & _MASK
    return word ^ (word >> _LAST_SHIFT)


def _signed(words: "Tensor") -> "Tensor":
    """Turn int64 words into int32 ones of the same bits."""
    import torch

    return torch.where(words < _HALF, words, words - NUM_VALUES).to(torch.int32)
