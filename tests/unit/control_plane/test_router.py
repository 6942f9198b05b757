"""The routers by example."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from control_plane.engine.router import LeastLoad, PowerOfTwo, PrefixAffinity, RoundRobin, Router, make_router, work
from control_plane.scheduling.config import SchedulerConfig
from plugins.errors import InvalidConfig
from plugins.scheduler import SchedulerLoad
from plugins.types import Request, RequestId
from tests.unit.control_plane.driving import Cluster, asking

REQUEST = asking("a")


@dataclass(frozen=True)
class Worker:
    """A worker with so many tokens to compute before a new request, and so many of its prompt cached."""

    num_tokens: int = 0
    num_cached: int = 0
    num_running: int = 0

    def load(self) -> SchedulerLoad:
        return SchedulerLoad(
            num_running=self.num_running,
            num_waiting=0,
            num_waiting_tokens=self.num_tokens,
            num_blocks=9,
            num_free_blocks=9,
        )

    def num_cached_tokens(self, request: Request) -> int:
        assert request is REQUEST
        return self.num_cached


class Drawn:
    """Chance that was decided before."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = list(numbers)
        self.limits: list[int] = []

    def __call__(self, limit: int) -> int:
        self.limits.append(limit)
        return self._numbers.pop(0)


def choices(router: Router, workers: Sequence[Worker], times: int) -> list[int]:
    return [router.choose(REQUEST, workers) for _ in range(times)]


def test_work_is_what_waits_what_is_half_done_and_64_tokens_for_each_that_runs() -> None:
    load = SchedulerLoad(
        num_running=3, num_waiting=2, num_waiting_tokens=100, num_uncomputed_tokens=20, num_blocks=1, num_free_blocks=0
    )

    assert work(load) == 312


def test_round_robin_takes_one_after_the_other_however_busy() -> None:
    assert choices(RoundRobin(), [Worker(900), Worker(), Worker()], 5) == [0, 1, 2, 0, 1]


def test_round_robin_goes_on_when_workers_come_and_go() -> None:
    router = RoundRobin()

    assert choices(router, [Worker()] * 3, 2) == [0, 1]
    assert choices(router, [Worker()] * 2, 3) == [0, 1, 0]


def test_power_of_two_takes_the_less_busy_of_two_different_ones() -> None:
    workers = [Worker(50), Worker(10), Worker(30), Worker(0)]
    # The second draw counts on from the first: 2 + 1 + 2 is worker 1 of 4.
    drawn = Drawn(2, 2, 0, 1, 0, 2)

    assert choices(PowerOfTwo(drawn), workers, 3) == [1, 2, 3]
    assert drawn.limits == [4, 3, 4, 3, 4, 3]


def test_power_of_two_draws_nothing_for_a_lone_worker() -> None:
    assert choices(PowerOfTwo(Drawn()), [Worker(50)], 2) == [0, 0]


def test_least_load_takes_the_least_busy_and_equals_in_turn() -> None:
    assert choices(LeastLoad(), [Worker(9), Worker(5), Worker(7)], 2) == [1, 1]
    assert choices(LeastLoad(), [Worker(5), Worker(9), Worker(5)], 3) == [0, 2, 2]
    assert choices(LeastLoad(), [Worker(), Worker(), Worker()], 4) == [0, 1, 2, 0]


def test_least_load_counts_who_runs() -> None:
    assert choices(LeastLoad(), [Worker(num_running=2), Worker(127)], 1) == [1]
    assert choices(LeastLoad(), [Worker(num_running=2), Worker(129)], 1) == [0]


def test_a_prompt_follows_its_prefix_until_the_queue_there_is_longer_than_computing_it_anew() -> None:
    idle = Worker()

    assert choices(PrefixAffinity(), [idle, Worker(0, num_cached=480)], 3) == [1, 1, 1]
    assert choices(PrefixAffinity(), [idle, Worker(479, num_cached=480)], 1) == [1]
    assert choices(PrefixAffinity(), [idle, Worker(481, num_cached=480)], 1) == [0]


def test_of_two_workers_with_the_same_prefix_the_less_busy_one_is_taken() -> None:
    workers = [Worker(100, num_cached=64), Worker(50, num_cached=64), Worker(60, num_cached=0)]

    assert choices(PrefixAffinity(), workers, 1) == [1]


def test_prompts_that_are_cached_nowhere_are_spread() -> None:
    assert choices(PrefixAffinity(), [Worker(), Worker()], 4) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("name", "router"),
    [
        ("prefix_affinity", PrefixAffinity),
        ("least_load", LeastLoad),
        ("power_of_two", PowerOfTwo),
        ("round_robin", RoundRobin),
    ],
)
def test_a_router_is_made_by_its_name(name: str, router: type) -> None:
    assert type(make_router(name, Drawn())) is router


def test_an_unknown_router_is_named_with_those_there_are() -> None:
    with pytest.raises(
        InvalidConfig,
        match="workers.router must be one of least_load, power_of_two, prefix_affinity, round_robin, is 'best'",
    ):
        make_router("best", Drawn())


def test_prompts_go_where_real_schedulers_have_their_beginning() -> None:
    cluster = Cluster(router=PrefixAffinity(), config=SchedulerConfig(prefix_hash_key="a key for these tests"))
    cluster.attach("w1")
    cluster.attach("w2")
    cluster.submit(asking("a", range(3, 23)), asking("b", range(50, 70)))
    cluster.finish_all()

    cluster.submit(asking("c", range(50, 75)), asking("d", range(3, 25)))
    cluster.finish_all()

    assert cluster.placed() == {"a": "w1", "b": "w2", "c": "w2", "d": "w1"}
    assert cluster.ends[RequestId("c")].num_cached_tokens == 20
