"""The engine core by example: what a command leads to, and that each request ends once."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.core import EngineCore
from control_plane.engine.facts import Intake, Link
from control_plane.engine.outputs import Delivery
from control_plane.engine.router import RoundRobin
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.errors import (
    DuplicateRequest,
    InvariantBroken,
    NotServing,
    PlanOutOfOrder,
    QueueFull,
    ServingError,
    WorkerLost,
)
from plugins.kv_events import BlocksCleared
from plugins.types import (
    Chunk,
    FinishReason,
    GenerationId,
    RequestId,
    Row,
    RowFailure,
    StepPlan,
    StepResult,
    TokenId,
    WorkerId,
)
from tests.fakes import EOS, FakeWorker, expected_output, request, worker_info
from tests.unit.control_plane.driving import Cluster, asking

A, B = RequestId("a"), RequestId("b")
W, G = WorkerId("w"), GenerationId("g")


@dataclass(frozen=True)
class Step:
    """What a step of a core with one worker came to."""

    plans: tuple[StepPlan, ...]
    deliveries: tuple[Delivery, ...]
    lost: tuple[tuple[WorkerId, ServingError], ...]


def make_core(max_waiting: int = 8, max_sequences: int = 8) -> EngineCore:
    config = SchedulerConfig(max_step_tokens=32, max_sequences=max_sequences)
    core = EngineCore(
        lambda worker: RunAheadScheduler(config, worker), AdmissionConfig(max_waiting=max_waiting), RoundRobin()
    )
    core.connect(W)
    core.attach(W, worker_info(), G, now_s=0.0)
    return core


def step(core: EngineCore, results: Iterable[StepResult] = ()) -> Step:
    """One step of a core with one worker."""
    output = core.step([(W, result) for result in results], now_s=0.0)
    return Step(tuple(plan for _, plan in output.plans), output.deliveries, output.lost)


def finish_all(core: EngineCore, worker: FakeWorker) -> list[Delivery]:
    deliveries: list[Delivery] = []
    results: list[StepResult] = []
    while core.has_work():
        output = step(core, results)
        deliveries += output.deliveries
        results = [worker.execute(plan) for plan in output.plans]
    return deliveries


def test_two_plans_go_out_before_the_first_result_and_no_third() -> None:
    core = make_core()
    core.submit(request("a", max_tokens=5), G, now_s=0.0)

    ahead = step(core)
    nothing = step(core)

    assert [plan.seq for plan in ahead.plans] == [1, 2]
    assert nothing.plans == ()
    assert core.num_in_flight(W) == 2


def test_tokens_are_delivered_as_they_come_and_the_last_delivery_says_why_it_ended() -> None:
    core = make_core()
    core.submit(request("a", prompt=(3, 4, 5), max_tokens=3), G, now_s=0.0)

    deliveries = finish_all(core, FakeWorker())

    tokens = expected_output((3, 4, 5), 3)
    assert deliveries == [
        Delivery(A, tokens[:1]),
        Delivery(A, tokens[1:2]),
        Delivery(A, tokens[2:], FinishReason.LENGTH),
    ]


def test_a_stop_found_late_costs_one_row_and_no_wrong_token() -> None:
    core = make_core()
    core.submit(request("a", prompt=(3, 4, 5), max_tokens=9, ignore_eos=False), G, now_s=0.0)

    deliveries = finish_all(core, FakeWorker(eos_after={A: 2}))

    assert [(delivery.token_ids, delivery.finish) for delivery in deliveries] == [
        (expected_output((3, 4, 5), 1), None),
        ((EOS,), FinishReason.STOP),
    ]


def test_the_result_of_a_row_goes_to_who_held_it_in_that_plan() -> None:
    core = make_core(max_sequences=1)
    worker = FakeWorker()
    core.submit(request("a", max_tokens=9), G, now_s=0.0)
    first, second = [worker.execute(plan) for plan in step(core).plans]
    core.cancel(A)
    core.submit(request("b", prompt=(7, 8), max_tokens=1), G, now_s=0.0)
    # Row 0 is b's now, while the second result, computed for a, is still to come.
    third = [worker.execute(plan) for plan in step(core, [first]).plans]

    deliveries = step(core, [second, *third]).deliveries

    assert [delivery.request_id for delivery in deliveries] == [B]
    assert deliveries[0].token_ids == expected_output((7, 8), 1)


def test_a_late_result_never_reaches_the_next_request_of_the_same_name() -> None:
    core = make_core()
    worker = FakeWorker()
    core.submit(request("a", prompt=(3, 4), max_tokens=9), G, now_s=0.0)
    late = [worker.execute(plan) for plan in step(core).plans]
    core.cancel(A)
    step(core)
    core.submit(request("a", prompt=(7, 8), max_tokens=1), G, now_s=0.0)

    output = step(core, late)

    assert output.deliveries == ()
    assert step(core, [worker.execute(plan) for plan in output.plans]).deliveries == (
        Delivery(A, expected_output((7, 8), 1), FinishReason.LENGTH),
    )


def test_a_cancelled_request_ends_at_once_and_again_is_nothing() -> None:
    core = make_core()
    core.submit(request("a"), G, now_s=0.0)

    core.cancel(A)
    core.cancel(A)
    deliveries = step(core).deliveries

    assert [(delivery.request_id, delivery.finish) for delivery in deliveries] == [(A, FinishReason.CANCELLED)]
    assert str(deliveries[0].error) == "the request was cancelled"


def test_a_deadline_ends_with_its_own_reason_and_error() -> None:
    core = make_core()
    core.submit(request("a"), G, now_s=0.0)

    core.cancel(A, FinishReason.DEADLINE)
    (delivery,) = step(core).deliveries

    assert delivery.finish is FinishReason.DEADLINE
    assert str(delivery.error) == "the deadline passed before the output was complete"


def test_a_row_that_fails_ends_its_request_with_the_workers_reason() -> None:
    core = make_core()
    core.submit(request("a"), G, now_s=0.0)
    (first, _) = step(core).plans
    row = first.chunks[0].row

    failure = RowFailure(row, "NAN_LOGITS", "logits of row 0 are not numbers")
    (delivery,) = step(core, [StepResult(seq=1, failures=(failure,))]).deliveries

    assert delivery.finish is FinishReason.FAILED
    assert delivery.error is not None
    assert (delivery.error.reason, str(delivery.error)) == ("NAN_LOGITS", "logits of row 0 are not numbers")


def test_a_request_of_a_lost_worker_waits_and_goes_on_with_the_next_one() -> None:
    core = make_core()
    core.submit(request("a", prompt=(3, 4, 5), max_tokens=4), G, now_s=0.0)
    worker = FakeWorker()
    first, late = [worker.execute(plan) for plan in step(core).plans]
    begun = step(core, [first]).deliveries

    core.detach(W, WorkerLost("it was killed"), now_s=1.0)
    meanwhile = step(core, [late])
    core.connect(W)
    core.attach(W, worker_info(), G, now_s=2.0)
    rest = finish_all(core, FakeWorker())

    assert (meanwhile.plans, meanwhile.deliveries) == ((), ())
    tokens = [token for delivery in (*begun, *rest) for token in delivery.token_ids]
    assert tuple(tokens) == expected_output((3, 4, 5), 4)
    assert rest[-1].finish is FinishReason.LENGTH


def test_what_cannot_be_taken_is_refused_with_the_reason() -> None:
    core = make_core(max_waiting=2)
    core.submit(request("a"), G, now_s=0.0)

    with pytest.raises(DuplicateRequest, match="'a' is already in flight"):
        core.submit(request("a"), G, now_s=0.0)
    core.submit(request("b"), G, now_s=0.0)
    with pytest.raises(QueueFull, match="2 requests are waiting; at most 2 may"):
        core.submit(request("c"), G, now_s=0.0)
    core.move_intake(Intake.DRAINING)
    with pytest.raises(NotServing, match="draining"):
        core.submit(request("d"), G, now_s=0.0)


def test_without_a_worker_nothing_is_taken() -> None:
    core = EngineCore(lambda worker: RunAheadScheduler(SchedulerConfig(), worker), AdmissionConfig(), RoundRobin())

    with pytest.raises(NotServing, match="no worker that takes requests is connected"):
        core.submit(request("a"), G, now_s=0.0)


def test_a_paused_engine_plans_nothing_and_goes_on_when_opened() -> None:
    core = make_core()
    core.submit(request("a", max_tokens=1), G, now_s=0.0)
    core.move_intake(Intake.PAUSED)

    paused = step(core)
    core.move_intake(Intake.OPEN)
    opened = step(core)

    assert paused.plans == ()
    assert [plan.seq for plan in opened.plans] == [1]


def test_a_worker_whose_result_skips_a_plan_is_lost() -> None:
    core = make_core()
    core.submit(request("a"), G, now_s=0.0)
    step(core)

    ((worker_id, error),) = step(core, [StepResult(seq=2)]).lost

    assert (worker_id, type(error), str(error)) == (W, PlanOutOfOrder, "result 2 came, expected 1")
    assert core.facts(W).link is Link.LOST


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (StepResult(seq=1, rows=(Row(5),), counts=(0,), finishes=(None,)), "tells of rows [5], which its plan"),
        (StepResult(seq=1, failures=(RowFailure(Row(5), "NAN", "not a number"),)), "tells of rows [5], which its plan"),
        (
            StepResult(seq=1, rows=(Row(0),) * 2, counts=(0, 0), finishes=(None,) * 2),
            "tells of rows twice or out of order",
        ),
        (
            StepResult(seq=1, rows=(Row(0),), counts=(2,), token_ids=(TokenId(3),) * 2, finishes=(None,)),
            "has 2 tokens for one row",
        ),
        (
            StepResult(seq=1, rows=(Row(0),), counts=(1,), token_ids=(TokenId(1000),), finishes=(None,)),
            "has a token outside [0, 1000)",
        ),
        (StepResult(seq=1), "has no token for row 0, whose chunk samples one"),
        (
            StepResult(seq=1, rows=(Row(0),), counts=(0,), finishes=(FinishReason.LENGTH,)),
            "has no token for row 0, whose chunk samples one",
        ),
    ],
)
def test_a_worker_whose_result_cannot_be_of_its_plan_is_lost_and_its_requests_are_not(
    result: StepResult, why: str
) -> None:
    core = make_core()
    core.submit(request("a", prompt=(3, 4), max_tokens=2), G, now_s=0.0)
    step(core)

    ((worker_id, error),) = step(core, [result]).lost
    core.connect(W)
    core.attach(W, worker_info(), G, now_s=0.0)
    deliveries = finish_all(core, FakeWorker())

    assert worker_id == W
    assert why in str(error)
    assert [token for each in deliveries for token in each.token_ids] == list(expected_output((3, 4), 2))


def test_a_worker_that_samples_in_the_middle_of_a_prompt_is_lost() -> None:
    core = make_core()
    core.submit(request("a", prompt=range(3, 43), max_tokens=2), G, now_s=0.0)
    step(core)

    ((_, error),) = step(
        core, [StepResult(seq=1, rows=(Row(0),), counts=(1,), token_ids=(TokenId(3),), finishes=(None,))]
    ).lost

    assert str(error) == "result 1 has a token for row 0, whose chunk samples none"


def test_a_scheduler_that_plans_for_nobody_has_broken_an_invariant() -> None:
    class Confused(RunAheadScheduler):
        def schedule(self, throttle_prefills: bool = False) -> StepPlan:
            return StepPlan(seq=1, chunks=(Chunk(Row(5), 1),))

    core = EngineCore(lambda worker: Confused(SchedulerConfig(), worker), AdmissionConfig(), RoundRobin())
    core.connect(W)
    core.attach(W, worker_info(), G, now_s=0.0)
    core.submit(request("a"), G, now_s=0.0)

    with pytest.raises(InvariantBroken, match="plan 1 names 5"):
        step(core)


def test_what_a_scheduler_raises_reaches_the_caller_as_it_was() -> None:
    class Broken(RunAheadScheduler):
        def schedule(self, throttle_prefills: bool = False):  # type: ignore[no-untyped-def]  # only raises
            raise Exception("raised by a scheduler")

    core = EngineCore(lambda worker: Broken(SchedulerConfig(), worker), AdmissionConfig(), RoundRobin())
    core.connect(W)
    core.attach(W, worker_info(), G, now_s=0.0)
    core.submit(request("a"), G, now_s=0.0)

    with pytest.raises(Exception, match=r"^raised by a scheduler$"):
        step(core)


def test_a_worker_that_will_be_detached_gets_no_plan_that_its_requests_could_be_blamed_for() -> None:
    core = make_core()
    core.submit(request("a"), G, now_s=0.0)

    core.halt(W)

    assert step(core).plans == ()
    core.detach(W, WorkerLost("it broke"), now_s=0.0)
    core.connect(W)
    core.attach(W, worker_info(), G, now_s=0.0)
    assert [admission.request_id for admission in step(core).plans[0].admitted] == ["a"]


def test_one_worker_that_talks_nonsense_is_lost_and_the_other_goes_on() -> None:
    cluster = Cluster()
    cluster.attach("w")
    cluster.attach("v")
    cluster.submit(asking("a", (3, 4)), asking("b", (5, 6)))
    cluster.step()

    cluster.on_their_way[W] = [StepResult(seq=9)]
    cluster.finish_all()

    assert [(worker_id, str(error)) for worker_id, error in cluster.lost] == [(W, "result 9 came, expected 1")]
    assert cluster.outputs == {A: expected_output((3, 4), 4), B: expected_output((5, 6), 4)}


def test_the_load_of_all_is_the_sum_and_who_has_no_worker_waits() -> None:
    cluster = Cluster(config=SchedulerConfig(max_sequences=1))
    cluster.attach("w")
    cluster.attach("v", info=worker_info(num_blocks=10))
    cluster.attach("u", "other")
    cluster.submit(asking("a"), asking("b"), asking("c"))
    cluster.submit(asking("d"), generation="other")
    cluster.step()
    cluster.kill("u")

    load = cluster.core.load()

    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (2, 2, 5)
    assert (load.num_blocks, load.num_free_blocks) == (74, 70)
    assert cluster.core.worker_load(WorkerId("u")).num_blocks == 0


def test_delivered_ends_tell_how_many_tokens_of_the_prompt_were_cached_when_it_started() -> None:
    cluster = Cluster()
    cluster.attach("w")
    cluster.submit(asking("a", range(3, 23)))
    cluster.finish_all()

    cluster.submit(asking("b", range(3, 23)))
    cluster.finish_all()

    assert (cluster.ends[A].num_cached_tokens, cluster.ends[B].num_cached_tokens) == (0, 16)


def test_a_reset_of_one_workers_cache_leaves_the_others_alone_and_is_told_to_who_listens() -> None:
    cluster = Cluster()
    cluster.core.record_kv_events(True)
    cluster.attach("w")
    cluster.attach("v")
    cluster.submit(asking("a", range(3, 23)), asking("b", range(3, 23)))
    cluster.finish_all()

    cluster.core.reset_prefix_cache([W])

    assert cluster.core.worker_load(W).num_cached_blocks == 0
    assert cluster.core.worker_load(WorkerId("v")).num_cached_blocks == 5
    assert cluster.core.step((), 0.0).kv_events == ((W, BlocksCleared()),)
    cluster.kill("v")
    assert cluster.core.step((), 0.0).kv_events == ((WorkerId("v"), BlocksCleared()),)
