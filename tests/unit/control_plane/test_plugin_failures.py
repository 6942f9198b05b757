"""A scheduler of yours that raises: what it takes with it, and what it does not."""

from collections.abc import Callable
from typing import Any

import pytest

from control_plane.engine.facts import Link
from control_plane.engine.router import PrefixAffinity
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.errors import PluginFailed, RecoveryTimedOut
from plugins.scheduler import Scheduler
from plugins.types import Chunk, FinishReason, RequestId, Row, StepPlan, WorkerId, WorkerInfo
from tests.fakes import expected_output, worker_info
from tests.unit.control_plane.driving import Cluster, asking

A, B = RequestId("a"), RequestId("b")
W1, W2 = WorkerId("w1"), WorkerId("w2")


class Plugged(RunAheadScheduler):
    """Raises in one of its methods."""

    def __init__(self, worker: WorkerInfo, method: str) -> None:
        super().__init__(SchedulerConfig(), worker)
        raises: Callable[..., Any] = self._raise
        if method:
            setattr(self, method, raises)

    def _raise(self, *_: object, **__: object) -> None:
        raise ZeroDivisionError("of the plug-in's own")


class PluggedIn:
    """Makes schedulers as the engine's configuration would: broken ones for the workers of this name."""

    is_builtin = False

    def __init__(self, method: str, name: str = "bad") -> None:
        self.method = method
        self._name = name

    def __call__(self, worker: WorkerInfo) -> Scheduler:
        if self.method == "__init__" and worker.model.name == self._name:
            raise ZeroDivisionError("of the plug-in's own")
        return Plugged(worker, self.method if worker.model.name == self._name else "")


def make_cluster(method: str, **keys: Any) -> Cluster:
    """Two workers of different generations, w1 with a broken scheduler."""
    cluster = Cluster(PluggedIn(method), **keys)
    cluster.attach("w1", "bad", worker_info(name="bad"))
    cluster.attach("w2", "good", worker_info(name="good"))
    return cluster


@pytest.mark.parametrize("method", ["add_request", "schedule", "update", "has_work"])
def test_what_a_plugin_raises_ends_the_requests_of_its_worker_and_no_others(method: str) -> None:
    cluster = make_cluster(method)
    cluster.submit(asking("b"), generation="good")
    cluster.submit(asking("a"), generation="bad")

    cluster.finish_all()

    end = cluster.ends[A]
    assert (end.finish, type(end.error)) == (FinishReason.FAILED, PluginFailed)
    assert str(end.error) == "the scheduler raised ZeroDivisionError: of the plug-in's own"
    assert [worker_id for worker_id, _ in cluster.lost] == [W1]
    assert cluster.core.facts(W1).link is Link.LOST
    assert cluster.outputs[B] == expected_output(range(3, 8), 4)
    assert cluster.core.facts(W2).link is Link.LIVE


@pytest.mark.parametrize("method", ["load", "num_cached_tokens", "take_kv_events", "record_kv_events"])
def test_a_plugin_that_raises_when_it_is_asked_costs_its_worker_alone(method: str) -> None:
    cluster = Cluster(PluggedIn(method), router=PrefixAffinity())
    cluster.attach("w1", info=worker_info(name="good"))
    cluster.attach("w2", info=worker_info(name="good"))
    broken = cluster.core._lanes[W1].scheduler
    assert isinstance(broken, Plugged)
    setattr(broken, method, broken._raise)

    cluster.core.record_kv_events(True)
    cluster.submit(asking("a"), asking("b"))
    cluster.core.load()
    cluster.finish_all()

    assert [worker_id for worker_id, _ in cluster.lost] == [W1]
    assert cluster.core.facts(W2).link is Link.LIVE
    assert {type(end.error) for end in cluster.ends.values()} <= {PluginFailed, type(None)}
    assert len(cluster.ends) == 2


def test_a_plugin_that_cannot_reset_its_cache_costs_its_worker_alone() -> None:
    cluster = make_cluster("reset_prefix_cache")

    cluster.core.reset_prefix_cache()
    cluster.submit(asking("b"), generation="good")
    cluster.finish_all()

    assert [worker_id for worker_id, _ in cluster.lost] == [W1]
    assert cluster.outputs[B] == expected_output(range(3, 8), 4)


def test_a_plugin_that_raises_at_a_cancel_does_not_change_how_that_request_ended() -> None:
    cluster = make_cluster("cancel_request")
    cluster.submit(asking("a"), asking("b"), generation="bad")

    cluster.core.cancel(A)
    cluster.finish_all()

    assert cluster.ends[A].finish is FinishReason.CANCELLED
    assert isinstance(cluster.ends[B].error, PluginFailed)
    assert [worker_id for worker_id, _ in cluster.lost] == [W1]


def test_a_plugin_that_cannot_be_built_fails_the_attachment() -> None:
    cluster = Cluster(PluggedIn("__init__"))

    with pytest.raises(PluginFailed, match=r"^the scheduler raised ZeroDivisionError: of the plug-in's own$"):
        cluster.attach("w1", info=worker_info(name="bad"))

    assert cluster.core.facts(W1).link is Link.LOST


