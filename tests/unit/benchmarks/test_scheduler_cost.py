"""Scenarios, the drive that times a scheduler, and how figures are reduced and held against bars."""

import os
import random
from collections.abc import Callable

import pytest

from benchmarks.against_vllm_scheduler import judge
from benchmarks.scheduler_cost import SCHEDULERS, Drive, add_all, build, choose, growth, profile_steps
from benchmarks.scheduler_scenarios import (
    SCENARIOS,
    Cost,
    Scenario,
    Step,
    draw_requests,
    in_child,
    reduce_steps,
    run_steps,
)
from plugins.errors import InvalidConfig

SMALL = Scenario(
    name="small",
    what="four decodes",
    max_sequences=4,
    max_step_tokens=64,
    num_requests=6,
    prompt_tokens=(20, 40),
    num_warm_up=2,
    num_steps=5,
)


def test_the_same_seed_draws_the_same_requests() -> None:
    once, again = (list(draw_requests(SMALL, random.Random(3))) for _ in range(2))

    assert once == again
    assert len(once) == 6
    assert all(20 <= len(request.token_ids) <= 40 for request in once)
    assert len({request.token_ids[0] for request in once}) > 1


def test_a_shared_prefix_is_shared_by_all_and_counts_to_the_prompt() -> None:
    drawn = list(draw_requests(SCENARIOS["iv"], random.Random(7)))

    assert {len(request.token_ids) for request in drawn} == {512}
    assert len({request.token_ids[:256] for request in drawn}) == 1
    assert len({request.token_ids[256] for request in drawn}) > 2_000
    assert {min(request.max_tokens for request in drawn), max(request.max_tokens for request in drawn)} == {32, 95}


@pytest.mark.parametrize("scheduler", ["synchronous", "run_ahead"])
def test_every_seat_decodes_before_anything_counts(scheduler: str) -> None:
    built = build(SMALL, SCHEDULERS[scheduler])
    rng = random.Random(1)
    add_ns = add_all(built, draw_requests(SMALL, rng))

    steps, num_preemptions = run_steps(SMALL, Drive(built, rng).step, lambda: built.load().num_preemptions)

    assert len(add_ns) == 6
    assert [(step.num_requests, step.num_tokens, step.num_running) for step in steps] == [(4, 4, 4)] * 5
    assert all(step.schedule_ns > 0 and step.update_ns > 0 for step in steps)
    assert num_preemptions == 0


def test_run_ahead_plans_once_more_before_its_first_result() -> None:
    drives = {}
    for name, scheduler in SCHEDULERS.items():
        built = build(SMALL, scheduler)
        rng = random.Random(1)
        add_all(built, draw_requests(SMALL, rng))
        drives[name] = Drive(built, rng)

    assert drives["synchronous"].step().update_ns > 0
    assert drives["run_ahead"].step().update_ns == 0
    assert drives["run_ahead"].step().update_ns > 0


def test_steps_are_reduced_to_microseconds() -> None:
    steps = [Step(1_000, 3_000, 2, 4, 2), Step(2_000, 4_000, 2, 2, 2, num_finished=1), Step(3_000, 8_000, 4, 4, 4)]

    cost = reduce_steps(steps, [5_000, 7_000, 6_000], num_preemptions=2)

    assert (cost.schedule_us_p50, cost.update_us_p50, cost.both_us_p50, cost.both_us_p99) == (2.0, 4.0, 6.0, 11.0)
    assert (cost.us_per_request, cost.us_per_token) == (2.625, 2.1)
    assert (cost.add_us_p50, cost.requests_in_step, cost.tokens_in_step) == (6.0, 2, 4)
    assert (cost.num_finished, cost.num_preemptions) == (1, 2)


def cost_in(pid: int) -> Callable[[], Cost]:
    def measure() -> Cost:
        is_elsewhere = os.getpid() != pid
        return reduce_steps([Step(1_000, 1_000, 1, 1, 1)], [1_000], num_preemptions=int(is_elsewhere))

    return measure


def test_a_measurement_has_a_process_of_its_own() -> None:
    assert in_child(cost_in(os.getpid()), cpu=None)["num_preemptions"] == 1


def test_a_measurement_without_a_figure_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> Cost:
        raise ValueError("no figure")

    with pytest.raises(RuntimeError, match="ended without a figure"):
        in_child(fail, cpu=None)

    assert "ValueError: no figure" in capfd.readouterr().err


def test_a_name_that_is_not_known_is_refused_with_those_that_are() -> None:
    assert choose("ii,i", SCENARIOS) == ("ii", "i")
    with pytest.raises(InvalidConfig, match="there is no vi; there are synchronous, run_ahead"):
        choose("vi", SCHEDULERS)


def test_growth_is_the_cost_of_a_token_at_2000_over_that_at_256() -> None:
    runs = [
        {"scenario": "i", "scheduler": "run_ahead", "both_us_p50": 128.0, "tokens_in_step": 256},
        {"scenario": "iii-2000", "scheduler": "run_ahead", "both_us_p50": 1_200.0, "tokens_in_step": 2_000},
        {"scenario": "iii-2000", "scheduler": "synchronous", "both_us_p50": 9_000.0, "tokens_in_step": 2_000},
    ]

    assert growth(runs, "run_ahead") == 1.2
    assert growth(runs, "synchronous") is None


def test_a_profile_names_where_the_time_goes() -> None:
    assert "(schedule)" in profile_steps(SMALL, SCHEDULERS["run_ahead"])


def turn(scenario: str, theirs_us: float, ours_us: float) -> dict[str, object]:
    return {
        "scenario": scenario,
        "scheduler": "run_ahead",
        "theirs": {"both_us_p50": theirs_us, "add_us_p50": 60.0},
        "ours": {"both_us_p50": ours_us, "add_us_p50": 30.0},
    }


def test_medians_of_the_turns_are_held_against_the_bar() -> None:
    runs = [turn("ii", 100, 20), turn("ii", 110, 90), turn("ii", 120, 30), turn("v", 100, 51), turn("i", 100, 200)]

    verdicts = judge(runs)

    assert [(each["scenario"], each["ratio"], each["holds"]) for each in verdicts] == [
        ("ii", 0.2727, True),
        ("v", 0.51, False),
        ("i", 2.0, True),
    ]
