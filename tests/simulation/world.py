"""One seed's world: the whole control plane, its workers, clients and operators, in one thread on a virtual clock.

Puts the real classes together as `control_plane/app.py` does; what goes wrong in it is drawn by the other modules.
"""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from control_plane.admission.validator import Validator
from control_plane.engine.driver import EngineDriver
from control_plane.engine.facts import Intake
from control_plane.engine.generations import Generations
from control_plane.engine.router import make_router
from control_plane.engine.scheduler_choice import choose_scheduler
from control_plane.engine.served import ServedModels
from control_plane.scheduling.run_ahead import RunAheadScheduler
from control_plane.text.model import TextModel
from control_plane.workers.fleet import WorkerFleet
from plugins.errors import QueryOfDeath
from plugins.kv_events import BlocksCleared, BlocksRemoved, BlocksStored
from plugins.metrics import NoMetrics
from plugins.scheduler import Scheduler
from plugins.types import RequestId, StepPlan, StepResult, TokenizerBundle, WorkerId, WorkerInfo
from tests.fakes import FakeWorker
from tests.simulation.checked import CheckedCore, PlanWatcher
from tests.simulation.clients import Client
from tests.simulation.drawing import draw_settings, draw_stories
from tests.simulation.faults import LETHAL, FaultPlan, Point
from tests.simulation.operators import MAX_FREEZE_S, Addresses, Operators
from tests.simulation.simulated_worker import SimulatedHandle, SimulatedWorker
from tests.simulation.tokenizer import bundle, text_model
from tests.simulation.virtual_loop import VirtualLoop

CALM_S = 60.0  # within so long after the last fault every request has ended
MAX_KILLED = 3  # by one request that kills whoever computes it
RECONNECT_S = 5.0  # within so long after the last fault a worker serves again
WATCH_S = 0.4


@dataclass(frozen=True, slots=True)
class Report:
    """What one seed showed."""

    seed: int
    trace: str  # a hash of everything that was decided and delivered
    fired: Counter[Point]
    fired_live: Counter[Point]
    pairs: Counter[tuple[str, str]]
    seen: Counter[str]


def simulate(seed: int) -> Report:
    """Play one seed to its end. Raises: AssertionError and others: a promise was broken."""
    loop = VirtualLoop()
    try:
        world = World(seed, loop)
        loop.set_exception_handler(world.on_stray_error)
        loop.run_until_complete(world.run())
        assert not asyncio.all_tasks(loop), "tasks are left"
        return world.report()
    finally:
        _end_tasks(loop)
        loop.close()


def _end_tasks(loop: VirtualLoop) -> None:
    """Let what a failure has left end quietly: the failure is what is told."""
    loop.set_exception_handler(lambda loop, context: None)
    tasks = sorted(asyncio.all_tasks(loop), key=asyncio.Task.get_name)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=CALM_S))


