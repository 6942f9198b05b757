"""The service that operators call: how the control plane and its workers are, and what new requests meet.

Reports and passes on; the facts belong to the engine, connections and generations to the fleet.
"""

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import grpc

from control_plane.admission.config import AdmissionConfig
from control_plane.api.kv_messages import encode_kv_event
from control_plane.api.reader_watch import ReaderWatch
from control_plane.api.worker_messages import INTAKES, encode_worker
from control_plane.engine.facts import INTAKE_MOVES, Facts, Intake
from control_plane.workers.supervisor import WorkerView
from plugins.errors import IllegalMove, UnknownWorker
from plugins.kv_events import KvEvent
from plugins.scheduler import SchedulerLoad
from plugins.types import ProcessorInfo, WorkerId
from protos.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.codec_info import encode_processor_info

Context = grpc.aio.ServicerContext[Any, Any]


class KvSubscription(Protocol):
    """What happens to cached blocks, from the moment it was made; the events of one worker come in order."""

    def __aiter__(self) -> AsyncIterator[tuple[WorkerId, KvEvent]]:
        """Iterate over the events. Raises: SubscriberTooSlow: some are lost."""

    def close(self) -> None:
        """Collect no more."""


class Engine(Protocol):
    """What operators want of the engine. Unknown workers and illegal moves are refused before it is asked."""

    @property
    def intake(self) -> Intake:
        """Of the whole control plane."""

    def load(self) -> SchedulerLoad:
        """Tell how busy all workers are together."""

    def worker_load(self, worker_id: WorkerId) -> SchedulerLoad:
        """Tell how busy one worker is."""

    def facts(self, worker_id: WorkerId) -> Facts:
        """The four facts of one worker, to read."""

    def move_intake(self, to: Intake, worker_ids: Sequence[WorkerId] = ()) -> None:
        """Open, pause or drain some workers; none: the whole control plane."""

    def reset_prefix_cache(self, worker_ids: Sequence[WorkerId] = ()) -> None:
        """Forget the cached prompts of some workers; none: of all."""

    def kv_events(self) -> KvSubscription:
        """Follow the cached blocks of all workers from now on."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Speaks for one control plane and its workers. Lives on the control plane's event loop.

    `views` returns the known workers, sorted. At each change by an operator `on_open` is told whether the whole control
    plane lets requests in, and `on_workers` that some of its workers do, or do no longer.
    """

    def __init__(
        self,
        engine: Engine,
        views: Callable[[], Sequence[WorkerView]],
        config: AdmissionConfig,
        on_open: Callable[[bool], object],
        on_workers: Callable[[], object],
        version: str,
        clock: Callable[[], float],
        processors: Sequence[ProcessorInfo] = (),
    ) -> None:
        self._processors = processors
        self._engine = engine
        self._views = views
        self._config = config
        self._on_open = on_open
        self._on_workers = on_workers
        self._version = version
        self._clock = clock  # seconds, monotonic
        self._started_at = clock()

    async def GetServerInfo(
        self, request: admin_pb2.GetServerInfoRequest, context: Context
    ) -> admin_pb2.GetServerInfoResponse:
        load = self._engine.load()
        return admin_pb2.GetServerInfoResponse(
            version=self._version,
            uptime_s=self._clock() - self._started_at,
            intake=INTAKES[self._engine.intake],
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            max_waiting=self._config.max_waiting,
            num_waiting_tokens=load.num_waiting_tokens,
            max_waiting_tokens=self._config.max_waiting_tokens,
        )

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: Context
    ) -> admin_pb2.ListWorkersResponse:
        workers = [
            encode_worker(view, self._engine.facts(view.worker_id), self._engine.worker_load(view.worker_id))
            for view in self._views()
        ]
        return admin_pb2.ListWorkersResponse(workers=workers)

    async def Pause(self, request: admin_pb2.PauseRequest, context: Context) -> admin_pb2.PauseResponse:
        return admin_pb2.PauseResponse(intake=self._move(Intake.PAUSED, request.worker_ids))

    async def ResumeIntake(
        self, request: admin_pb2.ResumeIntakeRequest, context: Context
    ) -> admin_pb2.ResumeIntakeResponse:
        return admin_pb2.ResumeIntakeResponse(intake=self._move(Intake.OPEN, request.worker_ids))

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        return admin_pb2.DrainResponse(intake=self._move(Intake.DRAINING, request.worker_ids))

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        worker_ids = self._named(request.worker_ids)
        self._engine.reset_prefix_cache(worker_ids)
        return admin_pb2.ResetPrefixCacheResponse(worker_ids=worker_ids or self._known())

    async def ListPlugins(
        self, request: admin_pb2.ListPluginsRequest, context: Context
    ) -> admin_pb2.ListPluginsResponse:
        return admin_pb2.ListPluginsResponse(
            logits_processors=[encode_processor_info(each) for each in self._processors]
        )

    async def SubscribeKvEvents(  # type: ignore[override]  # the stub knows generators alone, which cannot be watched
        self, request: admin_pb2.SubscribeKvEventsRequest, context: Context
    ) -> None:
        seqs: defaultdict[WorkerId, int] = defaultdict(int)
        with contextlib.closing(self._engine.kv_events()) as events:
            async with ReaderWatch(context, self._config.max_unread_s) as watch:
                await watch.write(admin_pb2.SubscribeKvEventsResponse(subscribed=admin_pb2.Subscribed()))
                async for worker_id, event in events:
                    seqs[worker_id] += 1
                    message = encode_kv_event(worker_id, seqs[worker_id], event)
                    await watch.write(admin_pb2.SubscribeKvEventsResponse(event=message))

    def _move(self, to: Intake, names: Sequence[str]) -> admin_pb2.IntakeReport:
        """Move all that are named, or none of them. Raises: UnknownWorker, IllegalMove."""
        worker_ids = self._named(names)
        moving = {f"intake of worker {each!r}": self._engine.facts(each).intake for each in worker_ids}
        for what, now in (moving or {"intake of the server": self._engine.intake}).items():
            if to is not now and to not in INTAKE_MOVES[now]:
                raise IllegalMove(what, now.name, to.name, sorted(legal.name for legal in INTAKE_MOVES[now]))
        self._engine.move_intake(to, worker_ids)
        if worker_ids:
            self._on_workers()
        else:
            self._on_open(to is Intake.OPEN)
        workers = [
            admin_pb2.WorkerIntake(worker_id=each, intake=INTAKES[self._engine.facts(each).intake])
            for each in self._known()
        ]
        return admin_pb2.IntakeReport(server=INTAKES[self._engine.intake], workers=workers)

    def _named(self, names: Sequence[str]) -> tuple[WorkerId, ...]:
        """Return the named workers, each once. Raises: UnknownWorker."""
        known = self._known()
        for name in names:
            if name not in known:
                raise UnknownWorker(name, known)
        return tuple(dict.fromkeys(map(WorkerId, names)))

    def _known(self) -> tuple[WorkerId, ...]:
        return tuple(view.worker_id for view in self._views())
