"""The default scheduler by example: what goes into a plan, and what a result does."""

from collections.abc import Sequence

import pytest

from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.first_come import FirstComePolicy
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.errors import InvalidConfig, InvariantBroken
from plugins.types import (
    Chunk,
    Finished,
    FinishReason,
    Request,
    RequestId,
    Row,
    RowFailure,
    StepPlan,
    StepResult,
)
from tests.fakes import FakeWorker, expected_output, request, worker_info
from tests.unit.control_plane.driving import Bench, asking

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def make_scheduler(
    num_blocks: int = 64,
    max_step_tokens: int = 32,
    max_sequences: int = 8,
    watermark_ratio: float = 0.0,
    max_chunk_tokens: int | None = None,
) -> RunAheadScheduler:
    config = SchedulerConfig(
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
        watermark_ratio=watermark_ratio,
        max_chunk_tokens=max_chunk_tokens,
    )
    return RunAheadScheduler(config, worker_info(num_blocks=num_blocks, max_step_tokens=max_step_tokens))


def names(plan: StepPlan) -> list[tuple[Row, int]]:
    return [(chunk.row, chunk.num_tokens) for chunk in plan.chunks]


def test_a_request_enters_with_the_blocks_of_its_whole_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", prompt=range(3, 13)))

    plan = scheduler.schedule()

    assert plan.seq == 1
    assert [(entry.request_id, entry.row, entry.token_ids) for entry in plan.admitted] == [(A, 0, tuple(range(3, 13)))]
    assert plan.chunks == (Chunk(Row(0), 10, (0, 1, 2)),)  # type: ignore[arg-type]  # literal block ids read best


def test_the_next_step_is_planned_before_the_token_of_this_one_is_known() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", prompt=range(3, 8)))
    scheduler.schedule()

    plan = scheduler.schedule()

    assert names(plan) == [(0, 1)]
    assert plan.admitted == ()


def test_no_step_is_planned_past_the_last_token_a_request_may_have() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", max_tokens=2))
    plans = [scheduler.schedule(), scheduler.schedule()]

    empty = scheduler.schedule()

    assert [names(plan) for plan in plans] == [[(0, 5)], [(0, 1)]]
    assert empty.is_empty


def test_a_long_prompt_is_computed_in_chunks_and_decodes_go_first() -> None:
    scheduler = make_scheduler(max_step_tokens=8)
    worker = FakeWorker(worker_info(max_step_tokens=8))
    scheduler.add_request(request("a", prompt=range(3, 7), max_tokens=9))
    scheduler.update(worker.execute(scheduler.schedule()))
    scheduler.add_request(request("b", prompt=range(30, 50)))

    plans = [scheduler.schedule() for _ in range(4)]

    assert [names(plan) for plan in plans] == [
        [(0, 1), (1, 7)],
        [(0, 1), (1, 7)],
        [(0, 1), (1, 6)],
        [(0, 1), (1, 1)],
    ]


def test_prompts_wait_when_decodes_suffer_and_run_when_there_are_none() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a"))
    alone = scheduler.schedule(throttle_prefills=True)
    scheduler.add_request(request("b"))

    throttled = scheduler.schedule(throttle_prefills=True)
    free = scheduler.schedule()

    assert (names(alone), names(throttled), names(free)) == ([(0, 5)], [(0, 1)], [(0, 1), (1, 5)])


def test_requests_wait_for_a_row_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_sequences=1)
    worker = FakeWorker(worker_info())
    for name in ("a", "b", "c"):
        scheduler.add_request(request(name, max_tokens=1))

    admitted = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        admitted += [(entry.request_id, entry.row) for entry in plan.admitted]
        if not plan.is_empty:
            scheduler.update(worker.execute(plan))

    assert admitted == [(A, 0), (B, 0), (C, 0)]


def test_a_row_is_released_and_given_out_in_one_plan() -> None:
    scheduler = make_scheduler(max_sequences=1)
    worker = FakeWorker(worker_info())
    scheduler.add_request(request("a", max_tokens=1))
    scheduler.add_request(request("b", max_tokens=1))
    ended = scheduler.update(worker.execute(scheduler.schedule()))

    plan = scheduler.schedule()

    assert ended == (Finished(A, FinishReason.LENGTH),)
    assert plan.released_rows == (0,)
    assert [(entry.request_id, entry.row) for entry in plan.admitted] == [(B, 0)]


