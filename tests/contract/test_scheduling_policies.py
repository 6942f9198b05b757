"""The suites of the two scheduling hooks, against every scheduler and policy of ours, and against planted bugs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from control_plane.engine.scheduler_choice import choose_scheduler
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.fair_share import FairSharePolicy
from control_plane.scheduling.first_come import FirstComePolicy
from control_plane.scheduling.priority import PriorityPolicy
from control_plane.scheduling.run_ahead import RunAheadScheduler
from control_plane.scheduling.sequence import Sequence, State
from plugins.conformance.policy import POLICY_CHECKS, check_policy
from plugins.conformance.report import CheckResult
from plugins.conformance.scheduler import (
    SCHEDULER_CHECKS,
    MakeScheduler,
    Rig,
    check_scheduler,
    request_of,
    small_worker,
)
from plugins.scheduler import Scheduler, SchedulingPolicy
from plugins.types import Finished, FinishReason, Request, RequestId, StepPlan, StepResult, WorkerInfo

CONFIG = SchedulerConfig(prefix_hash_key="a key of these tests")


def failed(results: tuple[CheckResult, ...]) -> dict[str, str]:
    return {result.name: result.why for result in results if not result.passed}


def admitted(rig: Rig) -> list[str]:
    return [admission.request_id for plan in rig.plans for admission in plan.admitted]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair_share"])
@pytest.mark.parametrize("is_async", [True, False], ids=["run_ahead", "synchronous"])
def test_each_scheduler_keeps_its_promises_under_each_policy(policy: str, is_async: bool) -> None:
    make = choose_scheduler(SchedulerConfig(policy=policy, async_scheduling=is_async, watermark_ratio=0.1))

    assert failed(check_scheduler(make)) == {}


@pytest.mark.parametrize(
    "config",
    [SchedulerConfig(prefix_caching=False), SchedulerConfig(max_chunk_tokens=3), SchedulerConfig(max_sequences=1)],
    ids=["no prefix cache", "short chunks", "one row"],
)
def test_it_keeps_them_with_other_settings(config: SchedulerConfig) -> None:
    assert failed(check_scheduler(choose_scheduler(config))) == {}


@pytest.mark.parametrize(
    "make",
    [FirstComePolicy, lambda: PriorityPolicy(10.0), lambda: FairSharePolicy({"a": 3.0})],
    ids=["first come", "priority", "fair share"],
)
def test_each_policy_keeps_its_promises(make: Callable[[], SchedulingPolicy]) -> None:
    assert failed(check_policy(make)) == {}


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair_share"])
def test_order_is_strict_so_small_requests_wait_behind_a_large_one(policy: str) -> None:
    """B059: the large one starts when the one that runs has ended, whatever came after it."""
    rig = Rig(choose_scheduler(SchedulerConfig(policy=policy)), small_worker(num_blocks=36))
    rig.add(request_of("first", num_prompt=28, max_tokens=4))
    rig.move()
    rig.add(replace(request_of("large", num_prompt=119, max_tokens=1, first_token=300), tenant="large"))
    for n in range(20):
        rig.add(replace(request_of(f"small {n}", num_prompt=3, max_tokens=1), tenant=f"tenant {n}"))

    rig.finish()

    assert admitted(rig) == ["first", "large", *(f"small {n}" for n in range(20))]


def test_an_urgent_request_takes_a_row_at_once() -> None:
    """B061: all rows are held by requests of worse priority; its first token comes with the next plan."""
    rig = Rig(choose_scheduler(SchedulerConfig(policy="priority")), small_worker(num_blocks=512, max_sequences=4))
    for n in range(4):
        rig.add(replace(request_of(f"low {n}", max_tokens=300, first_token=20 * n), priority=10))
    for _ in range(8):
        rig.move()
    rig.add(replace(request_of("equal", max_tokens=8), priority=10))
    rig.add(replace(request_of("urgent", num_prompt=8, max_tokens=8, first_token=500), priority=0))

    rig.schedule()

    assert admitted(rig) == ["low 0", "low 1", "low 2", "low 3", "urgent"]
    assert len(rig.worker.outputs[RequestId("urgent")]) == 1
    rig.finish()
    assert admitted(rig)[5:] == ["low 3", "equal"]  # who was displaced comes back before its equal


class Planted(RunAheadScheduler):
    """A scheduler to plant a bug in."""

    def __init__(self, worker: WorkerInfo) -> None:
        super().__init__(CONFIG, worker)


class KeepsCancelledRows(Planted):
    def cancel_request(self, request_id: RequestId) -> None:
        super().cancel_request(request_id)
        self._released.clear()


class GivesBlocksTwice(Planted):
    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        plan = super().schedule(throttle_prefills)
        new_blocks = [chunk.new_blocks for chunk in plan.chunks if chunk.new_blocks]
        chunks = [replace(chunk, new_blocks=chunk.new_blocks and new_blocks[0]) for chunk in plan.chunks]
        return replace(plan, chunks=tuple(chunks))


class MixesSalts(Planted):
    def add_request(self, request: Request) -> None:
        super().add_request(replace(request, cache_salt=""))


class ForgetsOutput(Planted):
    def add_request(self, request: Request) -> None:
        super().add_request(replace(request, output_token_ids=()))


class Deeper(Planted):
    max_plans_in_flight = 3


class ComesBackTooEarly(Deeper):
    def _admit(self, draft: Any, ahead_of: Sequence | None) -> None:
        if (first := self._waiting.first()) is not None:
            first.num_plans = 0
        super()._admit(draft, ahead_of)


class KeepsTheFailed(Planted):
    def _retire(self, sequence: Sequence) -> None:
        if len(self._running) == 3:
            self._leave(sequence, State.FINISHED)
        else:
            super()._retire(sequence)


class TakesNothingBack(Planted):
    def _note_waits(self, plan: Any, result: StepResult) -> None:
        pass


class GoesOnBehindStops(Planted):
    def update(self, result: StepResult) -> tuple[Finished, ...]:
        return super().update(replace(result, finishes=tuple(each and FinishReason.LENGTH for each in result.finishes)))


class TellsOfSomeTokens(Planted):
    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._sequences[request.request_id].tells_prompt = False


class TakesTooMuch(Planted):
    def __init__(self, worker: WorkerInfo) -> None:
        super().__init__(worker)
        self._max_step_tokens += 1


class DecidesByMemory(Planted):
    num_built = 0

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        type(self).num_built += 1
        return super().schedule(type(self).num_built % 7 < 3)


class ClaimsDepth(Planted):
    max_plans_in_flight = 3

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        if len(self._in_flight) == 2:
            return StepPlan(seq=self._num_plans + 1)
        return super().schedule(throttle_prefills)


class ObeysEveryAdvice(Planted):
    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        return StepPlan(seq=self._num_plans + 1) if throttle_prefills else super().schedule()


class KeepsItsCache(Planted):
    def reset_prefix_cache(self) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (KeepsCancelledRows, "cancelling at any moment leaves nothing behind", "does not release their rows"),
        (TakesTooMuch, "no plan asks for more than the worker has", "a step has at most 1"),
        (MixesSalts, "every request ends once with its own tokens", "which holds what others wrote"),
        (ForgetsOutput, "a request with output is continued", "tokens that are not all of its own"),
        (ComesBackTooEarly, "requests that outgrow the blocks end with their own tokens", "not all of its own"),
        (DecidesByMemory, "the same calls give the same plans", "made different plans"),
        (ClaimsDepth, "it plans as far ahead as it declares", "plan 3 computes nothing"),
        (ObeysEveryAdvice, "advice to hold prompts back does not stop them", "have not ended after 5000 moves"),
        (KeepsItsCache, "nothing is hit after a reset", "tokens are cached after a reset"),
        (GivesBlocksTwice, "a failed row ends its request alone", "writes block 0, which others hold too"),
        (TakesNothingBack, "a row that waits is computed again", "have not ended after 5000 moves"),
        (GoesOnBehindStops, "a text that ends is an end", "stops, and ends"),
        (TellsOfSomeTokens, "a prompt that is told about is computed as a whole", "which asks about each, are cached"),
        (KeepsTheFailed, "a failed row ends its request alone", "it has work, and no request is left"),
    ],
)
def test_a_planted_bug_of_a_scheduler_is_found(make: MakeScheduler, name: str, why: str) -> None:
    found = failed(check_scheduler(make))

    assert why in found.get(name, f"nothing, but {found}")


class NeverAdmits(FirstComePolicy):
    def admit(self, request: Request, running: object) -> bool:
        return False


class BlamesNobody(FirstComePolicy):
    def victim(self, running: object) -> int:
        return -1


class Envious(FirstComePolicy):
    def displaces(self, waiting: Request, running: Request) -> bool:
        return waiting is not running


class Unsure(FirstComePolicy):
    def order(self, request: Request) -> float:
        return float("nan")


class RemembersOthers(FirstComePolicy):
    num_asked = 0

    def order(self, request: Request) -> float:
        RemembersOthers.num_asked += 1
        return self.num_asked


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (NeverAdmits, "somebody may start when nobody runs", "r0 may not start"),
        (BlamesNobody, "the victim is one of those that run", "the victim among 1 is number -1"),
        (Envious, "nobody displaces whom it is displaced by", "displace each other"),
        (Unsure, "every place is a number", "the place of r0 is nan"),
        (RemembersOthers, "the same calls give the same places", "two policies disagree"),
    ],
)
def test_a_planted_bug_of_a_policy_is_found(make: Callable[[], SchedulingPolicy], name: str, why: str) -> None:
    found = failed(check_policy(make))

    assert why in found.get(name, f"nothing, but {found}")


def test_every_check_says_what_it_is_about() -> None:
    assert [check.__name__ for check in (*SCHEDULER_CHECKS, *POLICY_CHECKS) if not check.__doc__] == []


def test_a_scheduler_of_any_depth_can_be_checked() -> None:
    assert failed(check_scheduler(Deeper)) == {}


def test_a_scheduler_that_cannot_be_built_fails_every_check() -> None:
    def make(worker: WorkerInfo) -> Scheduler:
        raise RuntimeError("no such thing")

    assert {result.why for result in check_scheduler(make)} == {"RuntimeError: no such thing"}
