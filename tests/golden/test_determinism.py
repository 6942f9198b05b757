"""The same seed says the same whatever happens around a request, and no seed says something else each time.

The whole engine in process, with the real worker and its small random model in float32.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from control_plane.engine.local import LocalEngine
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from gpu_worker.sampling.philox import DRAW_SAMPLE, uniforms
from plugins.types import RequestId, SamplingParams, StepPlan, TokenId

PROMPT = "hello there"  # eleven tokens
SEEDED = SamplingParams(max_tokens=64, temperature=1.0, seed=9, ignore_eos=True)

Outputs = dict[str, tuple[TokenId, ...]]


class Watched(RunAheadScheduler):
    """Tells how much output a request had whenever it was admitted."""

    admitted: list[tuple[str, int]] = []  # replaced for each engine

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        plan = super().schedule(throttle_prefills)
        self.admitted += [(each.request_id, len(each.token_ids) - each.num_prompt_tokens) for each in plan.admitted]
        return plan


def make_engine(scheduler: SchedulerConfig | None = None, **worker: Any) -> LocalEngine:
    Watched.admitted = []
    keys: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "num_blocks": 64} | worker
    config = scheduler or SchedulerConfig(max_step_tokens=64, max_sequences=8)
    return LocalEngine(scheduler=config, scheduler_cls=Watched, **keys)


def run(engine: LocalEngine, requests: Mapping[str, tuple[str, SamplingParams]]) -> Outputs:
    """Send all requests at once and wait for their outputs."""
    outputs: Outputs = dict.fromkeys(requests, ())
    for name, (prompt, sampling) in requests.items():
        engine.add_request(name, prompt, sampling)
    while engine.has_work():
        for delivery in engine.step():
            outputs[RequestId(delivery.request_id)] += delivery.token_ids
    return outputs


def test_a_seeded_request_says_the_same_beside_any_neighbours() -> None:
    """B074: alone, beside one without a seed, beside seven with seeds."""
    seeded = replace(SEEDED, seed=42, temperature=0.8)
    with make_engine() as engine:
        alone = run(engine, {"a": (PROMPT, seeded)})["a"]
        unseeded = [
            run(engine, {"a": (PROMPT, seeded), "b": ("another prompt", replace(seeded, seed=None))}) for _ in range(10)
        ]
        crowd = {f"c{seed}": (f"prompt {seed}", replace(seeded, seed=seed)) for seed in range(7)}
        crowded = run(engine, crowd | {"a": (PROMPT, seeded)})["a"]

    assert len(alone) == 64
    assert [outputs["a"] for outputs in unseeded] == [alone] * 10
    assert crowded == alone
    assert len({outputs["b"] for outputs in unseeded}) == 10


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_seeded_request_says_the_same_through_preemptions(is_caching: bool) -> None:
    """B077: 19 blocks of 4 hold this request alone; older ones take them from it as they grow, twice."""
    scheduler = SchedulerConfig(max_step_tokens=64, max_sequences=8, prefix_caching=is_caching)
    with make_engine() as engine:
        undisturbed = run(engine, {"a": (PROMPT, SEEDED)})["a"]
    with make_engine(scheduler, num_blocks=19, block_size=4) as engine:
        older = {"x": ("abc", SEEDED), "y": ("sixteen letters.", replace(SEEDED, max_tokens=20))}
        outputs = run(engine, older | {"a": (PROMPT, SEEDED)})

    assert [num_tokens for name, num_tokens in Watched.admitted if name == "a"] == [0, 14, 27]
    assert outputs["a"] == undisturbed


def test_a_seeded_request_says_the_same_in_any_number_of_chunks() -> None:
    """B077: a prompt of 11 tokens in one, two and three chunks."""
    outputs = []
    for max_step_tokens in (11, 6, 4):
        with make_engine(SchedulerConfig(max_step_tokens=max_step_tokens, max_sequences=4)) as engine:
            outputs.append(run(engine, {"a": (PROMPT, SEEDED)})["a"])

    assert outputs == [outputs[0]] * 3
    assert len(set(outputs[0])) > 30


def test_the_draws_behind_a_seeded_request_are_all_different() -> None:
    """B077: 64 tokens after a prompt of 11."""
    draws = uniforms(np.full(64, 9, dtype=np.uint64), np.arange(11, 75), DRAW_SAMPLE)

    assert len(set(draws.tolist())) == 64


def test_requests_without_a_seed_differ_from_each_other_and_from_those_of_the_next_start() -> None:
    """B079: two groups of 20 with a restart between them."""
    unseeded = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    groups = []
    for _ in range(2):
        with make_engine() as engine:
            groups.append([completion.token_ids for completion in engine.generate([PROMPT] * 20, unseeded)])

    assert [len(set(group)) >= 15 for group in groups] == [True, True]
    assert groups[0] != groups[1]
