"""A real server on a free port, with an engine whose output the test writes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.validator import Validator
from control_plane.api.admin import AdminServicer
from control_plane.api.config import ServerConfig
from control_plane.api.health import HealthServicer
from control_plane.api.inference import InferenceServicer
from control_plane.api.server import ApiServer
from control_plane.engine.facts import Facts, Intake
from control_plane.engine.served import ServedModel
from control_plane.engine.stopping import StopWatcher
from control_plane.engine.streams import OutputStream
from control_plane.workers.supervisor import WorkerView
from plugins.errors import DuplicateRequest, RequestCancelled, ServingError
from plugins.kv_events import KvEvent
from plugins.metrics import Metric
from plugins.scheduler import SchedulerLoad
from plugins.types import FinishReason, GenerationId, Request, RequestId, TokenId, TokenLogprobs, WorkerId
from protos.admin.v1 import admin_pb2_grpc
from protos.channel import channel_options
from protos.inference.v1 import inference_pb2_grpc
from tests.unit.control_plane.admission.models import directory, served_model


class ScriptedEngine:
    """Takes every request unless told to refuse, and gives out what `answer` says, or what the test puts later."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.generations: list[GenerationId] = []
        self.streams: dict[RequestId, OutputStream] = {}
        self.deadlines: list[float | None] = []
        self.max_queues: list[float] = []
        self.watchers: dict[RequestId, StopWatcher | None] = {}
        self.cancelled: list[RequestId] = []
        self.answer: Sequence[tuple[Sequence[int], FinishReason | None, ServingError | None]] = ()
        self.num_cached_tokens = 0
        self.refusal: Exception | None = None
        self.submitted = asyncio.Event()
        self.cancel_seen = asyncio.Event()
        self.intake = Intake.OPEN
        self.workers: dict[WorkerId, Facts] = {}
        self.resets: list[tuple[WorkerId, ...]] = []
        self.subscription = ScriptedSubscription()

    def submit(
        self,
        requests: Sequence[Request],
        generation: GenerationId,
        deadline_s: float | None,
        max_queue_s: float,
        watchers: Sequence[StopWatcher | None] | None = None,
    ) -> list[OutputStream]:
        if self.refusal is not None:
            raise self.refusal
        for request in requests:
            live = self.streams.get(request.request_id)
            if live is not None and not live.is_ended:
                raise DuplicateRequest(request.request_id)
        self.max_queues.append(max_queue_s)
        for request, watcher in zip(requests, watchers or [None] * len(requests), strict=True):
            self.watchers[request.request_id] = watcher
        return [self._start(request, generation, deadline_s) for request in requests]

    def _start(self, request: Request, generation: GenerationId, deadline_s: float | None) -> OutputStream:
        stream = OutputStream()
        self.requests[request.request_id] = request
        self.generations.append(generation)
        self.streams[request.request_id] = stream
        self.deadlines.append(deadline_s)
        for token_ids, finish, error in self.answer:
            self.put(request.request_id, token_ids, finish, error)
        self.submitted.set()
        return stream

    def put(
        self,
        request_id: str,
        token_ids: Sequence[int],
        finish: FinishReason | None = None,
        error: ServingError | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Output of a request, at time 0; its watcher, if it has one, may end it."""
        watcher = self.watchers[RequestId(request_id)]
        num_kept = watcher.push(list(map(TokenId, token_ids)), finish is FinishReason.STOP) if watcher else None
        if num_kept is not None:
            token_ids, finish = token_ids[:num_kept], FinishReason.STOP
        self.streams[RequestId(request_id)].put(
            tuple(map(TokenId, token_ids)),
            finish,
            error,
            0.0,
            self.num_cached_tokens,
            tuple(logprobs),
            tuple(prompt_logprobs),
        )

    async def taken(self, request_id: str) -> None:
        """Wait until the server has taken what there is of a request."""
        while self.streams[RequestId(request_id)].unread_since_s is not None:  # noqa: ASYNC110  # streams tell nobody
            await asyncio.sleep(0)

    def cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)
        for each, request in self.requests.items():
            if request_id in (each, request.sibling_of) and not self.streams[each].is_ended:
                self.put(each, (), FinishReason.CANCELLED, RequestCancelled("the request was cancelled"))
        self.cancel_seen.set()

    def load(self) -> SchedulerLoad:
        return SchedulerLoad(num_running=3, num_waiting=5, num_waiting_tokens=700, num_blocks=64, num_free_blocks=40)

    def worker_load(self, worker_id: WorkerId) -> SchedulerLoad:
        return SchedulerLoad(
            num_running=2,
            num_waiting=1,
            num_blocks=64,
            num_free_blocks=40,
            num_cached_blocks=9,
            num_preemptions=6,
            num_prefix_tokens=400,
            num_prefix_hits=100,
        )

    def facts(self, worker_id: WorkerId) -> Facts:
        return self.workers[worker_id]

    def move_intake(self, to: Intake, worker_ids: Sequence[WorkerId] = ()) -> None:
        for worker_id in worker_ids:
            self.workers[worker_id].move_intake(to)
        if not worker_ids:
            self.intake = to

    def reset_prefix_cache(self, worker_ids: Sequence[WorkerId] = ()) -> None:
        self.resets.append(tuple(worker_ids))

    def kv_events(self) -> "ScriptedSubscription":
        return self.subscription


class ScriptedSubscription:
    """Gives out what the test puts: events of a worker, or the error that ends them."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[WorkerId, KvEvent] | Exception] = asyncio.Queue()
        self.closed = asyncio.Event()

    def put(self, worker_id: str, event: KvEvent) -> None:
        self._queue.put_nowait((WorkerId(worker_id), event))

    def fail(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[tuple[WorkerId, KvEvent]]:
        while True:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            yield item

    def close(self) -> None:
        self.closed.set()


@dataclass(slots=True)
class CountedMetrics:
    """Everything that was counted, in order."""

    counts: list[tuple[str, float, tuple[str, ...]]] = field(default_factory=list)
    observations: list[tuple[str, float, tuple[str, ...]]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        self.counts.append((metric.name, amount, labels))
        self.changed.set()

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        raise NotImplementedError("the API sets no gauge")

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        self.observations.append((metric.name, value, labels))

    def remove(self, metric: Metric, *labels: str) -> None:
        raise NotImplementedError("the API removes nothing")

    async def outcomes(self, num: int = 1) -> list[str]:
        """Wait until so many requests have ended; tell how."""
        while True:
            self.changed.clear()
            ended = [labels[0] for name, _, labels in self.counts if name == "dihedral_requests_total"]
            if len(ended) >= num:
                return ended
            await self.changed.wait()


@dataclass(slots=True)
class Running:
    """One server that runs, and both ends of it."""

    port: int
    channel: grpc.aio.Channel
    inference: "inference_pb2_grpc.InferenceServiceAsyncStub"
    admin: "admin_pb2_grpc.AdminServiceAsyncStub"
    engine: ScriptedEngine
    metrics: CountedMetrics
    health: HealthServicer
    views: list[WorkerView]
    server: ApiServer

    def see(self, view: WorkerView) -> Facts:
        """Let there be a worker; return its facts, to change."""
        self.views.append(view)
        return self.engine.workers.setdefault(view.worker_id, Facts())


@contextlib.asynccontextmanager
async def running(
    *models: ServedModel,
    config: ServerConfig | None = None,
    admission: AdmissionConfig | None = None,
    clock: Sequence[float] = (),
    **hooks: Any,
) -> AsyncIterator[Running]:
    """Serve some models, else the small one. `clock` is what the clock says, call by call; then it stands still.

    `hooks` are those of the validator: `extra_args` and `grammars`.
    """
    models = models or (served_model(),)
    admission = admission or AdmissionConfig()
    ticks = list(clock)
    last = [0.0]

    def now() -> float:
        if ticks:
            last[0] = ticks.pop(0)
        return last[0]

    engine, metrics, health = ScriptedEngine(), CountedMetrics(), HealthServicer()
    views: list[WorkerView] = []
    served = directory(*models)

    def open_models() -> list[str]:
        is_open = any(facts.intake is Intake.OPEN for facts in engine.workers.values())
        return [model.worker.model.name for model in served.all()] if is_open else []

    validator = Validator(served, admission, draw_seed=lambda: 7, draw_request_id=lambda: "drawn", **hooks)
    server = ApiServer(
        config or ServerConfig(port=0),
        InferenceServicer(served, validator, engine, admission, metrics, now),
        AdminServicer(
            engine, lambda: views, admission, health.set_open, lambda: health.set_models(open_models()), "1.2.3", now
        ),
        health,
    )
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options(64 << 20)) as channel:
            yield Running(
                port,
                channel,
                inference_pb2_grpc.InferenceServiceStub(channel),
                admin_pb2_grpc.AdminServiceStub(channel),
                engine,
                metrics,
                health,
                views,
                server,
            )
    finally:
        await server.stop(grace_s=0)
