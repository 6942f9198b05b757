"""The outputs of one request: taken together, cancelled together, and each with an end of its own."""

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.scheduling.config import SchedulerConfig
from plugins.errors import DuplicateRequest, QueueFull, TenantQuotaExceeded, WorkerLeaving, WorkerLost
from plugins.types import FinishReason, RequestId, WorkerId
from tests.fakes import expected_output
from tests.unit.control_plane.driving import Cluster, StopsAt, asking, outputs

A, A1, A2, A3 = map(RequestId, ("a", "a·1", "a·2", "a·3"))
B = RequestId("b")
W = WorkerId("w")
PROMPT = range(3, 13)


def cluster_with(*names: str, limits: AdmissionConfig | None = None, max_sequences: int = 8) -> Cluster:
    config = SchedulerConfig(prefix_hash_key="a key for these tests", max_sequences=max_sequences)
    cluster = Cluster(limits=limits, config=config)
    for name in names:
        cluster.attach(name)
        cluster.workers[WorkerId(name)].siblings = {A1, A2, A3}
    return cluster


def test_all_outputs_run_on_one_worker_and_compute_their_prompt_once() -> None:
    cluster = cluster_with("w", "v")

    cluster.submit_together(*outputs("a", 4, PROMPT, 6))
    cluster.finish_all()

    assert set(cluster.placed().values()) == {"w"}
    assert cluster.outputs == dict.fromkeys((A, A1, A2, A3), expected_output(PROMPT, 6))
    assert [cluster.ends[name].num_cached_tokens for name in (A, A1, A2, A3)] == [0, 9, 9, 9]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 10])
def test_a_cancel_of_the_first_one_ends_all_of_them(num_steps: int) -> None:
    """B046: while they wait, while the first one computes the prompt for all, and after ten tokens."""
    cluster = cluster_with("w")
    cluster.submit_together(*outputs("a", 4, PROMPT, 50))
    cluster.submit(asking("b", max_tokens=100))
    for _ in range(num_steps):
        cluster.step_all()

    cluster.core.cancel(A)
    cluster.step_all()
    cluster.step_all()
    running = cluster.core.num_live()
    cluster.finish_all()

    assert {name: end.finish for name, end in cluster.ends.items()} == {
        **dict.fromkeys((A, A1, A2, A3), FinishReason.CANCELLED),
        B: FinishReason.LENGTH,
    }
    assert running == 1
    assert cluster.core.load().num_free_blocks == 64


def test_a_cancel_of_one_output_leaves_the_others_alone() -> None:
    cluster = cluster_with("w")
    cluster.submit_together(*outputs("a", 3, PROMPT, 9))
    cluster.step_all()

    cluster.core.cancel(A1)
    cluster.finish_all()

    finishes = [cluster.ends[name].finish for name in (A, A1, A2)]
    assert finishes == [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.LENGTH]


def test_the_name_of_the_first_one_stands_for_the_others_when_it_has_ended() -> None:
    cluster = cluster_with("w")
    cluster.submit_together(*outputs("a", 3, PROMPT, 50), watchers=[StopsAt(1), None, None])
    for _ in range(6):
        cluster.step_all()

    with pytest.raises(DuplicateRequest):
        cluster.submit(asking("a"))
    cluster.core.cancel(A)
    cluster.finish_all()

    finishes = [cluster.ends[name].finish for name in (A, A1, A2)]
    assert finishes == [FinishReason.STOP, FinishReason.CANCELLED, FinishReason.CANCELLED]
    cluster.ends.clear()
    cluster.submit(asking("a", max_tokens=1))
    cluster.finish_all()
    assert cluster.ends[A].finish is FinishReason.LENGTH


def test_a_sample_that_came_later_is_not_one_of_them() -> None:
    cluster = cluster_with("w")
    cluster.submit_together(*outputs("a", 2, PROMPT, 9))
    cluster.submit(asking("b", PROMPT, max_tokens=9, sibling_of=A))

    cluster.core.cancel(A)
    cluster.finish_all()

    assert cluster.ends[B].finish is FinishReason.LENGTH


def test_the_others_run_when_the_first_one_fails_or_is_out_of_the_way_at_once() -> None:
    cluster = cluster_with("w")
    cluster.workers[W].failing.add(A)
    cluster.submit_together(*outputs("a", 3, PROMPT, 5))

    cluster.finish_all()

    assert [cluster.ends[name].finish for name in (A, A1, A2)] == [
        FinishReason.FAILED,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
    assert cluster.outputs[A2] == expected_output(PROMPT, 5)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_they_all_go_on_when_their_worker_leaves(num_steps: int) -> None:
    cluster = cluster_with("w", "v")
    cluster.submit_together(*outputs("a", 3, PROMPT, 7))
    for _ in range(num_steps):
        cluster.step_all()

    cluster.kill("w", WorkerLeaving("it is restarted"))
    cluster.finish_all()

    assert set(cluster.placed().values()) >= {"v"}
    assert cluster.outputs == dict.fromkeys((A, A1, A2), expected_output(PROMPT, 7))


def test_they_are_tried_one_at_a_time_when_their_worker_dies() -> None:
    cluster = cluster_with("w", "v")
    cluster.submit_together(*outputs("a", 3, PROMPT, 7))
    for _ in range(2):
        cluster.step_all()

    cluster.kill("w", WorkerLost("it was killed"))
    cluster.finish_all()

    assert cluster.outputs == dict.fromkeys((A, A1, A2), expected_output(PROMPT, 7))
    assert {end.finish for end in cluster.ends.values()} == {FinishReason.LENGTH}


def test_they_are_taken_all_or_none_where_the_queue_has_room_for_some() -> None:
    cluster = cluster_with("w", limits=AdmissionConfig(max_waiting=4), max_sequences=1)
    cluster.submit(asking("b", max_tokens=9))
    cluster.step_all()
    cluster.submit(asking("c"), asking("d"))

    with pytest.raises(QueueFull, match="2 requests are waiting; at most 4 may"):
        cluster.submit_together(*outputs("a", 3))
    waiting = cluster.core.num_waiting
    cluster.finish_all()

    assert waiting == 2
    assert set(cluster.ends) == {"b", "c", "d"}


def test_each_of_them_counts_for_its_tenant() -> None:
    cluster = cluster_with("w", limits=AdmissionConfig(max_tenant_requests=3))
    cluster.submit(asking("b"))

    with pytest.raises(TenantQuotaExceeded, match="has 1 request at hand; at most 3 may be"):
        cluster.submit_together(*outputs("a", 3))
    cluster.submit_together(*outputs("a", 2))

    assert cluster.core.num_live() == 3


def test_they_are_refused_together_if_one_of_their_names_is_taken() -> None:
    cluster = cluster_with("w")
    cluster.submit(asking("a·1"))

    with pytest.raises(DuplicateRequest, match="'a·1'"):
        cluster.submit_together(*outputs("a", 2))
    with pytest.raises(DuplicateRequest, match="'x'"):
        cluster.submit_together(asking("x"), asking("x"))

    assert cluster.core.num_live() == 1
