"""The engine core by example: what a command leads to, and that each request ends once."""

import pytest

from control_plane.engine.core import Delivery, EngineCore
from control_plane.engine.facts import Intake
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.fcfs import FCFSScheduler
from plugins.errors import DuplicateRequest, InvariantBroken, NotServing, PlanOutOfOrder, QueueFull, WorkerLost
from plugins.types import Chunk, FinishReason, RequestId, Row, RowFailure, StepPlan, StepResult
from tests.fakes import EOS, FakeWorker, expected_output, request, worker_info

A, B = RequestId("a"), RequestId("b")


def make_core(max_waiting: int = 8, max_sequences: int = 8) -> EngineCore:
    config = SchedulerConfig(max_step_tokens=32, max_sequences=max_sequences)
    core = EngineCore(lambda worker: FCFSScheduler(config, worker), max_waiting)
    core.attach(worker_info())
    return core


def finish_all(core: EngineCore, worker: FakeWorker) -> list[Delivery]:
    deliveries: list[Delivery] = []
    results: list[StepResult] = []
    while core.has_work():
        output = core.step(results)
        deliveries += output.deliveries
        results = [worker.execute(plan) for plan in output.plans]
    return deliveries


def test_two_plans_go_out_before_the_first_result_and_no_third() -> None:
    core = make_core()
    core.submit(request("a", max_tokens=5))

    ahead = core.step()
    nothing = core.step()

    assert [plan.seq for plan in ahead.plans] == [1, 2]
    assert nothing.plans == ()
    assert core.num_in_flight == 2


def test_tokens_are_delivered_as_they_come_and_the_last_delivery_says_why_it_ended() -> None:
    core = make_core()
    core.submit(request("a", prompt=(3, 4, 5), max_tokens=3))

    deliveries = finish_all(core, FakeWorker())

    tokens = expected_output((3, 4, 5), 3)
    assert deliveries == [
        Delivery(A, tokens[:1]),
        Delivery(A, tokens[1:2]),
        Delivery(A, tokens[2:], FinishReason.LENGTH),
    ]


def test_a_stop_found_late_costs_one_row_and_no_wrong_token() -> None:
    core = make_core()
    core.submit(request("a", prompt=(3, 4, 5), max_tokens=9, ignore_eos=False))

    deliveries = finish_all(core, FakeWorker(eos_after={A: 2}))

    assert [(delivery.token_ids, delivery.finish) for delivery in deliveries] == [
        (expected_output((3, 4, 5), 1), None),
        ((EOS,), FinishReason.STOP),
    ]


def test_the_result_of_a_row_goes_to_who_held_it_in_that_plan() -> None:
    core = make_core(max_sequences=1)
    worker = FakeWorker()
    core.submit(request("a", max_tokens=9))
    first, second = [worker.execute(plan) for plan in core.step().plans]
    core.cancel(A)
    core.submit(request("b", prompt=(7, 8), max_tokens=1))
    # Row 0 is b's now, while the second result, computed for a, is still to come.
    third = [worker.execute(plan) for plan in core.step([first]).plans]

    deliveries = core.step([second, *third]).deliveries

    assert [delivery.request_id for delivery in deliveries] == [B]
    assert deliveries[0].token_ids == expected_output((7, 8), 1)


def test_a_late_result_never_reaches_the_next_request_of_the_same_name() -> None:
    core = make_core()
    worker = FakeWorker()
    core.submit(request("a", prompt=(3, 4), max_tokens=9))
    late = [worker.execute(plan) for plan in core.step().plans]
    core.cancel(A)
    core.step()
    core.submit(request("a", prompt=(7, 8), max_tokens=1))

    output = core.step(late)

    assert output.deliveries == ()
    assert core.step([worker.execute(plan) for plan in output.plans]).deliveries == (
        Delivery(A, expected_output((7, 8), 1), FinishReason.LENGTH),
    )


def test_a_cancelled_request_ends_at_once_and_again_is_nothing() -> None:
    core = make_core()
    core.submit(request("a"))

    core.cancel(A)
    core.cancel(A)
    deliveries = core.step().deliveries

    assert [(delivery.request_id, delivery.finish) for delivery in deliveries] == [(A, FinishReason.CANCELLED)]
    assert str(deliveries[0].error) == "the request was cancelled"


def test_a_deadline_ends_with_its_own_reason_and_error() -> None:
    core = make_core()
    core.submit(request("a"))

    core.cancel(A, FinishReason.DEADLINE)
    (delivery,) = core.step().deliveries

    assert delivery.finish is FinishReason.DEADLINE
    assert str(delivery.error) == "the deadline passed before the output was complete"


