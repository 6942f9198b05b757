"""How many KV blocks a worker has, and how long a sequence may grow: arithmetic on bytes and tokens.

Decides numbers; the memory is allocated in `gpu_worker/kv/cache.py`.
"""

from dataclasses import dataclass

from plugins.errors import InvalidConfig

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits. `max_model_len <= num_blocks * block_size`: one sequence of full length always finds room."""

    num_blocks: int
    block_size: int
    max_model_len: int


def plan_capacity(
    *,
    kv_cache_gib: float,
    block_bytes: int,
    block_size: int,
    num_blocks: int | None,
    max_model_len: int | None,
    max_sequences: int,
    trained_len: int,
    available_bytes: int | None,
) -> Capacity:
    """Fit blocks into memory and the context into blocks.

    `block_bytes` is one block over all layers; one more block than reported is paid for, because the cache keeps
    a block of zeros. `num_blocks=None`: as many as fit, but no more than all rows at full length can fill.
    `max_model_len=None`: as long as the model was trained for and the blocks can hold.
    `available_bytes` is the memory that there is for the cache; None: nobody knows.

    Raises: InvalidConfig: not one block fits, the memory does not hold the blocks, or the context wanted is longer
        than model or blocks allow.
    """
    if max_model_len is not None and max_model_len > trained_len:
        raise InvalidConfig(
            f"worker.max_model_len is {max_model_len}, but the model was trained for {trained_len} tokens; lower it"
        )
    asked_by = (
        f"worker.kv_cache_gib is {kv_cache_gib:g}" if num_blocks is None else f"worker.num_blocks is {num_blocks}"
    )
    if num_blocks is None:
        num_blocks_that_fit = int(kv_cache_gib * GIB) // block_bytes - 1
        blocks_per_sequence = -(-(max_model_len or trained_len) // block_size)
        num_blocks = min(num_blocks_that_fit, max_sequences * blocks_per_sequence)
    if num_blocks < 1:
        raise InvalidConfig(
            f"worker.kv_cache_gib is {kv_cache_gib:g}, which holds no KV block of {block_bytes} bytes besides the "
            f"one of zeros; raise it to at least {2 * block_bytes / GIB:.6f}"
        )
    kv_bytes = (num_blocks + 1) * block_bytes
    if available_bytes is not None and kv_bytes > available_bytes:
        raise InvalidConfig(
            f"{asked_by}, which takes {kv_bytes} bytes of KV cache; this machine has {available_bytes} available; "
            "lower it"
        )
    num_slots = num_blocks * block_size
    if max_model_len is not None and max_model_len > num_slots:
        raise InvalidConfig(
            f"worker.max_model_len is {max_model_len}, but {num_blocks} KV blocks of {block_size} tokens hold "
            f"{num_slots}; lower it, or raise worker.kv_cache_gib or worker.num_blocks"
        )
    return Capacity(num_blocks, block_size, max_model_len or min(trained_len, num_slots))
