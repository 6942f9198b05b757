"""Who gives blocks or a row back, when, and how it comes back."""

from collections.abc import Sequence

import pytest

from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.first_come import FirstComePolicy
from control_plane.scheduling.priority import PriorityPolicy
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.scheduler import SchedulingPolicy
from plugins.types import FinishReason, Request, RequestId, Row, StepResult, TokenId
from tests.fakes import FakeWorker, expected_output, worker_info
from tests.unit.control_plane.driving import Bench, asking

A, B, C, D = (RequestId(name) for name in "abcd")


def make_bench(
    num_blocks: int = 64,
    max_sequences: int = 8,
    policy: SchedulingPolicy | None = None,
    block_size: int = 4,
    max_step_tokens: int = 64,
    config: SchedulerConfig | None = None,
) -> Bench:
    info = worker_info(num_blocks, block_size, max_sequences, max_step_tokens)
    config = config or SchedulerConfig(watermark_ratio=0.0)
    return Bench(RunAheadScheduler(config, info, policy), FakeWorker(info))


class SecondLast(FirstComePolicy):
    """Spares the last one."""

    def victim(self, running: Sequence[Request]) -> int:
        return max(0, len(running) - 2)


def test_a_policy_chooses_who_gives_its_blocks_back() -> None:
    # Three prompts of 4 tokens fill 3 of 4 blocks of 4. All want a fifth token; the first gets the fourth block.
    bench = make_bench(num_blocks=4, policy=SecondLast())
    bench.add(*(asking(name, range(start, start + 4)) for name, start in (("a", 10), ("b", 20), ("c", 30))))
    bench.step()

    plan = bench.plan()

    assert plan.released_rows == (1,)
    assert [chunk.row for chunk in plan.chunks] == [0, 2]


def test_who_wants_to_grow_may_have_to_give_way_itself() -> None:
    # b is asked for, among b and c, the second last: itself.
    bench = make_bench(num_blocks=5, policy=SecondLast())
    bench.add(asking("a", range(10, 22), max_tokens=9), asking("b", range(30, 34)), asking("c", range(40, 43)))
    bench.step()

    plan = bench.plan()

    assert plan.released_rows == (1,)
    assert [chunk.row for chunk in plan.chunks] == [0, 2]


def test_who_is_in_the_plan_already_is_never_the_victim() -> None:
    class First(FirstComePolicy):
        def victim(self, running: Sequence[Request]) -> int:
            return 0

    # a has room for its next token and b has not: the first of those from b on is b.
    bench = make_bench(num_blocks=3, policy=First())
    bench.add(asking("a", range(10, 15)), asking("b", range(20, 24)))
    bench.step()

    plan = bench.plan()

    assert plan.released_rows == (1,)
    assert [chunk.row for chunk in plan.chunks] == [0]


def test_nobody_is_admitted_in_the_step_that_preempts() -> None:
    class Patient(PriorityPolicy):
        def displaces(self, waiting: Request, running: Request) -> bool:
            return False

    bench = make_bench(num_blocks=5, policy=Patient(ageing_s=10.0))
    bench.add(asking("a", range(10, 18), priority=5), asking("b", range(20, 32), priority=5))
    bench.step()
    bench.add(asking("c", (3,), priority=0))

    first, second = bench.plan(), bench.plan()  # a needs a third block: b gives up three, and c needs one

    assert (first.released_rows, first.admitted) == ((1,), ())
    assert [each.request_id for each in second.admitted] == [C]


def test_a_preempted_request_waits_for_the_last_plan_that_names_it_even_if_there_is_room() -> None:
    bench = make_bench(num_blocks=3)
    bench.add(asking("a", range(10, 14)), asking("b", range(20, 24)))
    bench.plan()
    bench.plan()  # b gives way; its first token is still in flight
    bench.scheduler.cancel_request(A)

    early = bench.plan()
    bench.answer()
    late = bench.plan()

    assert early.admitted == ()
    assert [each.token_ids for each in late.admitted] == [(*range(20, 24), *expected_output(range(20, 24), 1))]


def test_a_preempted_request_keeps_its_place_before_those_that_came_later() -> None:
    bench = make_bench(num_blocks=4, max_sequences=2)
    bench.add(asking("a", range(10, 18), max_tokens=6), asking("b", range(20, 27), max_tokens=6))
    bench.add(asking("c", (3,), max_tokens=1), asking("d", (4,), max_tokens=1))

    bench.finish_all(ahead=2)

    assert bench.scheduler.load().num_preemptions == 1
    assert [each.request_id for plan in bench.plans for each in plan.admitted] == [A, B, B, C, D]
    assert bench.outputs[B] == expected_output(range(20, 27), 6)