def test_a_cancelled_request_gives_its_blocks_back_in_the_next_plan() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add_request(request("a", prompt=range(3, 19)))
    row = scheduler.schedule().admitted[0].row

    scheduler.cancel_request(A)

    assert scheduler.schedule().released_rows == (row,)
    assert scheduler.kv.num_free == 4


def test_cancelling_what_waits_or_is_unknown_leaves_nothing_to_release() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a"))

    scheduler.cancel_request(A)
    scheduler.cancel_request(RequestId("nobody"))

    assert not scheduler.has_work()
    assert scheduler.schedule().is_empty


def test_the_late_result_of_a_cancelled_request_changes_nothing() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(worker_info())
    scheduler.add_request(request("a"))
    result = worker.execute(scheduler.schedule())
    scheduler.cancel_request(A)
    scheduler.add_request(request("b"))
    successor = scheduler.schedule()

    ended = scheduler.update(result)

    assert successor.admitted[0].row == result.rows[0]
    assert ended == ()
    assert scheduler.load().num_running == 1


def test_the_youngest_loses_its_blocks_when_the_oldest_must_grow() -> None:
    # Two prompts of 4 tokens fill 2 of 3 blocks of 4; both want a fifth token, and one block is left.
    scheduler = make_scheduler(num_blocks=3)
    worker = FakeWorker(worker_info(num_blocks=3))
    scheduler.add_request(request("a", prompt=range(3, 7)))
    scheduler.add_request(request("b", prompt=range(10, 14)))
    scheduler.update(worker.execute(scheduler.schedule()))

    plan = scheduler.schedule()

    assert names(plan) == [(0, 1)]
    assert plan.released_rows == (1,)
    assert scheduler.load().num_preemptions == 1


def test_a_preempted_request_keeps_the_token_in_flight_and_returns_only_after_it() -> None:
    scheduler = make_scheduler(num_blocks=3)
    worker = FakeWorker(worker_info(num_blocks=3))
    scheduler.add_request(request("a", prompt=range(3, 7), max_tokens=2))
    scheduler.add_request(request("b", prompt=range(10, 14), max_tokens=3))
    first = worker.execute(scheduler.schedule())
    second = worker.execute(scheduler.schedule())  # preempts b, whose first token is still in flight

    while_in_flight = scheduler.schedule()
    scheduler.update(first)
    scheduler.update(second)
    back = scheduler.schedule()

    assert while_in_flight.is_empty
    assert back.admitted[0].request_id == B
    assert back.admitted[0].token_ids == (10, 11, 12, 13, first.token_ids[1])
    assert back.admitted[0].num_prompt_tokens == 4


def test_the_watermark_holds_for_newcomers_while_others_run() -> None:
    scheduler = make_scheduler(num_blocks=4, watermark_ratio=0.5)
    scheduler.add_request(request("a", prompt=range(3, 7)))
    scheduler.add_request(request("b", prompt=range(3, 11)))

    plan = scheduler.schedule()

    assert [entry.request_id for entry in plan.admitted] == [A]


def test_a_request_that_needs_the_whole_pool_is_admitted_when_it_is_alone() -> None:
    scheduler = make_scheduler(num_blocks=4, watermark_ratio=0.5)
    scheduler.add_request(request("a", prompt=range(3, 18), max_tokens=1))

    assert [entry.request_id for entry in scheduler.schedule().admitted] == [A]


def test_a_failed_row_ends_its_request_alone() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a"))
    scheduler.add_request(request("b"))
    plan = scheduler.schedule()
    result = StepResult(
        seq=plan.seq,
        rows=(Row(1),),
        counts=(1,),
        token_ids=(5,),  # type: ignore[arg-type]  # a literal token id
        finishes=(None,),
        failures=(RowFailure(Row(0), "NAN_LOGITS", "not a number"),),
    )

    ended = scheduler.update(result)

    assert ended == (Finished(A, FinishReason.FAILED),)
    assert scheduler.load().num_running == 1
    assert scheduler.schedule().released_rows == (0,)