class World:
    """Everything there is in one seed. `run` plays it."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.seed = seed
        self.loop = loop
        self.faults = FaultPlan(seed)
        settings = draw_settings(seed, self.faults)
        self.admission = settings.admission
        self.heartbeat_s = settings.workers.heartbeat_s
        self.live: dict[RequestId, Client] = {}
        self.stale: list[StepResult] = []
        self.seen: Counter[str] = Counter()
        self.workers: dict[WorkerId, SimulatedWorker] = {}
        self.addresses = Addresses()
        self._draw = random.Random(f"world of {seed}")
        self._knows = FakeWorker()
        self._num_taken = 0
        self._deadly: set[RequestId] = set()
        self._names: set[RequestId] = set()  # that were ever taken
        self._calm_at: float | None = None
        self._failed: asyncio.Future[None] = loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._settings = settings
        self.watcher = PlanWatcher(self, settings.scheduler.policy == "fcfs")
        self._core = CheckedCore(
            self,
            settings.scheduler.policy == "fcfs",
            make_scheduler=choose_scheduler(settings.scheduler, self._raising_scheduler()),
            limits=settings.admission,
            router=make_router(settings.router, random.Random(f"router of {seed}").randrange),
            recovery_timeout_s=settings.workers.recovery_timeout_s,
        )
        self.driver = EngineDriver(
            self._core, NoMetrics(), loop.time, settings.admission, settings.workers.step_timeout_s
        )
        models = ServedModels()
        self._fleet = WorkerFleet(
            settings.workers,
            self.addresses,
            self._make_handle,
            self.driver,
            models,
            Generations(),
            on_change=lambda names: None,
            read_tokenizer=_read_tokenizer,
            jitter=random.Random(f"jitter of {seed}").random,
        )
        self.validator = Validator(models, settings.admission, draw_seed=lambda: 0)
        self._operators = Operators(self, settings.info, random.Random(f"operators of {seed}"))
        self._stories = draw_stories(seed, self.faults, settings)

    async def run(self) -> None:
        """Play, calm down, and look at what is left. Raises: whatever breaks a promise."""
        for _ in range(self._settings.num_workers):
            self.addresses.now.append(self.add_worker(self._settings.info))
        self.addresses.change(self.addresses.now)
        for work in (self.driver.run(), self._fleet.run(), self._watch(), self._operators.run()):
            self._start(work)
        if self._settings.subscribes:
            self._start(self._follow_cache())
        players = [Client(story, self) for story in self._stories]  # each plays all outputs of its request
        clients = [asyncio.create_task(player.run(), name=player.request_id) for player in players]
        for client in clients:
            client.add_done_callback(self._note_end)
        last = self._stories[-1].arrives_at
        await self._or_failure(asyncio.sleep(last + self._draw.uniform(0.2, 1.0)))
        await self._calm_down()
        await self._or_failure(self._all_ended(clients))
        await self._or_failure(asyncio.sleep(1.0))
        self._core.check_idle()
        self._check_the_culprit(players)
        assert not self.driver._readers, f"readers are left: {sorted(self.driver._readers)}"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._failed.cancel()
        await asyncio.sleep(MAX_FREEZE_S + 1.0)  # the operators' own timers run out
        assert self.loop.num_timers() == 0, f"{self.loop.num_timers()} timers are left"

    def report(self) -> Report:
        """What the seed showed."""
        faults = self.faults
        trace = self._core.trace.hexdigest()
        return Report(self.seed, trace, faults.fired, faults.fired_live, faults.pairs, self.seen)

    async def _calm_down(self) -> None:
        """No fault from here on; every request must end in its time."""
        faults = self.faults
        if faults.chooses(Point.SERVER_DRAIN):
            faults.note(Point.SERVER_DRAIN, self.num_live())
            if self.driver.intake is Intake.PAUSED:
                self.driver.move_intake(Intake.OPEN)
            self._start(self._drain())
        faults.is_over = True
        self._operators.mend()
        self._calm_at = self.loop.time()

    async def _drain(self) -> None:
        assert await self.driver.drain(CALM_S), "the drain left requests"
        assert not self.live, f"the drain left {sorted(self.live)}"

    async def _all_ended(self, clients: list[asyncio.Task[None]]) -> None:
        _, waiting = await asyncio.wait(clients, timeout=CALM_S)
        names = sorted(task.get_name() for task in waiting)
        assert not waiting, f"{names} have not ended {CALM_S:g} s after the last fault"

    def _check_the_culprit(self, clients: list[Client]) -> None:
        """Where one request alone kills workers, nobody else ends for it, and it is found soon.

        Two deaths are enough where nobody else is in doubt; newcomers beside it share the blame and cost one more.
        """
        deadly = [client for client in clients if client.story.is_deadly and client.arrival]
        if len(deadly) == 1 and not any(self.faults.fired[point] for point in LETHAL):
            num_killed = self.faults.fired[Point.QUERY_OF_DEATH]
            assert num_killed <= MAX_KILLED, f"{deadly[0].request_id} killed {num_killed} workers"
            ended = [client.request_id for client in clients if isinstance(client.error, QueryOfDeath)]
            assert ended in ([], [deadly[0].request_id]), f"{ended} ended for {deadly[0].request_id}"
            self.count(f"culprit found after {num_killed} deaths")

    # -- who is told what ---------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds on the virtual clock."""
        return self.loop.time()

    def num_live(self) -> int:
        """Requests at hand."""
        return len(self.live)

    def count(self, what: str) -> None:
        """Note that something happened that a seed should meet now and then."""
        self.seen[what] += 1

    def may_refuse(self) -> bool:
        """True while there may be no worker, or the server may be draining."""
        is_calm = self._calm_at is not None and self.now() > self._calm_at + RECONNECT_S
        return not is_calm or self.driver.intake is Intake.DRAINING

    def on_request(self, client: Client) -> None:
        """A request was taken: workers know where its model says the end."""
        story, request_id = client.story, client.request_id
        if request_id in self._names:
            self.faults.note(Point.ID_REUSED, len(self.live) + 1)
        self._names.add(request_id)
        self.live[request_id] = client
        self._num_taken += 1
        client.arrival = self._num_taken
        self._knows.salts[request_id] = story.salt
        self._knows.eos_after.pop(request_id, None)
        if story.ends_after is not None:
            self._knows.eos_after[request_id] = story.ends_after
        self._knows.siblings.discard(request_id)
        if story.leader is not None:
            self._knows.siblings.add(request_id)
        self._deadly.discard(request_id)
        if story.is_deadly:
            self._deadly.add(request_id)

    def on_taken(self, worker: SimulatedWorker) -> None:
        """A worker has a new owner's stream."""
        self.watcher.forget(worker.worker_id)

    def on_stale(self, result: StepResult) -> None:
        """A result is sent whose epoch is over: the engine must not see it."""
        self.stale.append(result)

    def before_plan(self, worker: SimulatedWorker, plan: StepPlan) -> None:
        """A plan is about to be computed."""
        rows = worker.fake.rows
        decoding = {row for row, held in rows.items() if held.num_computed >= len(held.admission.token_ids)}
        self.watcher.before(worker.worker_id, plan, decoding)

    def after_plan(self, worker: SimulatedWorker, plan: StepPlan, result: StepResult) -> None:
        """A plan was computed."""
        self.watcher.after(worker.worker_id, plan, result)

    # -- the pieces ---------------------------------------------------------------------------------------------

    def add_worker(self, info: WorkerInfo) -> WorkerId:
        """Start another worker, whose address nobody knows yet."""
        worker_id = WorkerId(f"w{len(self.workers)}:1")
        draw = random.Random(f"worker {worker_id} of {self.seed}")
        info = replace(info, tokenizer_sha256=hashlib.sha256(bundle().tokenizer_json).hexdigest())
        self.workers[worker_id] = SimulatedWorker(
            worker_id, info, bundle(), self.loop, self.faults, self, self._knows, self._deadly, draw
        )
        if self.faults.is_active(Point.POOL_TIGHT):
            self.faults.note(Point.POOL_TIGHT, len(self._stories))
        return worker_id

    def _make_handle(self, address: str) -> SimulatedHandle:
        owner_id = self._settings.workers.owner_id or ""
        return SimulatedHandle(self.workers[WorkerId(address)], owner_id, is_guarded=self._draw.random() < 0.5)

    def _raising_scheduler(self) -> type[Scheduler] | None:
        """A plug-in that raises now and then; None where the seed has none."""
        if not self.faults.is_active(Point.SCHEDULER_RAISES):
            return None
        world = self

        class RaisingScheduler(RunAheadScheduler):
            def schedule(self, throttle_prefills: bool = False) -> StepPlan:
                if world.faults.draws(Point.SCHEDULER_RAISES):
                    world.faults.note(Point.SCHEDULER_RAISES, world.num_live())
                    raise RuntimeError("this plug-in is broken")
                return super().schedule(throttle_prefills)

        return RaisingScheduler

    # -- watching -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Nobody who has something to do may sleep. After a standstill everybody has a while to wake up."""
        before: dict[WorkerId, int] = {}
        stalled_s = 0.0
        while True:
            await asyncio.sleep(WATCH_S)
            asleep = {worker_id: self._core.num_plans[worker_id] for worker_id in self._core.stalled()}
            if self.loop.stalled_s == stalled_s:
                for worker_id, num_plans in asleep.items():
                    assert before.get(worker_id) != num_plans, f"{worker_id} has work, and nobody woke the engine"
            before, stalled_s = asleep, self.loop.stalled_s

    async def _follow_cache(self) -> None:
        """Read what is told of cached blocks, and keep the books of an outside router."""
        subscription = self.driver.kv_events()
        known: dict[WorkerId, set[bytes]] = {}
        try:
            async for worker_id, event in subscription:
                self.count(type(event).__name__)
                blocks = known.setdefault(worker_id, set())
                match event:
                    case BlocksStored():
                        assert blocks.isdisjoint(event.block_hashes), f"{worker_id} stores a block twice"
                        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                        blocks.update(event.block_hashes)
                    case BlocksRemoved():
                        assert blocks.issuperset(event.block_hashes), f"{worker_id} removes a block it did not store"
                        blocks.difference_update(event.block_hashes)
                    case BlocksCleared():
                        blocks.clear()
        finally:
            subscription.close()

    def on_stray_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback or a forgotten task raised."""
        error = context.get("exception") or AssertionError(context["message"])
        if not self._failed.done():
            self._failed.set_exception(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._note_end)
        self._tasks.append(task)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _or_failure(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something, unless anything fails meanwhile: that is raised."""
        task = asyncio.create_task(work)
        await asyncio.wait((task, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            task.cancel()
            self._failed.result()
        task.result()


async def _read_tokenizer(bundle: TokenizerBundle) -> TextModel:
    return text_model()