@pytest.mark.parametrize("ahead", [1, 2])
def test_an_urgent_request_takes_a_row_in_the_next_plan_and_the_last_one_starts_over_later(ahead: int) -> None:
    """B061: the first token comes with the first plan that is made after the request came."""
    bench = make_bench(num_blocks=400, max_sequences=4, policy=PriorityPolicy(ageing_s=10.0))
    bench.add(*(asking(name, (ord(name),), max_tokens=300, priority=10) for name in "abcd"))
    for _ in range(5):
        bench.step()
    for _ in range(ahead - 1):
        bench.plan()  # its result is still to come
    bench.add(asking("urgent", range(3, 11), max_tokens=8, priority=0, arrival_s=1.0))

    plan = bench.plan()
    for _ in range(ahead):
        bench.answer()

    assert plan.released_rows == (3,)
    assert [each.request_id for each in plan.admitted] == ["urgent"]
    assert bench.outputs[RequestId("urgent")] == expected_output(range(3, 11), 1)
    bench.finish_all(ahead)
    assert set(bench.ends.values()) == {FinishReason.LENGTH}
    assert bench.outputs[D] == expected_output((ord("d"),), 300)
    assert bench.scheduler.load().num_preemptions == 1


def test_equal_priorities_never_displace_each_other() -> None:
    """B061: ties never preempt, not even for an older request."""
    bench = make_bench(max_sequences=1, policy=PriorityPolicy(ageing_s=10.0))
    bench.add(asking("a", max_tokens=9, priority=10, arrival=2, arrival_s=5.0))
    bench.step()
    bench.add(asking("b", max_tokens=9, priority=10, arrival=1, arrival_s=1.0))

    bench.finish_all()

    assert bench.scheduler.load().num_preemptions == 0
    assert list(bench.ends) == [A, B]


def test_an_urgent_request_waits_when_there_is_room_anyway() -> None:
    bench = make_bench(max_sequences=2, policy=PriorityPolicy(ageing_s=10.0))
    bench.add(asking("a", max_tokens=9, priority=10))
    bench.step()
    bench.add(asking("b", priority=0))

    plan = bench.plan()

    assert (plan.released_rows, [each.request_id for each in plan.admitted]) == ((), [B])


def test_an_urgent_prompt_goes_before_prompts_in_the_making() -> None:
    """B061, for the token budget: long prompts that were begun do not hold an urgent one up."""
    bench = make_bench(num_blocks=200, max_step_tokens=16, policy=PriorityPolicy(ageing_s=10.0))
    bench.add(asking("a", range(3, 203), priority=10), asking("b", range(300, 500), priority=10))
    bench.step()
    bench.step()
    bench.add(asking("urgent", range(600, 608), priority=0, arrival_s=1.0))

    plan = bench.step()

    assert [each.request_id for each in plan.admitted] == ["urgent"]
    assert bench.outputs[RequestId("urgent")] == expected_output(range(600, 608), 1)
    assert bench.scheduler.load().num_preemptions == 0


def test_the_watermark_does_not_keep_an_urgent_request_from_the_whole_pool() -> None:
    bench = make_bench(num_blocks=10, policy=PriorityPolicy(ageing_s=10.0), config=SchedulerConfig(watermark_ratio=0.3))
    bench.add(asking("a", (3,), max_tokens=30, priority=10))
    bench.step()
    bench.add(asking("urgent", range(100, 139), max_tokens=1, priority=0, arrival_s=1.0))

    plan = bench.plan()

    assert [each.request_id for each in plan.admitted] == ["urgent"]


def test_nobody_is_displaced_if_all_that_might_be_are_not_enough() -> None:
    bench = make_bench(num_blocks=10, policy=PriorityPolicy(ageing_s=10.0))
    bench.add(asking("old", range(50, 70), max_tokens=9, priority=0), asking("a", (3,), max_tokens=9, priority=10))
    bench.step()
    bench.add(asking("urgent", range(100, 132), max_tokens=1, priority=0, arrival_s=1.0))

    plan = bench.plan()

    assert (plan.released_rows, plan.admitted) == ((), ())


def test_nobody_is_displaced_by_what_comes_later_whatever_the_policy_says() -> None:
    class Eager(FirstComePolicy):
        def displaces(self, waiting: Request, running: Request) -> bool:
            return True

    bench = make_bench(max_sequences=1, policy=Eager())
    bench.add(asking("a", arrival=1), asking("b", arrival=2))

    bench.finish_all()

    assert [each.request_id for plan in bench.plans for each in plan.admitted] == [A, B]


