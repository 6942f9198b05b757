"""Memory by tag and name."""

import pytest
import torch

from gpu_worker.device.dtypes import torch_dtype
from gpu_worker.device.memory import DeviceMemory
from plugins.errors import InvalidConfig, InvariantBroken


def test_bytes_are_counted_by_tag() -> None:
    memory = DeviceMemory(torch.device("cpu"))

    weight = memory.allocate("weights", "w", (2, 3), torch.float32)
    memory.allocate("kv_cache", "pages", (5,), torch.bfloat16)

    assert (tuple(weight.shape), weight.dtype) == ((2, 3), torch.float32)
    assert memory.num_bytes("weights") == 24
    assert memory.num_bytes("kv_cache") == 10


def test_a_name_is_given_out_once() -> None:
    memory = DeviceMemory(torch.device("cpu"))
    memory.allocate("weights", "w", (1,), torch.float32)

    with pytest.raises(InvariantBroken, match="weights/w"):
        memory.allocate("weights", "w", (1,), torch.float32)


def test_an_unknown_element_type_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidConfig, match="unknown element type 'fp4'; known: bfloat16, float16, float32"):
        torch_dtype("fp4")
