"""Which worker gets a request: whom the router is asked about, and what closed intakes change."""

from collections.abc import Sequence

import pytest

from control_plane.engine.facts import Intake
from control_plane.engine.router import Candidate
from plugins.errors import InvariantBroken, NotServing
from plugins.types import FinishReason, Request, RequestId, WorkerId
from tests.unit.control_plane.driving import Cluster, asking

A, W = RequestId("a"), WorkerId("w")


def test_a_lone_candidate_is_chosen_without_asking_the_router() -> None:
    class Strict:
        def choose(self, request: Request, candidates: Sequence[Candidate]) -> int:
            assert len(candidates) == 2
            return 1

    cluster = Cluster(router=Strict())
    cluster.attach("w1")
    cluster.submit(asking("a"))
    cluster.attach("w2")
    cluster.submit(asking("b"))
    cluster.core.move_intake(Intake.PAUSED, [WorkerId("w1")])
    cluster.submit(asking("c"))

    assert (cluster.core.num_live(WorkerId("w1")), cluster.core.num_live(WorkerId("w2"))) == (1, 2)


def test_new_requests_pass_over_workers_that_pause_or_drain_while_another_is_open() -> None:
    cluster = Cluster()
    for name in ("w1", "w2", "w3"):
        cluster.attach(name)
    cluster.core.move_intake(Intake.PAUSED, [WorkerId("w1")])
    cluster.core.move_intake(Intake.DRAINING, [WorkerId("w2")])

    cluster.submit(asking("a"), asking("b"))

    assert cluster.core.num_live(WorkerId("w3")) == 2


def test_with_every_worker_paused_requests_wait_and_with_every_one_draining_they_are_refused() -> None:
    cluster = Cluster()
    cluster.attach("w")
    cluster.core.move_intake(Intake.PAUSED, [W])
    cluster.submit(asking("a"))

    assert cluster.step() == ()
    assert cluster.plans == []
    cluster.core.move_intake(Intake.DRAINING, [W])
    with pytest.raises(NotServing, match="no worker takes requests: 1 drain"):
        cluster.submit(asking("b"))
    cluster.finish_all()
    assert cluster.ends[A].finish is FinishReason.LENGTH


def test_moving_the_intake_of_several_workers_is_all_or_nothing() -> None:
    cluster = Cluster()
    cluster.attach("w")
    cluster.attach("v")
    cluster.core.move_intake(Intake.DRAINING, [WorkerId("v")])

    with pytest.raises(InvariantBroken, match="worker nobody is unknown"):
        cluster.core.move_intake(Intake.PAUSED, [W, WorkerId("nobody")])
    with pytest.raises(InvariantBroken, match="Intake cannot move from DRAINING to PAUSED"):
        cluster.core.move_intake(Intake.PAUSED, [W, WorkerId("v")])

    assert cluster.core.facts(W).intake is Intake.OPEN


def test_a_sample_goes_to_the_worker_of_its_sibling_whatever_the_router_says() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    cluster.attach("w2")
    cluster.submit(asking("a", max_tokens=9), asking("b", sibling_of=A), asking("c", sibling_of=A))

    cluster.finish_all()

    assert cluster.placed() == {"a": "w1", "b": "w1", "c": "w1"}


def test_a_sample_whose_sibling_has_ended_goes_where_the_router_says() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    cluster.attach("w2")
    cluster.submit(asking("a", max_tokens=1))
    cluster.finish_all()

    cluster.submit(asking("b", sibling_of=A))
    cluster.finish_all()

    assert cluster.placed() == {"a": "w1", "b": "w2"}