def test_a_result_out_of_order_or_about_a_stranger_is_a_broken_invariant() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a"))
    plan = scheduler.schedule()

    with pytest.raises(InvariantBroken, match="result 7 came, expected 1"):
        scheduler.update(StepResult(seq=7))
    with pytest.raises(InvariantBroken, match="tells of row 3"):
        scheduler.update(
            StepResult(seq=plan.seq, rows=(Row(3),), counts=(0,), finishes=(None,)),
        )


def test_the_smaller_of_both_limits_holds() -> None:
    scheduler = RunAheadScheduler(
        SchedulerConfig(max_step_tokens=32, max_sequences=8), worker_info(max_step_tokens=4, max_sequences=2)
    )
    for name in ("a", "b", "c"):
        scheduler.add_request(request(name, prompt=(3,)))

    plan = scheduler.schedule()

    assert names(plan) == [(0, 1), (1, 1)]


def test_limits_that_are_left_out_are_those_of_the_worker() -> None:
    scheduler = RunAheadScheduler(
        SchedulerConfig(), worker_info(max_step_tokens=600, max_sequences=70, num_blocks=1000)
    )
    for number in range(71):
        scheduler.add_request(request(f"r{number}", prompt=range(3, 12)))

    plan = scheduler.schedule()

    assert len(plan.admitted) == 67  # 66 prompts of 9 tokens, and the first 6 of the next one
    assert plan.num_tokens == 600


def test_a_budget_smaller_than_the_number_of_sequences_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"scheduler.max_step_tokens \(4\) must be at least"):
        SchedulerConfig(max_step_tokens=4, max_sequences=8)


def test_a_prompt_has_at_most_its_share_of_a_step_while_others_wait_and_all_of_it_when_it_is_alone() -> None:
    alone, beside = (Bench(make_scheduler(max_chunk_tokens=8)) for _ in range(2))
    alone.add(asking("a", range(3, 23)))
    beside.add(asking("a", range(3, 23)), asking("b", range(30, 50)))

    assert names(alone.plan()) == [(0, 20)]
    assert names(beside.plan()) == [(0, 8), (1, 8)]


def test_at_most_two_prompts_are_half_done() -> None:
    bench = Bench(make_scheduler(max_chunk_tokens=4))
    bench.add(*(asking(name, range(3, 13)) for name in ("a", "b", "c")))

    plans = [bench.plan() for _ in range(4)]

    assert [names(plan) for plan in plans] == [
        [(0, 4), (1, 4)],
        [(0, 4), (1, 4)],
        [(0, 2), (1, 2), (2, 4)],
        [(0, 1), (1, 1), (2, 4)],
    ]


def test_throttling_is_ignored_while_somebody_waits_for_room() -> None:
    # b's prompt is half done beside a, which decodes. Only if c waits for a row is it worth while to hurry.
    spacious, full = (Bench(make_scheduler(max_chunk_tokens=4, max_sequences=2)) for _ in range(2))
    for bench in (spacious, full):
        bench.add(asking("a", (3,), max_tokens=9), asking("b", range(3, 15)))
    full.add(asking("c"))
    for bench in (spacious, full):
        bench.step()

    assert names(spacious.plan(throttle_prefills=True)) == [(0, 1)]
    assert names(full.plan(throttle_prefills=True)) == [(0, 1), (1, 4)]


def test_a_request_is_admitted_when_all_its_known_tokens_have_room_not_just_the_first_chunk() -> None:
    bench = Bench(make_scheduler(num_blocks=8, max_step_tokens=8), FakeWorker(worker_info(num_blocks=8)))
    bench.add(asking("a", range(3, 15), max_tokens=2), asking("b", range(30, 54), max_tokens=2))

    admitted = [[each.request_id for each in bench.step().admitted] for _ in range(4)]

    assert admitted == [[A], [], [], [B]]  # b needs 6 blocks of 8, and a has 4 until its second token has come


def test_a_policy_decides_whether_anybody_is_admitted() -> None:
    class OneAtATime(FirstComePolicy):
        def admit(self, request: Request, running: Sequence[Request]) -> bool:
            return not running

    bench = Bench(RunAheadScheduler(SchedulerConfig(), worker_info(), OneAtATime()))
    bench.add(asking("a", max_tokens=1), asking("b", max_tokens=1))

    assert [[each.request_id for each in bench.step().admitted] for _ in range(2)] == [[A], [B]]