def test_a_plan_for_rows_that_nobody_holds_counts_as_a_failure_of_the_plugin() -> None:
    class Confused(RunAheadScheduler):
        def schedule(self, throttle_prefills: bool = False) -> StepPlan:
            return StepPlan(seq=1, chunks=(Chunk(Row(5), 1),))

    class Confusing(PluggedIn):
        def __call__(self, worker: WorkerInfo) -> Scheduler:
            return Confused(SchedulerConfig(), worker)

    cluster = Cluster(Confusing(""))
    cluster.attach("w1")
    cluster.submit(asking("a"))

    cluster.finish_all()

    assert "plan 1 names 5, which holds or is no request in flight" in str(cluster.ends[A].error)


def test_the_next_attachment_has_a_new_scheduler_and_the_third_failure_within_a_minute_is_the_last() -> None:
    cluster = make_cluster("schedule")
    links = []
    for time, name in ((0.0, "a"), (30.0, "b"), (60.0, "c")):
        cluster.now_s = time
        if time:
            cluster.attach("w1", "bad", worker_info(name="bad"))
        cluster.submit(asking(name), generation="bad")
        cluster.step()
        links.append(cluster.core.facts(W1).link)

    assert links == [Link.LOST, Link.LOST, Link.FAILED]
    assert [type(cluster.ends[RequestId(name)].error) for name in "abc"] == [PluginFailed] * 3


def test_failures_that_lie_more_than_a_minute_back_are_forgotten() -> None:
    cluster = make_cluster("schedule")
    links = []
    for time, name in ((0.0, "a"), (50.0, "b"), (61.0, "c"), (62.0, "d")):
        cluster.now_s = time
        if time:
            cluster.attach("w1", "bad", worker_info(name="bad"))
        cluster.submit(asking(name), generation="bad")
        cluster.step()
        links.append(cluster.core.facts(W1).link)

    assert links == [Link.LOST, Link.LOST, Link.LOST, Link.FAILED]


def test_a_plugin_that_works_again_serves_again() -> None:
    make_scheduler = PluggedIn("schedule")
    cluster = Cluster(make_scheduler)
    cluster.attach("w1", info=worker_info(name="bad"))
    cluster.submit(asking("a"))
    cluster.step()

    make_scheduler.method = ""
    cluster.attach("w1", info=worker_info(name="bad"))
    cluster.submit(asking("b"))
    cluster.finish_all()

    assert cluster.outputs[B] == expected_output(range(3, 8), 4)


def test_requests_that_wait_for_a_worker_are_not_ended_by_a_plugin_that_cannot_be_built() -> None:
    make_scheduler = PluggedIn("")
    cluster = Cluster(make_scheduler)
    cluster.attach("w1", info=worker_info(name="bad"))
    cluster.submit(asking("a"))
    cluster.step()
    cluster.kill("w1")

    make_scheduler.method = "__init__"
    with pytest.raises(PluginFailed):
        cluster.attach("w1", info=worker_info(name="bad"))

    assert cluster.core.num_live() == 1


@pytest.mark.parametrize("method", ["__init__", "add_request", "schedule", "update", "cancel_request"])
def test_in_process_the_caller_gets_what_was_raised_as_it_was(method: str) -> None:
    cluster = Cluster(PluggedIn(method), reraises=True)

    with pytest.raises(ZeroDivisionError, match="^of the plug-in's own$"):
        cluster.attach("w1", info=worker_info(name="bad"))
        cluster.submit(asking("a"))
        cluster.step_all()
        cluster.core.cancel(A)
        cluster.step_all()


def test_what_a_built_in_scheduler_raises_is_a_bug_and_reaches_the_caller() -> None:
    cluster = Cluster(lambda worker: Plugged(worker, "schedule"))
    cluster.attach("w1")
    cluster.submit(asking("a"))

    with pytest.raises(ZeroDivisionError, match="^of the plug-in's own$"):
        cluster.step()


def test_a_suspect_that_waits_is_not_forgotten_when_the_plugin_of_its_last_worker_fails() -> None:
    factory = PluggedIn("", "fake")
    cluster = Cluster(factory)
    cluster.attach("w1")
    cluster.submit(asking("a", max_tokens=9), asking("b", max_tokens=9))
    cluster.step()
    cluster.kill("w1")
    factory.method = "schedule"
    cluster.attach("w1")
    cluster.now_s = 10.0
    cluster.step()  # a is tried, and ends with the plug-in that raises; b waits

    cluster.now_s = 39.0
    cluster.core.expire_homeless(cluster.now_s)
    before = dict(cluster.ends)
    cluster.now_s = 41.0
    cluster.core.expire_homeless(cluster.now_s)
    cluster.step()

    assert [type(end.error) for end in before.values()] == [PluginFailed]
    assert isinstance(cluster.ends[B].error, RecoveryTimedOut)
