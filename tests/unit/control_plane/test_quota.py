"""What is refused for want of room, and with which numbers."""

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.quota import Quota
from control_plane.scheduling.config import SchedulerConfig
from plugins.errors import QueueFull, TenantQuotaExceeded
from plugins.types import RequestId
from tests.unit.control_plane.driving import Cluster, asking, outputs


def test_as_many_requests_may_wait_as_are_allowed_and_who_has_a_row_waits_no_longer() -> None:
    quota = Quota(AdmissionConfig(max_waiting=2))
    first = asking("a")
    quota.enter(first)
    quota.enter(asking("b"))

    with pytest.raises(QueueFull, match="2 requests are waiting; at most 2 may; retry in 1 s"):
        quota.check(asking("c"))
    quota.note_started(first)
    quota.check(asking("c"))

    assert (quota.num_waiting, quota.num_waiting_tokens, quota.max_waiting) == (1, 5, 2)


def test_prompts_that_wait_may_have_so_many_tokens_together_and_a_lone_one_any_number() -> None:
    quota = Quota(AdmissionConfig(max_waiting_tokens=10))
    huge = asking("huge", range(50))
    quota.check(huge)
    quota.enter(huge)

    with pytest.raises(QueueFull, match="50 prompt tokens are waiting; at most 10 may"):
        quota.check(asking("tiny", (3,)))
    quota.note_started(huge)
    quota.check(asking("tiny", range(10)))


def test_a_tenant_may_have_so_many_requests_at_hand_waiting_or_running() -> None:
    quota = Quota(AdmissionConfig(max_tenant_requests=2))
    running, waiting = asking("a", tenant="greedy"), asking("b", tenant="greedy")
    for each in (running, waiting):
        quota.enter(each)
    quota.note_started(running)

    with pytest.raises(TenantQuotaExceeded, match="tenant 'greedy' has 2 requests at hand; at most 2 may be"):
        quota.check(asking("c", tenant="greedy"))
    quota.check(asking("c", tenant="modest"))
    quota.check(asking("c"))
    quota.leave(running, has_started=True)
    quota.check(asking("c", tenant="greedy"))


def test_who_gave_no_tenant_is_a_tenant_too() -> None:
    quota = Quota(AdmissionConfig(max_tenant_requests=1))
    quota.enter(asking("a"))

    with pytest.raises(TenantQuotaExceeded, match="tenant '' has 1 request at hand"):
        quota.check(asking("b"))


def test_whoever_leaves_is_counted_no_more_whether_it_had_a_row_or_not() -> None:
    quota = Quota(AdmissionConfig())
    started, queued = asking("a", range(7)), asking("b", range(9))
    for each in (started, queued):
        quota.enter(each)
    quota.note_started(started)

    quota.leave(started, has_started=True)
    quota.leave(queued, has_started=False)

    assert (quota.num_waiting, quota.num_waiting_tokens) == (0, 0)


def test_a_refused_caller_is_told_when_to_try_again() -> None:
    quota = Quota(AdmissionConfig(max_waiting=1, max_tenant_requests=1))
    quota.enter(asking("a"))

    with pytest.raises(QueueFull) as full:
        quota.check(asking("b"))

    assert full.value.retry_after_s == 1.0


def test_the_engine_counts_requests_from_their_coming_to_their_end() -> None:
    limits = AdmissionConfig(max_waiting=2, max_waiting_tokens=100, max_tenant_requests=3)
    cluster = Cluster(limits=limits, config=SchedulerConfig(max_sequences=1))
    cluster.attach("w")
    cluster.submit(asking("a", tenant="t"))
    cluster.step()  # it has the only row
    cluster.submit(asking("b", tenant="t"), asking("c", tenant="t"))

    with pytest.raises(QueueFull):
        cluster.submit(asking("d", tenant="other"))
    cluster.core.cancel(RequestId("b"))
    with pytest.raises(QueueFull, match="5 prompt tokens are waiting; at most 100 may"):
        cluster.submit(asking("e", range(96), tenant="other"))
    cluster.submit(asking("f", tenant="t"))
    cluster.core.cancel(RequestId("f"))
    cluster.submit(asking("g", tenant="other"))
    cluster.finish_all()

    assert cluster.core.num_waiting == 0
    cluster.submit(*(asking(name, tenant="t") for name in "xy"))


def test_a_request_that_waits_for_another_worker_does_not_wait_for_its_first_row_again() -> None:
    cluster = Cluster(limits=AdmissionConfig(max_waiting=1))
    cluster.attach("w")
    cluster.submit(asking("a"))
    cluster.step()

    cluster.kill("w")

    assert cluster.core.num_waiting == 0


def test_the_outputs_of_one_request_count_together_and_a_lone_one_may_have_any_number() -> None:
    quota = Quota(AdmissionConfig(max_waiting=3, max_waiting_tokens=40))
    several = outputs("a", 4, range(10))
    quota.check(*several)
    quota.enter(several[0])
    quota.enter(several[1])

    with pytest.raises(QueueFull, match="2 requests are waiting; at most 3 may"):
        quota.check(*outputs("b", 2, range(10)))
    with pytest.raises(QueueFull, match="20 prompt tokens are waiting; at most 40 may"):
        quota.check(*outputs("b", 1, range(21)))
    quota.check(*outputs("b", 1, range(20)))
