"""The books of one worker: whose row is whose, which plans are out, and which results cannot be theirs."""

from collections import deque
from typing import Any

import pytest

from control_plane.engine.facts import Link
from control_plane.engine.lane import Lane
from control_plane.engine.live import Live
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from control_plane.scheduling.synchronous import SynchronousScheduler
from plugins.errors import InvariantBroken, PlanOutOfOrder
from plugins.types import Admission, Chunk, GenerationId, RequestId, Row, StepPlan, StepResult, TokenId, WorkerId
from tests.fakes import FakeWorker, worker_info
from tests.unit.control_plane.driving import asking

G = GenerationId("g")


def make_lane(
    scheduler_cls: type[RunAheadScheduler | SynchronousScheduler] = RunAheadScheduler, num_blocks: int = 64
) -> Lane:
    lane = Lane(WorkerId("w"), target_inter_token_ms=None)
    info = worker_info(num_blocks=num_blocks)
    lane.attach(scheduler_cls(SchedulerConfig(), info), info, G)
    return lane


def add(lane: Lane, name: str, arrival: int = 0, **fields: Any) -> Live:
    live = Live(asking(name, arrival=arrival, **fields), G)
    lane.add(live)
    return live


def test_as_many_plans_are_out_as_the_scheduler_can_make_ahead() -> None:
    ahead, in_turn = make_lane(RunAheadScheduler), make_lane(SynchronousScheduler)
    for lane in (ahead, in_turn):
        add(lane, "a")

    assert [ahead.next_plan() is not None for _ in range(3)] == [True, True, False]
    assert [in_turn.next_plan() is not None for _ in range(2)] == [True, False]
    assert (len(ahead.in_flight), len(in_turn.in_flight)) == (2, 1)


def test_with_nothing_to_do_there_is_no_plan() -> None:
    lane = make_lane()

    assert lane.next_plan() is None
    assert len(lane.in_flight) == 0


def test_a_plan_in_flight_remembers_whose_row_was_whose() -> None:
    lane = make_lane()
    first, second = add(lane, "a"), add(lane, "b")
    plan = lane.next_plan()

    assert plan is not None
    assert lane.in_flight[0].owners == {Row(0): first, Row(1): second}
    assert lane.take(FakeWorker().execute(plan)).owners == {Row(0): first, Row(1): second}


def test_a_result_that_is_not_the_oldest_plans_is_refused_and_changes_nothing() -> None:
    lane = make_lane()
    add(lane, "a")
    lane.next_plan()
    lane.next_plan()

    with pytest.raises(PlanOutOfOrder, match="result 2 came, expected 1"):
        lane.take(StepResult(seq=2))

    assert [plan.seq for plan in lane.in_flight] == [1, 2]


def test_a_result_that_nobody_waits_for_is_refused() -> None:
    with pytest.raises(PlanOutOfOrder, match="result 1 came, expected none"):
        make_lane().take(StepResult(seq=1))


def test_as_many_tokens_may_come_for_a_row_as_the_plan_repeats_its_decodes() -> None:
    class Repeating(RunAheadScheduler):
        def schedule(self, throttle_prefills: bool = False) -> StepPlan:
            admission = Admission(
                row=Row(0),
                request_id=RequestId("a"),
                token_ids=(TokenId(3),),
                num_prompt_tokens=1,
                sampling=asking("a").sampling,
                block_ids=(),
                num_cached_tokens=0,
            )
            return StepPlan(seq=1, admitted=(admission,), chunks=(Chunk(Row(0), 1),), decode_steps=4)

    lane = make_lane(Repeating)
    live = add(lane, "a", prompt_token_ids=(3,))
    lane.next_plan()
    tokens = tuple(TokenId(number) for number in (3, 4, 5, 6))

    plan = lane.take(StepResult(seq=1, rows=(Row(0),), counts=(4,), token_ids=tokens, finishes=(None,)))

    assert (plan.decode_steps, plan.owners) == (4, {Row(0): live})


def test_a_plan_that_releases_a_row_that_nobody_holds_is_a_broken_invariant() -> None:
    class Releasing(RunAheadScheduler):
        def schedule(self, throttle_prefills: bool = False) -> StepPlan:
            return StepPlan(seq=1, released_rows=(Row(3),))

    lane = make_lane(Releasing)
    add(lane, "a")

    with pytest.raises(InvariantBroken, match="plan 1 releases row 3, which holds nothing"):
        lane.next_plan()


def test_a_worker_that_goes_away_leaves_its_requests_oldest_first_and_tells_which_were_in_lost_plans() -> None:
    lane = make_lane()
    young, old = add(lane, "young", arrival=2), add(lane, "old", arrival=1)
    lane.next_plan()
    late = add(lane, "late", arrival=3)

    requests, lost = lane.detach()

    assert requests == [old, young, late]
    assert lost == {old, young}
    assert [each.lane for each in requests] == [None] * 3
    assert (lane.scheduler, lane.live, lane.in_flight) == (None, {}, deque())


def test_requests_that_ended_are_in_no_lost_plan() -> None:
    lane = make_lane()
    ended = add(lane, "a")
    lane.next_plan()
    lane.forget(ended)

    assert lane.detach() == ([], set())


def test_a_request_that_ends_is_tried_no_longer() -> None:
    lane = make_lane()
    suspect = lane.probe = add(lane, "a")

    lane.forget(suspect)

    assert lane.probe is None
    assert suspect.lane is None


def test_a_request_goes_on_elsewhere_with_its_output_and_everything_else_it_had() -> None:
    fields: dict[str, Any] = {
        "tenant": "t",
        "priority": 3,
        "cache_salt": "s",
        "sibling_of": RequestId("b"),
        "arrival": 7,
        "arrival_s": 1.5,
    }
    live = Live(asking("a", **fields), G)
    live.token_ids += [TokenId(9), TokenId(8)]

    assert live.continued == asking("a", **fields, output_token_ids=(9, 8))


def test_a_lane_without_a_scheduler_is_idle_and_says_so_when_it_is_used() -> None:
    lane = Lane(WorkerId("w"), target_inter_token_ms=None)

    assert (lane.load().num_running, lane.load().num_blocks) == (0, 0)
    assert lane.num_cached_tokens(asking("a")) == 0
    assert lane.facts.link is Link.CONNECTING
    with pytest.raises(InvariantBroken, match="worker w has no scheduler"):
        lane.next_plan()


def test_a_worker_may_have_forgotten_a_row_that_a_later_plan_released() -> None:
    """It launches the plan that preempts before it reads the result of the one before."""
    lane = make_lane(num_blocks=3)
    add(lane, "a", arrival=1, prompt=(3, 4, 5), max_tokens=5)
    add(lane, "b", arrival=2, prompt=(6, 7, 8), max_tokens=5)
    plans = [lane.next_plan(), lane.next_plan()]
    tokens = (TokenId(3), TokenId(4))
    first = StepResult(seq=1, rows=(Row(0), Row(1)), counts=(1, 1), token_ids=tokens, finishes=(None, None))
    lane.take(first)
    assert lane.scheduler is not None
    lane.scheduler.update(first)
    plans.append(lane.next_plan())

    taken = lane.take(StepResult(seq=2, rows=(Row(0),), counts=(1,), token_ids=tokens[:1], finishes=(None,)))

    assert [plan.released_rows for plan in plans if plan is not None] == [(), (), (Row(1),)]
    assert taken.seq == 2
