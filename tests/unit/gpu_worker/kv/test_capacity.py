"""How many blocks fit, and how long a sequence may grow."""

from typing import Any

import pytest

from gpu_worker.kv.capacity import Capacity, plan_capacity
from plugins.errors import InvalidConfig

MIB_BLOCKS = {"kv_cache_gib": 1 / 64, "block_bytes": 1 << 20, "block_size": 16}  # room for 16 blocks of 16 tokens


def plan(**changes: Any) -> Capacity:
    wanted = {
        "num_blocks": None,
        "max_model_len": None,
        "max_sequences": 100,
        "trained_len": 2048,
        "available_bytes": None,
    }
    return plan_capacity(**(MIB_BLOCKS | wanted | changes))


def test_one_of_the_blocks_that_fit_is_the_one_of_zeros() -> None:
    assert plan() == Capacity(num_blocks=15, block_size=16, max_model_len=240)


def test_the_context_is_what_the_model_was_trained_for_if_the_blocks_hold_it() -> None:
    assert plan(trained_len=100).max_model_len == 100


def test_no_more_blocks_are_made_than_all_rows_can_fill() -> None:
    assert plan(max_sequences=2, max_model_len=40).num_blocks == 6


def test_the_cache_may_take_all_memory_that_there_is() -> None:
    assert plan(available_bytes=16 << 20).num_blocks == 15


def test_blocks_asked_for_are_made() -> None:
    assert plan(num_blocks=1000) == Capacity(num_blocks=1000, block_size=16, max_model_len=2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"available_bytes": (16 << 20) - 1},
            "worker.kv_cache_gib is 0.015625, which takes 16777216 bytes of KV cache",
        ),
        ({"available_bytes": 1000, "num_blocks": 15}, "worker.num_blocks is 15, which takes 16777216 bytes"),
        ({"available_bytes": 1000}, "this machine has 1000 available; lower it"),
        ({"max_model_len": 2049}, "worker.max_model_len is 2049, but the model was trained for 2048"),
        ({"max_model_len": 241}, "15 KV blocks of 16 tokens hold 240"),
        ({"num_blocks": 2, "max_model_len": 33}, "2 KV blocks of 16 tokens hold 32"),
        ({"block_bytes": 9 << 20}, "raise it to at least 0.017578"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_key_to_change(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        plan(**changes)

    assert message in str(caught.value)
