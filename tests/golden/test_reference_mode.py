"""Reference mode on the real model: a seeded request says the same whatever happens around it.

float32 rows are computed by the same operations in the same order in any batch and any chunk; the draws are a
function of seed and position. A last bit that differs seldom changes a token, so what is told of the tokens is compared
too, bit for bit. A worker kill in the middle is in tests/end_to_end.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

from control_plane.engine.local import LocalEngine
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.noise import child_seed
from plugins.types import SamplingParams, StepPlan, TokenId, TokenLogprobs

NUM_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "My favourite food is",
]


@dataclass
class Told:
    """One output: its tokens, and the raw log-probabilities of each and of the likeliest three."""

    token_ids: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


class Watched(RunAheadScheduler):
    """Tells how much output a request had whenever it was admitted."""

    admitted: ClassVar[list[int]] = []

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        plan = super().schedule(throttle_prefills)
        self.admitted.extend(len(each.token_ids) - each.num_prompt_tokens for each in plan.admitted)
        return plan


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=seed, ignore_eos=True, logprobs=3)


def run(engine: LocalEngine, requests: dict[str, tuple[str, SamplingParams]]) -> dict[str, Told]:
    """Send all requests at once and wait for their outputs."""
    outputs: defaultdict[str, Told] = defaultdict(Told)
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    while engine.has_work():
        for delivery in engine.step():
            outputs[delivery.request_id].token_ids += delivery.token_ids
            outputs[delivery.request_id].logprobs += delivery.logprobs
    assert {len(told.logprobs) for told in outputs.values()} == {NUM_TOKENS}
    return dict(outputs)


def num_different(outputs: dict[str, Told]) -> int:
    return len({tuple(told.token_ids) for told in outputs.values()})


def requests(count: int) -> dict[str, tuple[str, SamplingParams]]:
    return {f"r{index}": (PROMPTS[index % len(PROMPTS)], sampling(seed=index)) for index in range(count)}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    scheduler = SchedulerConfig(max_step_tokens=512, max_sequences=32)
    with LocalEngine(scheduler=scheduler, dtype="float32", threads=1, max_sequences=32, max_model_len=512) as made:
        yield made


@pytest.fixture(scope="module")
def crowd(engine: LocalEngine) -> dict[str, Told]:
    """32 requests together."""
    return run(engine, requests(32))


def test_alone_and_in_a_batch_of_32(engine: LocalEngine, crowd: dict[str, Told]) -> None:
    chosen = ("r0", "r1", "r18", "r31")

    alone = {name: run(engine, {name: requests(32)[name]})[name] for name in chosen}

    assert alone == {name: crowd[name] for name in chosen}
    assert num_different(crowd) == 32


def test_four_outputs_are_those_of_four_requests_with_the_child_seeds(engine: LocalEngine) -> None:
    alone = run(engine, {f"r{index}": (PROMPTS[1], sampling(child_seed(7, index))) for index in range(4)})

    together = run(engine, {"r": (PROMPTS[1], replace(sampling(7), n=4))})

    assert [together[name] for name in ("r", "r·1", "r·2", "r·3")] == [alone[f"r{index}"] for index in range(4)]
    assert num_different(alone) == 4


def test_under_preemption_and_in_small_chunks(crowd: dict[str, Told]) -> None:
    """6 blocks of 8 tokens hold one of the four, or the starts of several; a step computes seven tokens at most."""
    Watched.admitted.clear()
    scheduler = SchedulerConfig(max_step_tokens=7, max_sequences=4)
    with LocalEngine(
        scheduler=scheduler, scheduler_cls=Watched, dtype="float32", threads=1, max_sequences=4, max_step_tokens=7,
        num_blocks=6, block_size=8, max_model_len=48,
    ) as tight:  # fmt: skip
        outputs = run(tight, requests(4))

    assert outputs == {name: crowd[name] for name in outputs}
    assert len(outputs) == 4
    assert sum(num_tokens > 0 for num_tokens in Watched.admitted) >= 2  # were preempted, and came back
