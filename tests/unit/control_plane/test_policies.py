"""Who is served first: first come, priorities that age, and fair shares of tenants."""

import pytest

from control_plane.scheduling.fair_share import MAX_IDLE_TENANTS, FairSharePolicy
from control_plane.scheduling.first_come import FirstComePolicy
from control_plane.scheduling.priority import PriorityPolicy
from plugins.errors import InvariantBroken
from plugins.types import Request, RequestId, SamplingParams, TokenId


def arriving(
    name: str,
    tenant: str = "",
    num_prompt: int = 10,
    max_tokens: int = 90,
    priority: int = 0,
    arrival: int = 0,
    arrival_s: float = 0.0,
    num_output: int = 0,
) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=(TokenId(3),) * num_prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=0),
        tenant=tenant,
        priority=priority,
        arrival=arrival,
        arrival_s=arrival_s,
        output_token_ids=(TokenId(4),) * num_output,
    )


def test_first_come_is_the_order_of_arrival_whatever_the_priority() -> None:
    policy = FirstComePolicy()
    early, late = arriving("a", arrival=7, priority=9), arriving("b", arrival=8, priority=0)

    assert (policy.order(early), policy.order(late)) == (7, 8)
    assert not policy.displaces(late, early)


def test_a_lower_priority_number_goes_first() -> None:
    policy = PriorityPolicy(ageing_s=10.0)

    assert policy.order(arriving("a", priority=0, arrival_s=3.0)) == 3.0
    assert policy.order(arriving("b", priority=2, arrival_s=3.0)) == 23.0
    assert policy.order(arriving("c", priority=-1, arrival_s=3.0)) == -7.0


def test_a_request_is_overtaken_only_for_as_long_as_ageing_outweighs_its_levels() -> None:
    policy = PriorityPolicy(ageing_s=10.0)
    low = arriving("low", priority=3, arrival_s=100.0)
    just_in_time, too_late = arriving("a", priority=1, arrival_s=119.9), arriving("b", priority=1, arrival_s=120.1)

    assert policy.order(just_in_time) < policy.order(low) < policy.order(too_late)


def test_a_better_priority_displaces_and_an_equal_one_never_does() -> None:
    """B061: ties never preempt."""
    policy = PriorityPolicy(ageing_s=10.0)
    running = arriving("running", priority=10, arrival_s=5.0)

    assert policy.displaces(arriving("urgent", priority=0, arrival_s=6.0), running)
    assert not policy.displaces(arriving("equal", priority=10, arrival_s=0.0), running)
    assert not policy.displaces(arriving("worse", priority=11, arrival_s=0.0), running)


def test_what_may_not_overtake_a_request_does_not_displace_it_either() -> None:
    policy = PriorityPolicy(ageing_s=10.0)
    running = arriving("running", priority=1, arrival_s=5.0)

    assert policy.displaces(arriving("a", priority=0, arrival_s=14.9), running)
    assert not policy.displaces(arriving("b", priority=0, arrival_s=15.1), running)


def test_a_tenant_with_many_requests_lets_others_in_between() -> None:
    policy = FairSharePolicy({})
    many = [policy.order(arriving(f"a{n}", "a")) for n in range(3)]

    assert many == [0.0, 100.0, 200.0]
    assert policy.order(arriving("b0", "b")) == 0.0


def test_a_tenant_of_twice_the_weight_is_charged_half() -> None:
    policy = FairSharePolicy({"a": 2.0})

    assert [policy.order(arriving(f"a{n}", "a")) for n in range(3)] == [0.0, 50.0, 100.0]
    assert [policy.order(arriving(f"b{n}", "b")) for n in range(3)] == [0.0, 100.0, 200.0]


def test_who_comes_back_starts_at_virtual_time_without_credit() -> None:
    policy = FairSharePolicy({})
    for n in range(4):
        request = arriving(f"a{n}", "a")
        policy.order(request)
        policy.note_admitted(request)

    assert policy.order(arriving("b", "b")) == 300.0


def test_tokens_that_were_not_used_are_given_back_for_later_requests() -> None:
    policy = FairSharePolicy({"a": 2.0})
    first, second = arriving("a0", "a"), arriving("a1", "a")
    policy.order(first)
    policy.order(second)
    policy.note_admitted(first)

    policy.note_ended(first, num_output_tokens=30)

    assert policy.order(arriving("a2", "a")) == 70.0  # 100 without the 60 tokens at weight 2