def test_nobody_is_displaced_for_a_request_that_cannot_start_yet() -> None:
    class Unselfish(PriorityPolicy):
        def victim(self, running: Sequence[Request]) -> int:
            return 0

    # a is the urgent one, gives way to itself for want of a block, and is still named by a plan in flight.
    bench = make_bench(num_blocks=4, policy=Unselfish(ageing_s=10.0))
    bench.add(asking("a", range(10, 18)), asking("b", range(20, 27), max_tokens=2, priority=10))
    bench.plan()
    given_up = bench.plan()

    waiting = bench.plan()
    bench.answer()
    displacing = bench.plan()

    assert (given_up.released_rows, waiting.released_rows) == ((0,), ())
    assert displacing.released_rows == (1,)


def test_nobody_is_displaced_when_that_would_not_make_enough_room() -> None:
    # a is as urgent as c and holds most blocks; displacing b would free 2, and c needs 6.
    bench = make_bench(num_blocks=12, policy=PriorityPolicy(ageing_s=10.0))
    bench.add(asking("a", range(10, 42), max_tokens=2), asking("b", range(50, 57), max_tokens=9, priority=10))
    bench.step()
    bench.add(asking("c", range(60, 84), priority=0, arrival_s=1.0))

    assert bench.plan().released_rows == ()


def test_a_request_that_fits_only_alone_ends_within_bounds_and_those_behind_it_finish() -> None:
    """B056: 8 blocks of 16 hold 128 tokens, and the prompt of 100 may have 28 more; admission caps max_tokens so."""
    for names in ("a", "abcd"):
        bench = make_bench(num_blocks=8, block_size=16, config=SchedulerConfig())
        bench.add(asking("a", range(3, 103), max_tokens=28))
        bench.add(*(asking(name, (3, 4), max_tokens=8) for name in names[1:]))

        bench.finish_all(ahead=2)

        assert set(bench.ends) == set(names)
        assert set(bench.ends.values()) == {FinishReason.LENGTH}
        assert bench.outputs[A] == expected_output(range(3, 103), 28)
        assert len(bench.admissions("a")) == 1
        assert len(bench.plans) <= 60


def test_long_prompts_that_do_not_fit_together_compute_little_twice() -> None:
    """B057: 4 requests of 250 + 150 tokens, 40 blocks of 16 without a prefix cache, chunks of 64."""
    config = SchedulerConfig(prefix_caching=False, max_chunk_tokens=64)
    bench = make_bench(num_blocks=40, block_size=16, max_step_tokens=256, config=config)
    prompts = {name: range(start, start + 250) for name, start in (("a", 3), ("b", 100), ("c", 200), ("d", 300))}
    bench.add(*(asking(name, prompt, max_tokens=150) for name, prompt in prompts.items()))

    bench.finish_all(ahead=2)

    num_useful = 4 * (250 + 150 - 1)
    assert sum(plan.num_tokens for plan in bench.plans) <= 3 * num_useful
    assert bench.outputs == {RequestId(name): expected_output(prompt, 150) for name, prompt in prompts.items()}


def test_a_token_that_its_worker_forgot_with_the_row_is_sampled_again() -> None:
    """A worker that has launched the plan which releases a row says nothing of the token in flight."""
    scheduler = RunAheadScheduler(SchedulerConfig(watermark_ratio=0.0), worker_info(num_blocks=3))
    scheduler.add_request(asking("a", (3, 4, 5), max_tokens=5))
    scheduler.add_request(asking("b", (6, 7, 8), max_tokens=5))
    scheduler.schedule()
    scheduler.schedule()
    both = StepResult(seq=1, rows=(Row(0), Row(1)), counts=(1, 1), token_ids=(TokenId(9),) * 2, finishes=(None, None))
    scheduler.update(both)
    preempting = scheduler.schedule()
    num_before = scheduler.load().num_waiting_tokens

    scheduler.update(StepResult(seq=2, rows=(Row(0),), counts=(1,), token_ids=(TokenId(9),), finishes=(None,)))
    num_after = scheduler.load().num_waiting_tokens
    scheduler.cancel_request(A)
    back = scheduler.schedule()

    assert preempting.released_rows == (1,)
    assert (num_before, num_after) == (5, 4)
    assert [each.token_ids for each in back.admitted] == [(6, 7, 8, 9)]
    assert [chunk.num_tokens for chunk in back.chunks] == [4]
