"""What every scheduling policy promises, as checks that need nothing but a way to make one.

Order, admission, victims and accounts are checked by themselves; a scheduler that works under the policy is checked
by the module `scheduler`.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from plugins.conformance.report import CheckResult, require, run_checks
from plugins.conformance.scheduler import request_of
from plugins.scheduler import SchedulingPolicy
from plugins.types import Request

MakePolicy: TypeAlias = Callable[[], SchedulingPolicy]
NUM_ROWS = 3


def check_policy(make: MakePolicy) -> tuple[CheckResult, ...]:
    """Run every check of this module."""
    return run_checks(POLICY_CHECKS, make)


def every_place_is_a_number(make: MakePolicy) -> None:
    """Not infinite, and not NaN, which is neither before nor after anything."""
    policy = make()
    for request in _drawn_requests(100):
        place = policy.order(request)
        require(math.isfinite(place), f"the place of {request.request_id} is {place}")


def the_same_calls_give_the_same_places(make: MakePolicy) -> None:
    """No clock and no chance."""
    first, second = make(), make()
    for request in _drawn_requests(100):
        require(first.order(request) == second.order(request), f"two policies disagree about {request.request_id}")


def somebody_may_start_when_nobody_runs(make: MakePolicy) -> None:
    """Otherwise nothing would ever move."""
    policy = make()
    for request in _drawn_requests(50):
        policy.order(request)
        require(policy.admit(request, ()), f"{request.request_id} may not start, and nobody runs")


def the_victim_is_one_of_those_that_run(make: MakePolicy) -> None:
    """Also if only one is there to choose."""
    policy = make()
    requests = _placed(policy, 20)
    for num_running in range(1, 21):
        victim = policy.victim(requests[:num_running])
        require(0 <= victim < num_running, f"the victim among {num_running} is number {victim}")


def nobody_displaces_whom_it_is_displaced_by(make: MakePolicy) -> None:
    """Or the two would take the row from each other for ever, and compute nothing."""
    policy = make()
    requests = _placed(policy, 40)
    for one in requests:
        for other in requests:
            both = policy.displaces(one, other) and policy.displaces(other, one)
            require(not both, f"{one.request_id} and {other.request_id} displace each other")


def accounts_follow_requests_to_every_end(make: MakePolicy) -> None:
    """Requests start, start again after a preemption, end, or are cancelled before they start: all are taken."""
    draw = random.Random(3)
    policy = make()
    waiting: list[tuple[float, int, Request]] = []
    running: list[tuple[float, int, Request]] = []
    coming = _drawn_requests(200)
    num_ended = 0
    for _ in range(10_000):
        if coming:
            request = coming.pop(0)
            waiting.append((policy.order(request), request.arrival, request))
        waiting.sort(key=lambda entry: entry[:2])
        while waiting and len(running) < NUM_ROWS and policy.admit(waiting[0][2], [each[2] for each in running]):
            policy.note_admitted(waiting[0][2])
            running.append(waiting.pop(0))
            running.sort(key=lambda entry: entry[:2])
        if running and draw.random() < 0.1:
            waiting.append(running.pop(policy.victim([each[2] for each in running])))
        if waiting and draw.random() < 0.1:
            policy.note_ended(waiting.pop(draw.randrange(len(waiting)))[2], 0)
            num_ended += 1
        if running and draw.random() < 0.7:
            ended = running.pop(draw.randrange(len(running)))[2]
            policy.note_ended(ended, draw.randint(0, ended.sampling.max_tokens or 0))
            num_ended += 1
        if num_ended == 200:
            break
    require(num_ended == 200, f"{200 - num_ended} of 200 requests never ended: nobody was let in")


POLICY_CHECKS: Sequence[Callable[[MakePolicy], None]] = (
    every_place_is_a_number,
    the_same_calls_give_the_same_places,
    somebody_may_start_when_nobody_runs,
    the_victim_is_one_of_those_that_run,
    nobody_displaces_whom_it_is_displaced_by,
    accounts_follow_requests_to_every_end,
)


def _drawn_requests(num_requests: int) -> list[Request]:
    """Requests of several tenants and priorities, in the order of their arrival, some with output already."""
    draw = random.Random(7)
    requests = []
    for n in range(num_requests):
        request = request_of(f"r{n}", draw.randint(1, 50), draw.randint(4, 50))
        requests.append(
            replace(
                request,
                tenant=draw.choice(("", "a", "b")),
                priority=draw.choice((-3, 0, 0, 1, 9)),
                arrival=n + 1,
                arrival_s=n * draw.choice((0.0, 0.5)),
                output_token_ids=request.prompt_token_ids[:3] if draw.random() < 0.2 else (),
            )
        )
    return requests


def _placed(policy: SchedulingPolicy, num_requests: int) -> list[Request]:
    """Requests in the order of their places, as a scheduler keeps them."""
    places = [(policy.order(request), request.arrival, request) for request in _drawn_requests(num_requests)]
    for _, _, request in places:
        policy.note_admitted(request)
    return [request for _, _, request in sorted(places, key=lambda entry: entry[:2])]