def test_a_request_that_never_ran_gets_its_prompt_back_too() -> None:
    policy = FairSharePolicy({})
    first, second = arriving("a0", "a"), arriving("a1", "a")
    policy.order(first)
    policy.order(second)

    policy.note_ended(first, num_output_tokens=0)

    assert policy.order(arriving("a2", "a")) == 100.0


def test_nothing_is_given_back_for_what_virtual_time_has_settled() -> None:
    policy = FairSharePolicy({})
    old = arriving("a0", "a")
    policy.order(old)
    policy.note_admitted(old)
    for n in range(4):  # b moves virtual time to 300, past the 100 where the account of a ends
        request = arriving(f"b{n}", "b")
        policy.order(request)
        policy.note_admitted(request)
    assert policy.order(arriving("a1", "a")) == 300.0

    policy.note_ended(old, num_output_tokens=0)

    assert policy.order(arriving("a2", "a")) == 400.0


def test_output_that_a_request_brings_along_is_not_charged_again() -> None:
    policy = FairSharePolicy({})
    continued = arriving("a0", "a", num_output=40)
    policy.order(continued)
    policy.note_admitted(continued)

    assert policy.order(arriving("a1", "a")) == 60.0
    policy.note_ended(continued, num_output_tokens=50)
    assert policy.order(arriving("a2", "a")) == 120.0  # 60 + 100, less the 40 that were not used


def test_a_second_admission_moves_nothing() -> None:
    policy = FairSharePolicy({})
    first, second = arriving("a0", "a"), arriving("a1", "a")
    policy.order(first)
    policy.order(second)
    policy.note_admitted(second)
    policy.note_admitted(first)  # back after a preemption

    assert policy.order(arriving("b0", "b")) == 100.0


def test_a_request_is_charged_once() -> None:
    policy = FairSharePolicy({})
    policy.order(arriving("a0", "a"))

    with pytest.raises(InvariantBroken, match="'a0' is charged twice"):
        policy.order(arriving("a0", "a"))


def test_nobody_is_remembered_when_nothing_is_at_hand() -> None:
    policy = FairSharePolicy({})
    requests = [arriving(f"{tenant}0", tenant) for tenant in ("a", "b")]
    for request in requests:
        policy.order(request)
        policy.note_admitted(request)
    for request in requests:
        policy.note_ended(request, num_output_tokens=90)

    assert policy.num_accounts == 0


def test_a_hundred_thousand_tenants_leave_a_bounded_memory() -> None:
    policy = FairSharePolicy({})
    policy.order(arriving("waits", "other"))

    for n in range(100_000):
        request = arriving(f"r{n}", f"tenant {n}")
        policy.order(request)
        policy.note_admitted(request)
        policy.note_ended(request, num_output_tokens=90)

    assert policy.num_accounts <= MAX_IDLE_TENANTS + 1


def test_ever_new_tenants_do_not_pass_a_waiting_request_for_ever() -> None:
    policy = FairSharePolicy({})
    policy.order(arriving("a0", "a"))
    place = policy.order(arriving("a1", "a"))

    num_overtakers = 0
    while policy.order(request := arriving(f"r{num_overtakers}", f"tenant {num_overtakers}")) < place:
        policy.note_admitted(request)
        policy.note_ended(request, num_output_tokens=90)
        num_overtakers += 1

    assert num_overtakers == 4097


def test_two_backlogged_tenants_get_tokens_in_proportion_to_their_weights() -> None:
    policy = FairSharePolicy({"a": 3.0})
    places = {}
    for n in range(300):
        for tenant, size in (("a", 10 + n % 7), ("b", 40 + n % 11)):
            request = arriving(f"{tenant}{n}", tenant, num_prompt=size, max_tokens=5)
            places[request.request_id] = (policy.order(request), request)

    served = {"a": 0, "b": 0}
    for _, request in sorted(places.values(), key=lambda entry: entry[0])[:200]:
        served[request.tenant] += len(request.prompt_token_ids) + 5

    assert served["a"] / served["b"] == pytest.approx(3.0, rel=0.05)
