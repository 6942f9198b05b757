"""Gives out the memory of weights and KV pages, by tag, and counts it.

Knows tensors by tag and name; what is written into them is their users' business.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor

from plugins.errors import InvalidConfig, InvariantBroken

Tag = Literal["weights", "kv_cache"]  # memory that is kept or let go together

_REMEDIES: dict[Tag, str] = {
    "weights": "choose a smaller worker.model, or more memory",
    "kv_cache": "lower worker.kv_cache_gib or worker.num_blocks",
}


class DeviceMemory:
    """All long-lived memory of one device. Owned by the factory; called while the worker is built.

    A tensor keeps its address while the process lives. Invariant: a tag has each name once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: dict[Tag, dict[str, Tensor]] = {"weights": {}, "kv_cache": {}}

    def allocate(self, tag: Tag, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor that never moves. It holds anything until it is written.

        Raises: InvalidConfig: the device has no room for it. InvariantBroken: the tag has that name already.
        """
        tensors = self._tensors[tag]
        if name in tensors:
            raise InvariantBroken(f"memory {tag}/{name} is allocated twice")
        try:
            tensors[name] = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        except RuntimeError as error:  # what torch's allocators raise, also for more bytes than can be counted
            num_bytes = prod(shape) * dtype.itemsize
            raise InvalidConfig(
                f"{self.device} has no room for {num_bytes} bytes of {tag} ({name}), beside the "
                f"{self.num_bytes('weights')} of weights and {self.num_bytes('kv_cache')} of KV cache that it holds; "
                f"{_REMEDIES[tag]}"
            ) from error
        return tensors[name]

    def num_bytes(self, tag: Tag) -> int:
        """Return the bytes of everything allocated under a tag."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors[tag].values())
