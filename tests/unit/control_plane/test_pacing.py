"""When prompts should wait, by arithmetic: targets, pauses and their limits in milliseconds and steps."""

import pytest

from control_plane.engine.pacing import PrefillPacer
from control_plane.scheduling.config import SchedulerConfig
from plugins.types import StepResult
from tests.unit.control_plane.driving import Cluster, asking


def took(ms: float) -> StepResult:
    return StepResult(seq=1, compute_ns=int(ms * 1e6))


def pacer_after(target_ms: float | None, decode_ms: float, mixed_ms: float) -> PrefillPacer:
    """A pacer that has seen many steps of each kind, the last one with a prompt."""
    pacer = PrefillPacer(target_ms)
    for _ in range(60):
        pacer.note_result(2, 0, took(decode_ms))
        pacer.note_result(1, 1, took(mixed_ms))
    pacer.note_plan(num_prompts=1)
    return pacer


def num_pauses(pacer: PrefillPacer) -> int:
    """How many steps of decodes alone it asks for before the next prompt."""
    count = 0
    while pacer.throttles:
        pacer.note_plan(num_prompts=0)
        count += 1
    return count


def test_without_a_target_prompts_never_wait() -> None:
    assert not pacer_after(None, 5.0, 1000.0).throttles


def test_a_new_pacer_lets_everything_pass() -> None:
    assert not PrefillPacer(10.0).throttles


@pytest.mark.parametrize(
    ("decode_ms", "mixed_ms", "pauses"),
    [
        (5.0, 9.0, 0),  # within the target of 10 anyway
        (5.0, 15.0, 1),  # 15 and 5 are 10 on average
        (5.0, 30.0, 4),  # 30 and 4 times 5 are 50 in 5 steps
        (8.0, 30.0, 10),  # 30 and 10 times 8 are 110 in 11 steps
        (8.0, 31.0, 11),  # 10.5 steps are 11
        (5.0, 1000.0, 32),  # 198 would keep the target, but prompts move every 33rd step at least
        (10.0, 30.0, 32),  # decodes alone reach the target: nothing would keep it
        (12.0, 30.0, 32),
    ],
)
def test_so_many_steps_without_prompts_follow_that_the_mean_keeps_the_target(
    decode_ms: float, mixed_ms: float, pauses: int
) -> None:
    assert num_pauses(pacer_after(10.0, decode_ms, mixed_ms)) == pauses


def test_a_step_with_a_prompt_begins_the_pause_anew() -> None:
    pacer = pacer_after(10.0, 5.0, 30.0)
    num_pauses(pacer)

    pacer.note_plan(num_prompts=1)

    assert num_pauses(pacer) == 4


def test_the_first_step_is_the_average_and_each_further_one_moves_it_by_a_quarter() -> None:
    pacer = PrefillPacer(10.0)
    throttles = []
    for ms in (12.0, 4.0, 10.1):  # 12, then 10, then 10.025
        pacer.note_result(1, 1, took(ms))
        throttles.append(pacer.throttles)

    assert throttles == [True, False, True]


def test_prompts_that_are_alone_in_their_step_slow_no_decode() -> None:
    pacer = PrefillPacer(10.0)
    for _ in range(60):
        pacer.note_result(0, 2, took(1000.0))

    assert not pacer.throttles


def test_the_engine_holds_prompts_back_while_a_worker_is_slow_and_computes_them_in_the_end() -> None:
    cluster = Cluster(target_inter_token_ms=10.0, config=SchedulerConfig(max_chunk_tokens=8))
    cluster.attach("w")
    cluster.submit(asking("a", max_tokens=60))
    cluster.step()
    cluster.submit(asking("b", range(3, 43), max_tokens=2))
    sizes = []
    while cluster.core.has_work():
        before = len(cluster.plans)
        for results in cluster.on_their_way.values():
            results[:] = [_slow(cluster, result) for result in results]
        cluster.step_all()
        sizes += [plan.num_tokens for _, plan in cluster.plans[before:]]

    assert len(cluster.ends) == 2
    # 8 tokens of b's prompt beside one of a's: twice before anything is known of the worker, then at every sixth
    # step, because 50 and 5 times 1 are 55 ms in 6 steps. Of b's 40 tokens 4 are cached.
    assert sizes[:21] == [9, 9, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1, 1, 5, 2]


def _slow(cluster: Cluster, result: StepResult) -> StepResult:
    """The result of a worker that takes 50 ms for a step with prompts and 1 ms for one of decodes alone."""
    plan = next(plan for _, plan in cluster.plans if plan.seq == result.seq)
    return StepResult(
        seq=result.seq,
        rows=result.rows,
        counts=result.counts,
        token_ids=result.token_ids,
        finishes=result.finishes,
        compute_ns=50_000_000 if plan.num_tokens > len(plan.chunks) else 1_000_000,
    )


def test_the_first_step_of_a_kind_is_believed_at_once() -> None:
    pacer = PrefillPacer(10.0)

    pacer.note_result(1, 1, took(40.0))

    assert pacer.throttles
