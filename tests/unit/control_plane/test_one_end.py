"""However a request ends, it ends once, and leaves nothing behind: cancelled, expired, failed or complete."""

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.scheduling.config import SchedulerConfig
from plugins.errors import DuplicateRequest, WorkerLeaving
from plugins.types import FinishReason, RequestId, WorkerId
from tests.fakes import expected_output
from tests.unit.control_plane.driving import Cluster, asking

A, B = RequestId("a"), RequestId("b")
W = WorkerId("w")


def test_a_cancelled_request_is_out_of_the_way_within_two_steps() -> None:
    """B040: nobody runs, and every block is free."""
    cluster = Cluster()
    cluster.attach("w")
    cluster.submit(asking("a", max_tokens=200))
    for _ in range(5):
        cluster.step_all()

    cluster.core.cancel(A)
    cluster.step_all()
    cluster.step_all()

    load = cluster.core.load()
    assert (load.num_running, load.num_free_blocks) == (0, 64)
    assert not cluster.core.has_work()


def test_cancelling_around_the_last_token_ends_each_request_exactly_once() -> None:
    """B043: 500 requests of 3 tokens, each cancelled before, in or after the step that brings its last one."""
    cluster = Cluster(limits=AdmissionConfig(max_waiting=500))
    cluster.attach("w")
    cluster.submit(*(asking(f"r{number}", (3 + number % 50,), max_tokens=3) for number in range(500)))
    turn = 0
    while cluster.core.has_work():
        turn += 1
        almost = [name for name, tokens in cluster.outputs.items() if len(tokens) >= 2]
        for name in almost[turn % 3 :: 3]:
            cluster.core.cancel(name)
        cluster.core.cancel(RequestId(""))
        cluster.core.cancel(RequestId("r"))
        cluster.step_all()

    finishes = [end.finish for end in cluster.ends.values()]
    assert len(finishes) == 500
    assert set(finishes) == {FinishReason.LENGTH, FinishReason.CANCELLED}
    for name, end in cluster.ends.items():
        assert (len(cluster.outputs[name]) == 3) == (end.finish is FinishReason.LENGTH)
    assert cluster.core.load().num_free_blocks == 64


def test_blocks_return_to_the_baseline_after_failures_of_every_kind() -> None:
    """B045: after each 100 of 1,000 requests that fail, are cancelled, pass their deadline or lose their worker."""
    cluster = Cluster(limits=AdmissionConfig(max_waiting=1000))
    cluster.attach("w")
    free = []
    for hundred in range(10):
        names = [RequestId(f"{hundred}.{number}") for number in range(100)]
        cluster.submit(*(asking(name, range(3, 3 + len(name) * 4), max_tokens=20) for name in names))
        cluster.workers[W].failing = set(names[::4])
        for turn, name in enumerate(names):
            if turn % 4 == 1:
                cluster.core.cancel(name, FinishReason.DEADLINE if turn % 8 == 1 else FinishReason.CANCELLED)
            if turn == 50:
                cluster.kill("w", WorkerLeaving("it is restarted"))
                cluster.attach("w")
            cluster.step_all()
        cluster.finish_all()
        load = cluster.core.load()
        free.append((load.num_free_blocks, load.num_running, load.num_waiting, cluster.core.num_waiting))

    assert free == [(64, 0, 0, 0)] * 10
    reasons = {end.error.reason for end in cluster.ends.values() if end.error is not None}
    assert reasons == {"ROW_FAILED", "REQUEST_CANCELLED", "DEADLINE_EXCEEDED"}
    assert len(cluster.ends) == 1000


def test_a_request_that_is_cancelled_in_the_queue_never_reaches_the_worker() -> None:
    """B049: A runs, B to K wait, B to J are cancelled."""
    cluster = Cluster(config=SchedulerConfig(max_sequences=1))
    cluster.attach("w")
    cluster.submit(*(asking(name, max_tokens=200) for name in "ABCDEFGHIJK"))
    cluster.step()

    for name in "BCDEFGHIJ":
        cluster.core.cancel(RequestId(name))
    waiting = (cluster.core.num_waiting, cluster.core.load().num_waiting)
    cluster.finish_all()

    assert waiting == (1, 1)
    assert list(cluster.placed()) == ["A", "K"]


def test_a_name_is_free_again_once_its_end_was_delivered_and_not_before() -> None:
    """B051: while it lives the second is refused and the first untouched; ended in the same step; afterwards."""
    cluster = Cluster()
    cluster.attach("w")
    cluster.submit(asking("a", (3, 4)))
    for _ in range(2):
        with pytest.raises(DuplicateRequest):
            cluster.submit(asking("a", (9, 9)))
        cluster.step_all()
    cluster.core.cancel(A)
    with pytest.raises(DuplicateRequest):
        cluster.submit(asking("a", (9, 9)))
    first = cluster.outputs[A]
    cluster.step()
    cluster.ends.clear()
    cluster.outputs.clear()

    cluster.submit(asking("a", (9, 9)))
    cluster.finish_all()

    assert first == expected_output((3, 4), len(first))
    assert cluster.outputs[A] == expected_output((9, 9), 4)


def test_a_request_that_never_had_a_row_may_expire_and_one_that_had_does_not() -> None:
    cluster = Cluster(config=SchedulerConfig(max_sequences=1))
    cluster.attach("w")
    cluster.submit(asking("a"), asking("b"))
    cluster.step()

    for name in (A, B):
        cluster.core.expire_waiting(name, 300.0)
    cluster.finish_all()

    assert cluster.ends[A].finish is FinishReason.LENGTH
    told = "the request waited 300 s for a row (its max_queue_time_s, or admission.max_queue_s); retry in 1 s"
    assert str(cluster.ends[B].error) == told
