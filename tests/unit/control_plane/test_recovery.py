"""What becomes of requests whose worker goes away: who goes on at once, who is tried, who waits, who fails."""

import pytest

from control_plane.engine.facts import Intake, Link
from control_plane.engine.live import Live
from control_plane.engine.recovery import Recovery
from control_plane.scheduling.config import SchedulerConfig
from plugins.errors import InvariantBroken, NotServing, WorkerLeaving, WorkerTaken
from plugins.types import FinishReason, GenerationId, RequestId, WorkerId
from tests.fakes import expected_output
from tests.unit.control_plane.driving import Cluster, asking

ONE_ROW = SchedulerConfig(max_sequences=1)
W1, W2, W3 = (WorkerId(name) for name in ("w1", "w2", "w3"))
PROMPTS = {"a": (3, 4), "b": (5, 6, 7), "c": (8,), "d": (9, 10)}


def submit(cluster: Cluster, names: str, max_tokens: int = 4, generation: str = "g") -> None:
    cluster.submit(*(asking(name, PROMPTS[name], max_tokens) for name in names), generation=generation)


def ends(cluster: Cluster) -> dict[str, str]:
    """Why each request ended."""
    return {
        request_id: delivery.error.reason if delivery.error else FinishReason(delivery.finish or 0).name
        for request_id, delivery in cluster.ends.items()
    }


def said_right(cluster: Cluster, names: str, max_tokens: int = 4) -> bool:
    return all(cluster.outputs[RequestId(name)] == expected_output(PROMPTS[name], max_tokens) for name in names)


def test_those_in_no_lost_plan_go_on_at_once_and_the_others_are_tried_beside_them() -> None:
    cluster = Cluster(config=ONE_ROW)
    cluster.attach("w1")
    submit(cluster, "abc")
    cluster.step()  # a has the row
    cluster.attach("w2")

    cluster.kill("w1")

    assert cluster.core.num_live(W2) == 2
    cluster.finish_all()
    assert ends(cluster) == {"a": "LENGTH", "b": "LENGTH", "c": "LENGTH"}
    assert said_right(cluster, "abc")


def test_requests_keep_their_order_on_the_next_worker() -> None:
    cluster = Cluster(config=ONE_ROW)
    cluster.attach("w1")
    submit(cluster, "dbca")
    cluster.attach("w2")

    cluster.kill("w1")
    cluster.finish_all()

    assert list(cluster.ends) == ["d", "b", "c", "a"]


def test_suspects_are_tried_one_at_a_time_oldest_first_and_the_first_token_clears_one() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "abc", max_tokens=20)
    cluster.step()
    cluster.kill("w1")
    cluster.attach("w2")

    tried = []
    for _ in range(4):
        cluster.step("w2")
        tried.append(cluster.core.num_live(W2))

    assert tried == [1, 2, 3, 3]
    admitted = [each.request_id for worker_id, plan in cluster.plans if worker_id == W2 for each in plan.admitted]
    assert admitted == ["a", "b", "c"]
    cluster.finish_all()
    assert said_right(cluster, "abc", 20)


def test_until_its_token_comes_no_other_suspect_is_tried_beside_one() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "abc")
    cluster.step()
    cluster.kill("w1")
    cluster.attach("w2")

    for _ in range(3):
        cluster.step()  # no result is brought

    assert cluster.core.num_live(W2) == 1


def test_a_suspect_that_only_waited_on_the_second_worker_is_tried_again() -> None:
    cluster = Cluster(config=ONE_ROW)
    cluster.attach("w1")
    submit(cluster, "a")
    cluster.step()
    cluster.attach("w2")
    submit(cluster, "bd")  # in turn: w1, then w2, where d takes the row
    cluster.step()
    cluster.kill("w1")
    cluster.step()  # a is tried on w2, behind d

    cluster.kill("w2")
    cluster.attach("w3")
    cluster.finish_all()

    assert set(ends(cluster).values()) == {"LENGTH"}
    assert said_right(cluster, "abd")


def test_each_worker_tries_a_suspect_of_its_own() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "abc")
    cluster.step()
    cluster.attach("w2")
    cluster.attach("w3")
    cluster.kill("w1")

    cluster.step()

    assert (cluster.core.num_live(W2), cluster.core.num_live(W3)) == (1, 1)
    assert cluster.core.load().num_waiting == 1


def test_the_suspect_whose_second_worker_dies_fails_alone() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "d", max_tokens=20)
    cluster.step_all()
    cluster.step_all()
    cluster.step_all()
    submit(cluster, "ab")
    cluster.step_all()  # w1 has computed d, and begins with a and b
    cluster.kill("w1")
    cluster.attach("w2")
    cluster.step_all()
    cluster.step_all()  # w2 has computed d, and tries a
    cluster.attach("w3")

    cluster.kill("w2")
    cluster.step()

    assert ends(cluster) == {"a": "QUERY_OF_DEATH"}
    assert str(cluster.ends[RequestId("a")].error) == (
        "at least two workers died while they computed request 'a'; it is not tried again"
    )
    cluster.finish_all()
    assert ends(cluster) == {"a": "QUERY_OF_DEATH", "d": "LENGTH", "b": "LENGTH"}
    assert said_right(cluster, "b")
    assert said_right(cluster, "d", 20)