def test_a_row_that_fails_ends_its_request_with_the_workers_reason() -> None:
    core = make_core()
    core.submit(request("a"))
    (first, _) = core.step().plans
    row = first.chunks[0].row

    (delivery,) = core.step(
        [StepResult(seq=1, failures=(RowFailure(row, "NAN_LOGITS", "logits of row 0 are not numbers"),))]
    ).deliveries

    assert delivery.finish is FinishReason.FAILED
    assert delivery.error is not None
    assert (delivery.error.reason, str(delivery.error)) == ("NAN_LOGITS", "logits of row 0 are not numbers")


def test_a_lost_worker_ends_all_its_requests_and_a_new_one_starts_clean() -> None:
    core = make_core()
    worker = FakeWorker()
    core.submit(request("a"))
    late = [worker.execute(plan) for plan in core.step().plans]

    core.detach(WorkerLost("it was killed"))
    ended = core.step(late).deliveries
    core.connect()
    core.attach(worker_info())
    core.submit(request("a", max_tokens=1))

    assert [(delivery.request_id, delivery.finish) for delivery in ended] == [(A, FinishReason.FAILED)]
    assert str(ended[0].error) == "the worker went away: it was killed"
    assert [delivery.finish for delivery in finish_all(core, FakeWorker())] == [FinishReason.LENGTH]


def test_without_its_worker_a_core_has_nothing_in_flight_and_nothing_to_do() -> None:
    core = make_core()
    core.submit(request("a"))
    core.step()

    core.detach(WorkerLost("it was killed"))
    core.step()

    assert core.num_in_flight == 0
    assert not core.has_work()


def test_what_cannot_be_taken_is_refused_with_the_reason() -> None:
    core = make_core(max_waiting=2)
    core.submit(request("a"))

    with pytest.raises(DuplicateRequest, match="'a' is already in flight"):
        core.submit(request("a"))
    core.submit(request("b"))
    with pytest.raises(QueueFull, match="2 requests are waiting; at most 2 may"):
        core.submit(request("c"))
    core.facts.move_intake(Intake.DRAINING)
    with pytest.raises(NotServing, match="draining"):
        core.submit(request("d"))


def test_without_a_worker_nothing_is_taken() -> None:
    core = EngineCore(lambda worker: FCFSScheduler(SchedulerConfig(), worker), max_waiting=8)

    with pytest.raises(NotServing, match="no worker is connected"):
        core.submit(request("a"))


def test_a_paused_engine_plans_nothing_and_goes_on_when_opened() -> None:
    core = make_core()
    core.submit(request("a", max_tokens=1))
    core.facts.move_intake(Intake.PAUSED)

    paused = core.step()
    core.facts.move_intake(Intake.OPEN)
    opened = core.step()

    assert paused.plans == ()
    assert [plan.seq for plan in opened.plans] == [1]


def test_a_result_that_skips_a_plan_is_out_of_order() -> None:
    core = make_core()
    core.submit(request("a"))
    core.step()

    with pytest.raises(PlanOutOfOrder, match="result 2 came, expected 1"):
        core.step([StepResult(seq=2)])


@pytest.mark.parametrize(
    "result",
    [
        StepResult(seq=1, rows=(Row(5),), counts=(0,), finishes=(None,)),
        StepResult(seq=1, failures=(RowFailure(Row(5), "NAN_LOGITS", "not a number"),)),
    ],
)
def test_a_result_about_a_row_that_its_plan_does_not_name_is_out_of_order(result: StepResult) -> None:
    core = make_core()
    core.submit(request("a"))
    core.step()

    with pytest.raises(PlanOutOfOrder, match=r"result 1 tells of rows \[5\], which its plan does not name"):
        core.step([result])


def test_a_scheduler_that_plans_for_nobody_has_broken_an_invariant() -> None:
    class Confused(FCFSScheduler):
        def schedule(self, throttle_prefills: bool = False) -> StepPlan:
            return StepPlan(seq=1, chunks=(Chunk(Row(5), 1),))

    core = EngineCore(lambda worker: Confused(SchedulerConfig(), worker), max_waiting=8)
    core.attach(worker_info())
    core.submit(request("a"))

    with pytest.raises(InvariantBroken, match="plan 1 names 5"):
        core.step()


def test_what_a_scheduler_raises_reaches_the_caller_as_it_was() -> None:
    class Broken(FCFSScheduler):
        def schedule(self, throttle_prefills: bool = False):  # type: ignore[no-untyped-def]  # only raises
            raise Exception("raised by a scheduler")

    core = EngineCore(lambda worker: Broken(SchedulerConfig(), worker), max_waiting=8)
    core.attach(worker_info())
    core.submit(request("a"))

    with pytest.raises(Exception, match=r"^raised by a scheduler$"):
        core.step()
