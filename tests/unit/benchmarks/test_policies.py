"""Traces, and policies and routers on simulated workers."""

import pytest

from benchmarks.fake_rows import Work
from benchmarks.policies import WorkerModel, affinity_gain, simulate
from benchmarks.traces import TraceConfig, describe_trace, generate_trace

CONFIG = TraceConfig(num_requests=120, conversations_per_s=20.0, length_scale=0.2, seed=5)
MODEL = WorkerModel(num_blocks=600, max_sequences=16, max_step_tokens=256)


def test_the_same_seed_draws_the_same_trace_in_the_order_of_arrival() -> None:
    once, again = generate_trace(CONFIG), generate_trace(CONFIG)

    assert once == again
    assert len(once) == 120
    assert [request.arrival_s for request in once] == sorted(request.arrival_s for request in once)
    assert len({request.request_id for request in once}) == 120


def test_a_later_turn_begins_with_the_turn_before_and_its_answer() -> None:
    trace = {request.request_id: request for request in generate_trace(CONFIG)}
    later = [request for request in trace.values() if request.request_id.endswith("-1")]

    assert len(later) == 10
    for request in later:
        before = trace[request.request_id.removesuffix("1") + "0"]
        history = before.prompt_token_ids + before.output_token_ids
        assert request.prompt_token_ids[: len(history)] == history
        assert request.arrival_s > before.arrival_s


def test_the_default_trace_is_as_the_statistics_say() -> None:
    facts = describe_trace(generate_trace(TraceConfig()), block_size=16)

    assert facts.output_tokens_p50["conversation"] == pytest.approx(129, rel=0.15)
    assert facts.output_tokens_p50["code"] == pytest.approx(13, rel=0.25)
    assert facts.prompt_tokens_p50["conversation"] == pytest.approx(1_020, rel=0.2)
    assert facts.prompt_tokens_p50["code"] == pytest.approx(1_500, rel=0.2)
    assert 0.45 < facts.shared_ratio < 0.65
    assert facts.interval_variation > 1.2


def test_a_step_takes_its_fixed_time_and_that_of_its_work() -> None:
    model = WorkerModel(step_s=1.0, prompt_token_s=0.1, decode_s=0.01, context_token_s=0.001)

    assert model.duration_s(Work(0, 0, 0)) == 1.0
    assert model.duration_s(Work(3, 2, 5)) == pytest.approx(1.325)


def test_the_same_seed_gives_the_same_outcome() -> None:
    trace = generate_trace(CONFIG)

    once, again = (simulate(trace, MODEL, "priority", "power_of_two", 0.01, 2, seed=3) for _ in range(2))

    assert once == again


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair_share"])
@pytest.mark.parametrize("router", ["round_robin", "power_of_two", "least_load", "prefix_affinity"])
def test_every_policy_and_router_serves_a_trace_to_its_end(policy: str, router: str) -> None:
    outcome = simulate(generate_trace(CONFIG), MODEL, policy, router, 0.0, 2, seed=1)

    assert 0 < outcome.ttft_s_p50 <= outcome.ttft_s_p99
    assert outcome.output_tokens_per_s > 0
    assert 0 < outcome.hit_ratio < 1


def test_routing_by_prefix_hits_more_than_taking_turns() -> None:
    trace = generate_trace(CONFIG)

    turns, affinity = (
        simulate(trace, MODEL, "fcfs", router, 0.01, 4, 1) for router in ("round_robin", "prefix_affinity")
    )

    assert affinity.hit_ratio > 1.2 * turns.hit_ratio


def test_the_gain_of_affinity_is_the_least_over_policies_and_watermarks() -> None:
    def run(policy: str, router: str, hit_ratio: float) -> dict[str, object]:
        return {"policy": policy, "router": router, "watermark": 0.01, "hit_ratio": hit_ratio}

    runs = [
        run("fcfs", "round_robin", 0.2),
        run("fcfs", "prefix_affinity", 0.4),
        run("priority", "round_robin", 0.25),
        run("priority", "prefix_affinity", 0.4),
        run("fair_share", "prefix_affinity", 0.1),
    ]

    assert affinity_gain(runs) == 1.6
    assert affinity_gain(runs[-1:]) is None
