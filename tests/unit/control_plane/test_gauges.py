"""What the metrics are told of the engine, a worker's return included."""

import pytest

from control_plane.engine.gauges import Gauges
from control_plane.scheduling.config import SchedulerConfig
from plugins.metrics import (
    KV_BLOCK_SIZE,
    KV_BLOCKS,
    KV_CACHED_BLOCKS,
    KV_USAGE,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_TOKENS,
    RUNNING,
    WAITING,
    WORKER_LINK,
    Metric,
)
from plugins.types import WorkerId
from tests.fakes import worker_info
from tests.unit.control_plane.driving import Cluster, asking

W = WorkerId("w")


class Told:
    """Metrics that remember."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}

    def count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        assert amount >= 0
        self.values[metric.name, *labels] = self.values.get((metric.name, *labels), 0) + amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        self.values[metric.name, *labels] = value

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        raise AssertionError("gauges observe nothing")

    def remove(self, metric: Metric, *labels: str) -> None:
        self.values.pop((metric.name, *labels), None)

    def of(self, metric: Metric, *labels: str) -> float | None:
        return self.values.get((metric.name, *labels))


def test_gauges_tell_the_sum_over_all_workers() -> None:
    told = Told()
    gauges = Gauges(told)
    cluster = Cluster(config=SchedulerConfig(max_sequences=1))
    cluster.attach("w")
    cluster.attach("v", info=worker_info(num_blocks=16))
    cluster.submit(*(asking(name) for name in "abc"))
    cluster.step()

    gauges.report(cluster.core)

    assert (told.of(RUNNING), told.of(WAITING)) == (2, 1)
    assert (told.of(KV_BLOCKS), told.of(KV_CACHED_BLOCKS)) == (80, 0)
    assert told.of(KV_USAGE) == pytest.approx(0.05)  # 4 of 80
    assert (told.of(WORKER_LINK, "w"), told.of(WORKER_LINK, "v")) == (1, 1)


def test_counters_grow_by_what_happened_since_the_last_report() -> None:
    told = Told()
    gauges = Gauges(told)
    cluster = Cluster()
    cluster.attach("w")
    cluster.submit(asking("a", range(3, 13)))
    cluster.finish_all()
    gauges.report(cluster.core)
    first = (told.of(PREFIX_TOKENS), told.of(PREFIX_HITS))
    cluster.submit(asking("b", range(3, 13)))
    cluster.finish_all()
    gauges.report(cluster.core)
    gauges.report(cluster.core)

    assert first == (10, None)
    assert (told.of(PREFIX_TOKENS), told.of(PREFIX_HITS)) == (20, 8)


def test_a_worker_that_comes_back_counts_from_its_beginning_and_loses_nothing() -> None:
    told = Told()
    gauges = Gauges(told)
    cluster = Cluster()
    cluster.attach("w")
    gauges.add(W, worker_info())
    cluster.submit(asking("a", range(3, 13)))
    cluster.finish_all()
    gauges.report(cluster.core)
    cluster.kill("w")
    gauges.report(cluster.core)
    down = told.of(WORKER_LINK, "w")

    cluster.attach("w")
    gauges.add(W, worker_info())
    cluster.submit(asking("b", range(3, 15)))  # more than it had counted before
    cluster.finish_all()
    gauges.report(cluster.core)

    assert (down, told.of(WORKER_LINK, "w")) == (0, 1)
    assert told.of(PREFIX_TOKENS) == 22


def test_a_worker_that_comes_back_between_two_reports_loses_nothing_either() -> None:
    told = Told()
    gauges = Gauges(told)
    cluster = Cluster()
    for prompt in (range(3, 13), range(3, 15)):
        cluster.attach("w")
        gauges.add(W, worker_info())
        cluster.submit(asking("a", prompt))
        cluster.finish_all()
        gauges.report(cluster.core)
        cluster.kill("w")
        cluster.ends.clear()

    assert told.of(PREFIX_TOKENS) == 22


def test_preemptions_are_counted() -> None:
    told = Told()
    cluster = Cluster(config=SchedulerConfig(watermark_ratio=0.0))
    cluster.attach("w", info=worker_info(num_blocks=4))
    cluster.submit(asking("a", range(10, 18)), asking("b", range(20, 27)))
    cluster.finish_all()

    Gauges(told).report(cluster.core)

    assert told.of(PREEMPTIONS) == 1


def test_a_removed_worker_is_told_of_no_longer_and_without_any_the_cache_is_unused() -> None:
    told = Told()
    gauges = Gauges(told)
    cluster = Cluster()
    cluster.attach("w")
    gauges.add(W, worker_info(block_size=4))
    gauges.report(cluster.core)
    up, block_size = told.of(WORKER_LINK, "w"), told.of(KV_BLOCK_SIZE, "w")
    cluster.kill("w")
    cluster.core.remove(W)

    gauges.remove(W)
    is_stale = gauges.is_stale
    gauges.report(cluster.core)

    assert (is_stale, gauges.is_stale) == (True, False)
    assert (up, told.of(WORKER_LINK, "w")) == (1, None)
    assert (told.of(KV_USAGE), told.of(KV_BLOCKS)) == (0, 0)
    assert (block_size, told.of(KV_BLOCK_SIZE, "w")) == (4, None)
