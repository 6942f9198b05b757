"""Brings the engine's numbers to the metrics, a few times a second.

Sums and differences only; what the numbers mean is told in `plugins/metrics.py`.
"""

from control_plane.engine.core import EngineCore
from control_plane.engine.facts import Link
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
    Metrics,
)
from plugins.scheduler import SchedulerLoad
from plugins.types import WorkerId, WorkerInfo

COUNTERS = (
    (PREEMPTIONS, "num_preemptions"),
    (PREFIX_TOKENS, "num_prefix_tokens"),
    (PREFIX_HITS, "num_prefix_hits"),
)


class Gauges:
    """What was told of each worker. Owned by the driver.

    A scheduler counts from its own beginning, and a worker that comes back has another one: differences are taken
    per worker, and a number that fell began anew.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: dict[WorkerId, SchedulerLoad] = {}
        self.is_stale = False  # something may have changed since the last report

    def add(self, worker_id: WorkerId, worker: WorkerInfo) -> None:
        """A worker was attached, with a scheduler that has counted nothing yet."""
        self._told.pop(worker_id, None)
        self._metrics.set(KV_BLOCK_SIZE, worker.block_size, worker_id)
        self.is_stale = True

    def remove(self, worker_id: WorkerId) -> None:
        """A worker is known no longer, and neither is its link."""
        self._told.pop(worker_id, None)
        self._metrics.remove(WORKER_LINK, worker_id)
        self._metrics.remove(KV_BLOCK_SIZE, worker_id)
        self.is_stale = True

    def report(self, core: EngineCore) -> None:
        """Tell everything there is."""
        self.is_stale = False
        for worker_id in core.workers:
            load = core.worker_load(worker_id)
            self._metrics.set(WORKER_LINK, core.facts(worker_id).link is Link.LIVE, worker_id)
            for metric, field in COUNTERS:
                before = getattr(self._told[worker_id], field) if worker_id in self._told else 0
                now = getattr(load, field)
                if now != before:
                    self._metrics.count(metric, now - before if now > before else now)
            self._told[worker_id] = load
        total = core.load()
        self._metrics.set(RUNNING, total.num_running)
        self._metrics.set(WAITING, total.num_waiting)
        self._metrics.set(KV_BLOCKS, total.num_blocks)
        self._metrics.set(KV_CACHED_BLOCKS, total.num_cached_blocks)
        self._metrics.set(KV_USAGE, 1 - total.num_free_blocks / total.num_blocks if total.num_blocks else 0)
