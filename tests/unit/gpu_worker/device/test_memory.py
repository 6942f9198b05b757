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


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [((1 << 60, 2), "4611686018427387904"), ((1 << 62, 1 << 62), "42535295865117307932921825928971026432")],
)
def test_memory_that_is_not_there_is_told_with_its_size_and_the_key_to_change(
    shape: tuple[int, int], num_bytes: str
) -> None:
    memory = DeviceMemory(torch.device("cpu"))
    memory.allocate("weights", "w", (2, 3), torch.float32)

    with pytest.raises(InvalidConfig) as caught:
        memory.allocate("kv_cache", "pages", shape, torch.bfloat16)

    assert str(caught.value) == (
        f"cpu has no room for {num_bytes} bytes of kv_cache (pages), beside the 24 of weights and 0 of KV cache that "
        "it holds; lower worker.kv_cache_gib or worker.num_blocks"
    )


def test_an_unknown_element_type_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidConfig, match="unknown element type 'fp4'; known: bfloat16, float16, float32"):
        torch_dtype("fp4")
