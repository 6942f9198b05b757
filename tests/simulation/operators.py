"""What befalls the servers of a simulated world from outside: crashes, upgrades, new addresses, pauses, drains.

Draws one thing after another while faults last, and mends everything at their end.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Protocol

from control_plane.engine.driver import EngineDriver
from control_plane.engine.facts import Intake, Link
from plugins.errors import InvariantBroken, WorkerTaken
from plugins.types import WorkerId, WorkerInfo
from tests.simulation.faults import FaultPlan, Point
from tests.simulation.simulated_worker import SimulatedWorker
from tests.simulation.virtual_loop import VirtualLoop

MAX_ADDRESSES = 4
MAX_FREEZE_S = 3.0


class Addresses:
    """A Discovery whose set the operators change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.now: list[str] = []

    def change(self, addresses: list[str]) -> None:
        """Tell another set."""
        self.now = addresses
        self._changed.set()

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield frozenset(self.now)


class Site(Protocol):
    """What operators can reach."""

    loop: VirtualLoop
    driver: EngineDriver
    faults: FaultPlan
    workers: dict[WorkerId, SimulatedWorker]
    addresses: Addresses
    heartbeat_s: float

    def num_live(self) -> int:
        """Requests at hand."""

    def add_worker(self, info: WorkerInfo) -> WorkerId:
        """Start another worker, whose address nobody knows yet."""