def test_nobody_fails_for_a_death_in_which_a_newcomer_was_in_doubt_as_well() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "ac")
    cluster.step()
    cluster.kill("w1")
    cluster.attach("w2")
    submit(cluster, "b")
    cluster.step()  # a is tried, and b begins beside it
    cluster.kill("w2")
    cluster.attach("w3")

    cluster.finish_all()

    assert ends(cluster) == dict.fromkeys("abc", "LENGTH")


def test_a_worker_that_is_killed_among_settled_requests_costs_none_of_them_anything_however_often() -> None:
    cluster = Cluster()
    cluster.attach("w")
    submit(cluster, "abcd", max_tokens=40)
    for _ in range(8):
        for _ in range(25):
            cluster.step_all()  # all four are tried one by one, and go on
        cluster.kill("w")
        cluster.attach("w")
    cluster.finish_all()

    assert ends(cluster) == dict.fromkeys("abcd", "LENGTH")
    assert said_right(cluster, "abcd", 40)


def test_a_query_of_death_brings_down_two_workers_and_no_request_but_itself() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "abcd")
    deaths = 0
    for _ in range(100):
        cluster.step_all()
        if not cluster.core.has_work():
            break
        if any(each.request_id == "c" for _, plan in cluster.plans[-2:] for each in plan.admitted):
            deaths += 1
            cluster.kill("w1")  # c is in a plan: the worker dies of it, and comes back
            cluster.step()
            cluster.attach("w1")
            cluster.plans.clear()

    assert deaths == 2
    assert ends(cluster) == {"c": "QUERY_OF_DEATH", "a": "LENGTH", "b": "LENGTH", "d": "LENGTH"}
    assert said_right(cluster, "abd")


def test_a_suspect_that_was_cleared_is_suspected_anew_when_another_worker_dies() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "a", max_tokens=9)
    for name in ("w2", "w3", "w4"):
        cluster.step_all()
        cluster.step_all()  # a token came: it is cleared
        cluster.attach(name)
        for worker_id in cluster.core.workers[:-1]:
            cluster.kill(worker_id)

    cluster.finish_all()

    assert ends(cluster) == {"a": "LENGTH"}
    assert said_right(cluster, "a", 9)


@pytest.mark.parametrize("error", [WorkerLeaving("it was told to"), WorkerTaken("another")])
def test_who_leaves_on_purpose_leaves_no_suspects(error: WorkerLeaving | WorkerTaken) -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "abc")
    cluster.step()
    cluster.attach("w2")

    cluster.kill("w1", error)

    assert cluster.core.num_live(W2) == 3
    cluster.finish_all()
    assert said_right(cluster, "abc")


def test_who_was_given_no_plan_is_not_blamed() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "ab")
    cluster.core.halt(W1)
    cluster.step()
    cluster.attach("w2")

    cluster.kill("w1")

    assert cluster.core.num_live(W2) == 2


def test_a_suspect_may_be_cancelled_while_it_waits_to_be_tried() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "ab")
    cluster.step()
    cluster.kill("w1")

    cluster.core.cancel(RequestId("a"))
    cluster.attach("w2")
    cluster.finish_all()

    assert ends(cluster) == {"a": "REQUEST_CANCELLED", "b": "LENGTH"}


def test_a_suspect_that_is_cancelled_on_trial_makes_way_for_the_next() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "ab")
    cluster.step()
    cluster.kill("w1")
    cluster.attach("w2")
    cluster.step()

    cluster.core.cancel(RequestId("a"))
    cluster.finish_all()

    assert ends(cluster) == {"a": "REQUEST_CANCELLED", "b": "LENGTH"}


def test_without_a_worker_of_the_generation_requests_wait_so_long_and_no_longer() -> None:
    cluster = Cluster(recovery_timeout_s=30.0, config=ONE_ROW)
    cluster.attach("w1")
    submit(cluster, "ab")
    cluster.step()
    cluster.now_s = 5.0
    cluster.kill("w1")

    early = cluster.core.next_expiry_s()
    cluster.core.expire_homeless(34.9)
    before = cluster.step()
    cluster.core.expire_homeless(35.0)
    cluster.step()

    assert (early, before) == (35.0, ())
    assert ends(cluster) == {"a": "RECOVERY_TIMED_OUT", "b": "RECOVERY_TIMED_OUT"}
    assert "no other of its generation came within 30 s" in str(cluster.ends[RequestId("a")].error)
    assert cluster.core.next_expiry_s() is None


def test_a_worker_that_comes_in_time_stops_the_clock() -> None:
    cluster = Cluster(recovery_timeout_s=30.0)
    cluster.attach("w1")
    submit(cluster, "ab")
    cluster.step()
    cluster.kill("w1")
    cluster.now_s = 20.0
    cluster.attach("w1")
    cluster.step()

    between = cluster.core.next_expiry_s()
    cluster.now_s = 25.0
    cluster.kill("w1")

    assert (between, cluster.core.next_expiry_s()) == (None, 55.0)


