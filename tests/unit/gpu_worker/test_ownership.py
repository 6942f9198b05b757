"""A worker has one owner; its epochs only grow, and its plans come in order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpu_worker.ownership import Ownership
from plugins.errors import PlanOutOfOrder, WorkerOwned


class HandClock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_ownership(lease_s: float = 5.0) -> tuple[Ownership, HandClock]:
    clock = HandClock()
    return Ownership(lease_s, clock), clock


def test_each_taking_opens_the_next_epoch() -> None:
    ownership, _ = make_ownership()

    epochs = [ownership.take("a"), ownership.take("a"), ownership.take("a")]

    assert epochs == [1, 2, 3]


def test_another_owner_is_refused_while_the_stream_is_open() -> None:
    ownership, clock = make_ownership()
    ownership.take("a")
    clock.now_s += 1000

    with pytest.raises(
        WorkerOwned, match=r"control plane 'a' owns this worker \(its lease ends 5.0 s after its stream\)"
    ):
        ownership.take("b")


def test_another_owner_is_refused_while_the_lease_runs_and_not_after_it() -> None:
    ownership, clock = make_ownership(lease_s=5.0)
    ownership.release(ownership.take("a"))

    clock.now_s += 4.9
    with pytest.raises(WorkerOwned):
        ownership.take("b")
    clock.now_s += 0.1

    assert ownership.take("b") == 2


def test_without_a_lease_the_worker_is_free_as_soon_as_the_stream_ended() -> None:
    ownership, _ = make_ownership(lease_s=0.0)
    ownership.release(ownership.take("a"))

    assert ownership.take("b") == 2


def test_the_end_of_a_replaced_stream_does_not_end_the_new_one() -> None:
    ownership, clock = make_ownership()
    old = ownership.take("a")
    ownership.take("a")

    ownership.release(old)
    clock.now_s += 1000

    with pytest.raises(WorkerOwned):
        ownership.take("b")


def test_plans_of_the_open_epoch_come_in_order_from_1() -> None:
    ownership, _ = make_ownership()
    epoch = ownership.take("a")

    ownership.accept_plan(epoch, plan_epoch=1, seq=1)
    ownership.accept_plan(epoch, plan_epoch=1, seq=2)

    with pytest.raises(PlanOutOfOrder, match="plan 4 came after plan 2 in epoch 1"):
        ownership.accept_plan(epoch, plan_epoch=1, seq=4)
    with pytest.raises(PlanOutOfOrder, match="plan 2 came after plan 2 in epoch 1"):
        ownership.accept_plan(epoch, plan_epoch=1, seq=2)


def test_a_new_epoch_starts_at_1_again() -> None:
    ownership, _ = make_ownership()
    ownership.accept_plan(ownership.take("a"), plan_epoch=1, seq=1)
    epoch = ownership.take("a")

    with pytest.raises(PlanOutOfOrder, match="plan 2 came after plan 0 in epoch 2"):
        ownership.accept_plan(epoch, plan_epoch=2, seq=2)
    ownership.accept_plan(epoch, plan_epoch=2, seq=1)


@pytest.mark.parametrize(("stream_epoch", "plan_epoch"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_a_plan_of_another_epoch_is_refused(stream_epoch: int, plan_epoch: int) -> None:
    ownership, _ = make_ownership()
    ownership.take("a")
    ownership.take("a")

    with pytest.raises(PlanOutOfOrder, match=f"plan 1 is of epoch {plan_epoch}; the worker's epoch is 2"):
        ownership.accept_plan(stream_epoch, plan_epoch, seq=1)


def test_a_plan_after_the_end_of_its_stream_is_refused() -> None:
    ownership, _ = make_ownership()
    epoch = ownership.take("a")
    ownership.release(epoch)

    with pytest.raises(PlanOutOfOrder):
        ownership.accept_plan(epoch, plan_epoch=epoch, seq=1)


def test_the_ninth_plan_without_an_answer_is_refused_and_an_answer_makes_room() -> None:
    ownership, _ = make_ownership()
    epoch = ownership.take("a")
    for seq in range(1, 9):
        ownership.accept_plan(epoch, epoch, seq)

    with pytest.raises(PlanOutOfOrder, match="plan 9 came with 8 plans unanswered, which is the most"):
        ownership.accept_plan(epoch, epoch, 9)
    ownership.note_answer(epoch)
    ownership.accept_plan(epoch, epoch, 9)


class OwnershipMachine(RuleBasedStateMachine):
    """Three owners take, release and plan at random moments, beside a model of what each may do."""

    def __init__(self) -> None:
        super().__init__()
        self.ownership, self.clock = make_ownership(lease_s=5.0)
        self.owner = ""
        self.free_at_s: float | None = 0.0  # None: a stream is open
        self.epochs: list[int] = []
        self.accepted = 0

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(owner=st.sampled_from(["a", "b", "c"]))
    def take(self, owner: str) -> None:
        is_free = self.free_at_s is not None and self.clock.now_s >= self.free_at_s
        if owner != self.owner and not is_free:
            with pytest.raises(WorkerOwned, match=f"'{self.owner}'"):
                self.ownership.take(owner)
            return
        self.epochs.append(self.ownership.take(owner))
        self.owner, self.free_at_s, self.accepted = owner, None, 0

    @rule(back=st.integers(0, 2))
    def release(self, back: int) -> None:
        if len(self.epochs) <= back:
            return
        self.ownership.release(self.epochs[-1 - back])
        if back == 0 and self.free_at_s is None:
            self.free_at_s = self.clock.now_s + 5.0

    @rule(back=st.integers(0, 1), gap=st.integers(0, 1))
    def plan(self, back: int, gap: int) -> None:
        if len(self.epochs) <= back:
            return
        epoch, seq = self.epochs[-1 - back], self.accepted + 1 + gap
        if back or gap or self.free_at_s is not None or self.accepted == 8:
            with pytest.raises(PlanOutOfOrder):
                self.ownership.accept_plan(epoch, epoch, seq)
            return
        self.ownership.accept_plan(epoch, epoch, seq)
        self.accepted += 1

    @invariant()
    def epochs_only_grow(self) -> None:
        assert self.epochs == sorted(set(self.epochs))
        assert self.ownership.epoch == (self.epochs[-1] if self.epochs else 0)


TestOwnershipMachine = OwnershipMachine.TestCase
TestOwnershipMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