def test_a_policy_is_told_of_each_admission_and_of_each_end_with_the_output_so_far() -> None:
    class Listening(FirstComePolicy):
        def __init__(self) -> None:
            self.told: list[tuple[str, int | None]] = []

        def note_admitted(self, request: Request) -> None:
            self.told.append((request.request_id, None))

        def note_ended(self, request: Request, num_output_tokens: int) -> None:
            self.told.append((request.request_id, num_output_tokens))

    policy = Listening()
    bench = Bench(RunAheadScheduler(SchedulerConfig(max_sequences=2), worker_info(), policy))
    bench.add(asking("a", max_tokens=2), asking("b"), asking("c"))
    bench.step()
    bench.scheduler.cancel_request(B)
    bench.scheduler.cancel_request(C)
    bench.finish_all()

    assert policy.told == [("a", None), ("b", None), ("b", 1), ("c", 0), ("a", 2)]


def test_a_request_that_has_output_goes_on_from_there_and_nothing_comes_twice() -> None:
    bench = Bench(make_scheduler())
    said = expected_output((3, 4, 5), 5)
    bench.add(asking("a", (3, 4, 5), max_tokens=5, output_token_ids=said[:2]))

    bench.finish_all(ahead=2)

    (admission,) = bench.admissions("a")
    assert (admission.token_ids, admission.num_prompt_tokens) == ((3, 4, 5, *said[:2]), 3)
    assert bench.outputs == {A: said[2:]}
    assert bench.ends == {A: FinishReason.LENGTH}


def test_a_prompt_is_looked_up_once_however_often_its_request_is_admitted() -> None:
    # 5 blocks: b has to give way when a grows, and is admitted again.
    bench = Bench(make_scheduler(num_blocks=5), FakeWorker(worker_info(num_blocks=5)))
    bench.add(asking("a", range(3, 11), max_tokens=8), asking("b", range(20, 28), max_tokens=8))
    bench.add(asking("c", range(20, 28), max_tokens=2, output_token_ids=expected_output(range(20, 28), 1)))

    bench.finish_all(ahead=2)

    assert len(bench.admissions("b")) == 2
    assert bench.scheduler.load().num_prefix_tokens == 16  # a's and b's; c was looked up where it was before


def test_load_tells_who_runs_and_waits_with_how_many_tokens() -> None:
    bench = Bench(make_scheduler(max_sequences=1, max_step_tokens=8))
    bench.add(asking("a", range(3, 23)), asking("b", range(3, 10)), asking("c", range(3, 6)))

    bench.step()

    load = bench.scheduler.load()
    assert (load.num_running, load.num_waiting) == (1, 2)
    assert (load.num_waiting_tokens, load.num_uncomputed_tokens) == (10, 12)
    assert (load.num_blocks, load.num_free_blocks) == (64, 59)


def test_a_request_cannot_be_given_twice() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a"))

    with pytest.raises(InvariantBroken, match="request 'a' is scheduled twice"):
        scheduler.add_request(request("a"))


def test_a_heavy_request_is_served_before_the_light_ones_behind_it() -> None:
    """B059: the order is strict. The heavy one starts after the one request that runs; none of 20 small ones passes."""
    info = worker_info(num_blocks=32, max_sequences=32)
    bench = Bench(RunAheadScheduler(SchedulerConfig(), info), FakeWorker(info))
    bench.add(asking("first", range(3, 15), max_tokens=8), asking("heavy", range(3, 119), max_tokens=4))
    bench.add(*(asking(f"small{number}", (3,), max_tokens=2) for number in range(20)))

    bench.finish_all(ahead=2)

    assert list(bench.ends)[:2] == ["first", "heavy"]
    assert len(bench.ends) == 22


def test_a_request_that_has_a_place_is_never_moved_by_what_comes_later() -> None:
    bench = Bench(make_scheduler(max_sequences=1))
    bench.add(*(asking(name, max_tokens=2, arrival=arrival) for name, arrival in (("c", 3), ("a", 1), ("b", 2))))

    bench.finish_all(ahead=2)

    assert list(bench.ends) == [A, B, C]