def test_generations_never_mix() -> None:
    cluster = Cluster(config=ONE_ROW)
    cluster.attach("w1", "one")
    cluster.attach("w2", "two")
    submit(cluster, "ab", generation="one")
    submit(cluster, "c", generation="two")
    cluster.step()

    cluster.kill("w1")
    cluster.step_all()

    assert (cluster.core.num_live(W2), cluster.core.num_live()) == (1, 3)
    with pytest.raises(NotServing, match="no worker that takes requests is connected"):
        submit(cluster, "d", generation="one")
    cluster.attach("w3", "one")
    cluster.finish_all()
    assert cluster.placed() == {"a": W3, "b": W3, "c": W2}


def test_what_a_lost_worker_says_afterwards_changes_nothing() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    cluster.attach("w2")
    submit(cluster, "ab")
    cluster.step()
    cluster.kill("w1")

    assert cluster.step("w1") == ()
    cluster.finish_all()
    assert said_right(cluster, "ab")


def test_losing_a_worker_again_is_nothing_and_one_that_is_attached_cannot_be_removed() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    submit(cluster, "a")

    with pytest.raises(InvariantBroken, match="worker w1 is removed while it is attached"):
        cluster.core.remove(W1)
    cluster.kill("w1")
    cluster.kill("w1")
    cluster.core.remove(W1)

    assert cluster.core.workers == ()
    assert cluster.core.num_live() == 1
    with pytest.raises(InvariantBroken, match="worker w1 is unknown"):
        cluster.core.facts(W1)


def test_a_worker_that_was_given_up_may_be_connected_again_by_hand() -> None:
    cluster = Cluster()
    cluster.attach("w1")
    cluster.kill("w1")

    cluster.core.give_up(W1)
    cluster.kill("w1")
    given_up = cluster.core.facts(W1).link
    cluster.attach("w1")

    assert (given_up, cluster.core.facts(W1).link) == (Link.FAILED, Link.LIVE)


def test_requests_of_a_lost_worker_go_to_a_draining_one_only_if_there_is_no_other() -> None:
    cluster = Cluster(config=ONE_ROW)
    for name in ("w1", "w2", "w3"):
        cluster.attach(name)
    cluster.core.move_intake(Intake.DRAINING, [W2, W3])
    submit(cluster, "ab")

    cluster.core.move_intake(Intake.OPEN, [W3])
    cluster.kill("w1")
    cluster.kill("w3")
    cluster.finish_all()

    assert cluster.placed() == {"a": W2, "b": W2}


def test_the_oldest_of_a_generation_comes_first_and_expires_with_the_others() -> None:
    """The keeper alone: two generations, each with a clock of its own."""
    cluster = Cluster(recovery_timeout_s=10.0)
    cluster.attach("w1", "one")
    cluster.attach("w2", "two")
    submit(cluster, "ab", generation="one")
    submit(cluster, "c", generation="two")
    cluster.kill("w1")
    cluster.now_s = 4.0
    cluster.kill("w2")

    cluster.core.expire_homeless(10.0)
    cluster.step()

    assert ends(cluster) == {"a": "RECOVERY_TIMED_OUT", "b": "RECOVERY_TIMED_OUT"}
    assert cluster.core.next_expiry_s() == 14.0


def test_who_is_kept_is_taken_out_oldest_first_suspects_one_by_one() -> None:
    recovery = Recovery(timeout_s=10.0)
    for name, arrival, is_suspect in (("d", 4, False), ("a", 1, False), ("c", 3, True), ("b", 2, True)):
        recovery.add(Live(asking(name, arrival=arrival), GenerationId("g"), is_suspect=is_suspect))

    homeless = [live.request.request_id for live in recovery.take_homeless(GenerationId("g"))]
    suspects = [recovery.take_suspect(GenerationId("g")) for _ in range(3)]

    assert homeless == ["a", "d"]
    assert [live and live.request.request_id for live in suspects] == ["b", "c", None]


def test_the_clock_of_a_generation_starts_when_its_last_worker_goes_and_not_anew_with_each_request() -> None:
    recovery = Recovery(timeout_s=10.0)
    for name, now_s in (("a", 1.0), ("b", 5.0)):
        recovery.add(Live(asking(name), GenerationId("g")))
        recovery.note_orphaned(GenerationId("g"), now_s)

    assert recovery.next_expiry_s() == 11.0
    assert [(live.request.request_id, waited_s) for live, waited_s in recovery.expired(12.0)] == [
        ("a", 11.0),
        ("b", 11.0),
    ]


def test_a_keeper_of_nobody_has_nothing_to_tell() -> None:
    recovery = Recovery(timeout_s=10.0)
    recovery.note_orphaned(GenerationId("g"), 1.0)
    recovery.note_adopted(GenerationId("g"))

    assert len(recovery) == 0
    assert recovery.take_homeless(GenerationId("g")) == []
    assert recovery.take_suspect(GenerationId("g")) is None
    assert list(recovery.expired(99.0)) == []
    assert recovery.next_expiry_s() is None