class Operators:
    """All who act on servers. `run` is one task of the world's loop; `mend` ends what it began."""

    def __init__(self, site: Site, info: WorkerInfo, draw: random.Random) -> None:
        self._site = site
        self._info = info  # of the newest generation
        self._draw = draw
        self._acts: dict[Point, Callable[[], bool]] = {
            Point.CRASH_IDLE: self._crash,
            Point.FREEZE: self._freeze,
            Point.LEAVE: self._leave,
            Point.TAKEN: self._take,
            Point.UPGRADE: self._upgrade,
            Point.ADDRESS_ADDED: self._add_address,
            Point.ADDRESS_REMOVED: self._remove_address,
            Point.STALL: self._stall,
            Point.PAUSE: self._pause,
            Point.PAUSE_WORKER: self._pause_worker,
            Point.DRAIN_WORKER: self._drain_worker,
            Point.CACHE_RESET: self._reset_cache,
        }

    async def run(self) -> None:
        """Act at random, until faults are over."""
        site = self._site
        while not site.faults.is_over:
            await asyncio.sleep(self._draw.uniform(0.01, 0.12))
            for point, act in self._acts.items():
                if site.faults.draws(point) and act():
                    site.faults.note(point, site.num_live())

    def mend(self) -> None:
        """Faults are over: whoever can serve shall."""
        site, driver = self._site, self._site.driver
        if driver.intake is Intake.PAUSED:
            driver.move_intake(Intake.OPEN)
        for worker in site.workers.values():
            worker.start()
            worker.thaw()
        known = [WorkerId(address) for address in site.addresses.now]
        for worker_id in driver.workers:
            if worker_id in known:
                driver.move_intake(Intake.OPEN, (worker_id,))
        if not any(self._is_fit(worker_id) for worker_id in known):
            site.addresses.change([*site.addresses.now, site.add_worker(self._info)])

    def _is_fit(self, worker_id: WorkerId) -> bool:
        """The worker is of the newest generation, and nobody has given it up."""
        site = self._site
        is_given_up = worker_id in site.driver.workers and site.driver.facts(worker_id).link is Link.FAILED
        return not is_given_up and site.workers[worker_id].info.weights_version == self._info.weights_version

    # -- workers ------------------------------------------------------------------------------------------------

    def _some_worker(self) -> SimulatedWorker | None:
        up = [worker for worker in self._site.workers.values() if worker.is_up]
        return self._draw.choice(up) if up else None

    def _crash(self) -> bool:
        worker = self._some_worker()
        if worker is not None:
            worker.crash()
        return worker is not None

    def _freeze(self) -> bool:
        worker = self._some_worker()
        if worker is not None and worker.thawed.is_set():
            worker.freeze(self._site.heartbeat_s * 1.5 + 0.05)
            self._site.loop.call_later(self._draw.choice((0.2, 1.2, MAX_FREEZE_S)), worker.thaw)
            return True
        return False

    def _leave(self) -> bool:
        worker = self._some_worker()
        if worker is not None:
            worker.leave()
        return worker is not None

    def _take(self) -> bool:
        worker = self._some_worker()
        if worker is not None:
            worker.break_stream(WorkerTaken("us"))
        return worker is not None

    def _upgrade(self) -> bool:
        """Restart every worker, one after the other, with other weights."""
        self._info = replace(self._info, weights_version=str(int(self._info.weights_version) + 1))
        delay_s = 0.0
        for worker in self._site.workers.values():
            self._site.loop.call_later(delay_s, worker.upgrade, self._info.weights_version)
            delay_s += self._draw.uniform(0.1, 0.5)
        return True

    # -- addresses ----------------------------------------------------------------------------------------------

    def _add_address(self) -> bool:
        site = self._site
        forgotten = [worker_id for worker_id in site.workers if worker_id not in site.addresses.now]
        if forgotten and self._draw.random() < 0.5:
            site.addresses.change([*site.addresses.now, self._draw.choice(forgotten)])
        elif len(site.workers) < MAX_ADDRESSES:
            site.addresses.change([*site.addresses.now, site.add_worker(self._info)])
        else:
            return False
        return True

    def _remove_address(self) -> bool:
        addresses = self._site.addresses
        if len(addresses.now) < 2:
            return False
        gone = self._draw.choice(addresses.now)
        addresses.change([address for address in addresses.now if address != gone])
        return True

    # -- the control plane --------------------------------------------------------------------------------------

    def _stall(self) -> bool:
        self._site.loop.stall(self._draw.choice((0.02, 0.3, 1.1)))
        return True

    def _pause(self) -> bool:
        driver = self._site.driver
        if driver.intake is not Intake.OPEN:
            return False
        driver.move_intake(Intake.PAUSED)
        self._site.loop.call_later(self._draw.uniform(0.02, 0.4), self._reopen, ())
        return True

    def _pause_worker(self) -> bool:
        return self._move_worker(Intake.PAUSED)

    def _drain_worker(self) -> bool:
        return self._move_worker(Intake.DRAINING)

    def _move_worker(self, to: Intake) -> bool:
        driver = self._site.driver
        open_ones = [each for each in driver.workers if driver.facts(each).intake is Intake.OPEN]
        if not open_ones:
            return False
        worker_id = self._draw.choice(open_ones)
        driver.move_intake(to, (worker_id,))
        if to is Intake.DRAINING:
            self._refuses_to_pause(worker_id)
        self._site.loop.call_later(self._draw.uniform(0.02, 0.4), self._reopen, (worker_id,))
        return True

    def _refuses_to_pause(self, worker_id: WorkerId) -> None:
        """What drains cannot be paused: the table of moves has no such line."""
        try:
            self._site.driver.move_intake(Intake.PAUSED, (worker_id,))
        except InvariantBroken:
            return
        raise AssertionError(f"{worker_id} was paused while it drained")

    def _reopen(self, worker_ids: tuple[WorkerId, ...]) -> None:
        driver = self._site.driver
        if not worker_ids and driver.intake is Intake.PAUSED:
            driver.move_intake(Intake.OPEN)
        known = [each for each in worker_ids if each in driver.workers and each in self._site.addresses.now]
        if known:
            driver.move_intake(Intake.OPEN, known)

    def _reset_cache(self) -> bool:
        driver = self._site.driver
        some = tuple(each for each in driver.workers if self._draw.random() < 0.5)
        driver.reset_prefix_cache(some)
        for worker_id in some or driver.workers:
            self._site.workers[worker_id].forbid_older_hits()
        return True
