"""Reference mode on the real model: a seeded request says the same whatever happens around it.

float32 rows are computed by the same operations in the same order in any batch and any chunk; the draws are a
function of seed and position. A worker kill in the middle is in tests/end_to_end.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from control_plane.engine.local import LocalEngine
from control_plane.scheduling.config import SchedulerConfig
from plugins.noise import child_seed
from plugins.types import SamplingParams, TokenId

NUM_TOKENS = 24
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "My favourite food is",
]


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=seed, ignore_eos=True)


def run(engine: LocalEngine, requests: dict[str, tuple[str, SamplingParams]]) -> dict[str, tuple[TokenId, ...]]:
    """Send all requests at once and wait for their outputs."""
    outputs: dict[str, tuple[TokenId, ...]] = dict.fromkeys(requests, ())
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    while engine.has_work():
        for delivery in engine.step():
            outputs[delivery.request_id] = outputs.get(delivery.request_id, ()) + delivery.token_ids
    return outputs


def requests(count: int) -> dict[str, tuple[str, SamplingParams]]:
    return {f"r{index}": (PROMPTS[index % len(PROMPTS)], sampling(seed=index)) for index in range(count)}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    scheduler = SchedulerConfig(max_step_tokens=512, max_sequences=32)
    with LocalEngine(scheduler=scheduler, dtype="float32", threads=1, max_sequences=32, max_model_len=512) as made:
        yield made


@pytest.fixture(scope="module")
def crowd(engine: LocalEngine) -> dict[str, tuple[TokenId, ...]]:
    """32 requests together."""
    return run(engine, requests(32))


def test_alone_and_in_a_batch_of_32(engine: LocalEngine, crowd: dict[str, tuple[TokenId, ...]]) -> None:
    chosen = ("r0", "r1", "r2", "r3", "r17", "r30")

    alone = {name: run(engine, {name: requests(32)[name]})[name] for name in chosen}

    assert alone == {name: crowd[name] for name in chosen}
    assert len(set(crowd.values())) == 32


def test_four_outputs_are_those_of_four_requests_with_the_child_seeds(engine: LocalEngine) -> None:
    alone = run(engine, {f"r{index}": (PROMPTS[1], sampling(child_seed(7, index))) for index in range(4)})

    together = run(engine, {"r": (PROMPTS[1], replace(sampling(7), n=4))})

    assert [together[name] for name in ("r", "r·1", "r·2", "r·3")] == [alone[f"r{index}"] for index in range(4)]
    assert len(set(alone.values())) == 4


def test_under_preemption_and_in_small_chunks(crowd: dict[str, tuple[TokenId, ...]]) -> None:
    """12 blocks hold two or three of the eight; a step computes seven tokens at most."""
    scheduler = SchedulerConfig(max_step_tokens=7, max_sequences=4)
    with LocalEngine(
        scheduler=scheduler, dtype="float32", threads=1, max_sequences=4, max_step_tokens=7, num_blocks=8,
        block_size=8, max_model_len=64,
    ) as tight:  # fmt: skip
        outputs = run(tight, requests(8))

    assert outputs == {name: crowd[name] for name in outputs}
