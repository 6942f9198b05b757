"""Which noise belongs to which of the outputs of one request.

How noise is made from a seed is the business of `gpu_worker/sampling/philox.py`.
"""

from hashlib import blake2b
from typing import Final

_PERSON: Final = b"dihedral.child"


def child_seed(seed: int, index: int) -> int:
    """Return the seed of output `index` of a request with n > 1; both and the result are in [0, 2**64).

    A request for one output uses its seed as it is: with `child_seed(seed, i)` it repeats output i of n.
    """
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8, person=_PERSON).digest(), "little")
