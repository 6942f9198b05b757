"""Runs the engine core on an asyncio loop: plans to the workers, results to the core, deliveries to the readers.

Adds clocks, timers and streams around `EngineCore.step`; decides nothing about requests.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.core import EngineCore
from control_plane.engine.facts import Facts, Intake
from control_plane.engine.gauges import Gauges
from control_plane.engine.kv_subscription import KvSubscription
from control_plane.engine.outputs import StepOutput
from control_plane.engine.stopping import StopWatcher
from control_plane.engine.streams import OutputStream
from control_plane.workers.handle import WorkerHandle
from plugins.errors import InvariantBroken, NotServing, ReaderTooSlow, ServingError, WorkerLost
from plugins.metrics import OUTPUT_TOKENS, STEP_ROUND_TRIP, STEP_TOKENS, Metrics
from plugins.scheduler import SchedulerLoad
from plugins.types import FinishReason, GenerationId, Request, RequestId, StepResult, WorkerId, WorkerInfo

logger = logging.getLogger(__name__)

SWEEP_S = 0.25  # how often slow readers, overdue plans and gauges are looked at, while there is something at hand


@dataclass(slots=True)
class _Reader:
    """Who waits for a request's output, and the timer of what would end it next."""

    stream: OutputStream
    started_at_s: float
    deadline_s: float | None  # from then on
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Served:
    """A worker whose plans and results go through here."""

    handle: WorkerHandle
    lost: "asyncio.Future[None]"  # never has a result; its error is why the worker was lost
    sent_at_s: deque[float] = field(default_factory=deque)  # when each plan in flight went out

    def lose(self, error: Exception) -> None:
        if not self.lost.done():
            self.lost.set_exception(error)


class EngineDriver:
    """One engine core on one event loop. Every method is called from that loop.

    `run` turns the engine; `serve` brings one worker in and stays until it is lost. Requests may be submitted at any
    time, and are refused while no worker of their generation is there.
    """

    def __init__(
        self,
        core: EngineCore,
        metrics: Metrics,
        clock: Callable[[], float],
        config: AdmissionConfig,
        step_timeout_s: float,
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock  # seconds, monotonic
        self._config = config
        self._step_timeout_s = step_timeout_s  # a plan without a result for so long means that its worker hangs
        self._gauges = Gauges(metrics)
        self._readers: dict[RequestId, _Reader] = {}
        self._served: dict[WorkerId, _Served] = {}
        self._results: list[tuple[WorkerId, StepResult]] = []
        self._subscriptions: set[KvSubscription] = set()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._idle_workers: dict[WorkerId, asyncio.Event] = {}  # those that somebody waits for
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_stopping = False  # the server drains for good
        self._bug: Exception | None = None  # what a timer raised

    # -- for the API --------------------------------------------------------------------------------------------

    def submit(
        self,
        requests: Sequence[Request],
        generation: GenerationId,
        deadline_s: float | None,
        max_queue_s: float,
        watchers: Sequence[StopWatcher | None] | None = None,
    ) -> list[OutputStream]:
        """Start all outputs of one request, or none; the first one leads, and its id stands for all of them.

        Each ends with DEADLINE after so many seconds, and all as queued too long if none of them has a row by then.
        Raises: NotServing, DuplicateRequest, QueueFull, TenantQuotaExceeded.
        """
        now_s = self._clock()
        self._core.submit_all(requests, generation, now_s, watchers)
        streams: list[OutputStream] = []
        for request in requests:
            reader = self._readers[request.request_id] = _Reader(OutputStream(), now_s, deadline_s)
            self._set_timer(request.request_id, reader, max_queue_s)
            streams.append(reader.stream)
        self._idle.clear()
        self._wake.set()
        return streams

    def cancel(self, request_id: RequestId) -> None:
        """End a request early; the id of its first output ends all of them. Unknown and ended ones are ignored."""
        self._core.cancel(request_id)
        self._wake.set()

    def load(self) -> SchedulerLoad:
        """Tell how busy the engine is."""
        load = self._core.load()
        self._heed()
        return load

    def worker_load(self, worker_id: WorkerId) -> SchedulerLoad:
        """Tell how busy one worker is. Raises: InvariantBroken: no such worker."""
        load = self._core.worker_load(worker_id)
        self._heed()
        return load

    def facts(self, worker_id: WorkerId) -> Facts:
        """The four facts of a worker, to read. Raises: InvariantBroken: no such worker."""
        return self._core.facts(worker_id)

    @property
    def intake(self) -> Intake:
        """Whether the server takes requests; each worker has an intake of its own besides."""
        return self._core.intake

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All workers, connected or not."""
        return self._core.workers

    def move_intake(self, to: Intake, worker_ids: Collection[WorkerId] = ()) -> None:
        """Open, pause or drain some workers, or with none named the server.

        Raises: NotServing: the server stops; InvariantBroken: not a legal move, or no such worker. Then nothing has
        changed.
        """
        if self._is_stopping and not worker_ids:
            raise NotServing("the server is stopping")
        self._core.move_intake(to, worker_ids)
        logger.info("intake_changed", extra={"to": to.value, "worker_ids": list(worker_ids) or "the server"})
        self._wake.set()

    async def drain(self, grace_s: float) -> bool:
        """Stop: take no new requests any more, and wait for those at hand. False if some are left after the grace."""
        self._core.move_intake(Intake.DRAINING)
        self._is_stopping = True
        self._wake.set()
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            return False
        return True

    def reset_prefix_cache(self, worker_ids: Collection[WorkerId] = ()) -> None:
        """Let some workers, or all, forget their cached blocks. Raises: InvariantBroken: no such worker."""
        self._core.reset_prefix_cache(worker_ids)
        logger.info("prefix_cache_reset", extra={"worker_ids": list(worker_ids) or "all"})
        self._wake.set()

    def kv_events(self) -> KvSubscription:
        """Follow what happens to cached blocks from now on. Close it when you are done."""
        subscription = KvSubscription(self._end_subscription)
        self._subscriptions.add(subscription)
        self._core.record_kv_events(True)
        self._heed()
        return subscription

    # -- for the supervisors ------------------------------------------------------------------------------------

    def connect(self, worker_id: WorkerId) -> None:
        """Note that a worker is about to be connected."""
        self._core.connect(worker_id)

    def lose(self, worker_id: WorkerId, error: ServingError) -> None:
        """Note that the worker cannot be reached. What it has answered counts; its requests go elsewhere."""
        self._core.halt(worker_id)
        self._turn()
        self._core.detach(worker_id, error, self._clock())
        self._wake.set()

    def give_up(self, worker_id: WorkerId) -> None:
        """Note that the worker, which is lost, will not be connected again."""
        self._core.give_up(worker_id)

    def remove(self, worker_id: WorkerId) -> None:
        """Forget a worker, which is lost."""
        self._core.remove(worker_id)
        self._gauges.remove(worker_id)

    async def worker_idle(self, worker_id: WorkerId) -> None:
        """Wait until the worker has no request."""
        if self._core.num_live(worker_id):
            event = self._idle_workers.setdefault(worker_id, asyncio.Event())
            await event.wait()

    async def serve(
        self, worker_id: WorkerId, handle: WorkerHandle, worker: WorkerInfo, generation: GenerationId
    ) -> None:
        """Serve an opened worker until it is lost. Returns never; the error tells why, and then `lose` is due.

        Raises: WorkerLost and its kin, PlanOutOfOrder, PluginFailed; anything else is a bug.
        """
        self._results = [(each, result) for each, result in self._results if each != worker_id]
        self._core.attach(worker_id, worker, generation, self._clock())
        served = self._served[worker_id] = _Served(handle, asyncio.get_running_loop().create_future())
        reading = asyncio.create_task(self._read(worker_id, served), name=f"results of {worker_id}")
        self._gauges.add(worker_id, worker)
        self._wake.set()
        try:
            await served.lost
        finally:
            del self._served[worker_id]
            self._core.halt(worker_id)
            served.lost.cancel()
            reading.cancel()
            await asyncio.wait((reading,))

    async def run(self) -> None:
        """Turn the engine whenever something happened. Returns never; what it raises is a bug."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._bug is not None:
                raise self._bug
            self._turn()

    async def _read(self, worker_id: WorkerId, served: _Served) -> None:
        try:
            async for result in served.handle.results():
                self._results.append((worker_id, result))
                self._wake.set()
            served.lose(WorkerLost("its results ended"))
        except Exception as error:
            served.lose(error)

    # -- one turn -----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        results, self._results = self._results, []
        now_s = self._clock()
        for worker_id, _ in results:
            served = self._served.get(worker_id)
            if served is not None and served.sent_at_s:
                self._metrics.observe(STEP_ROUND_TRIP, now_s - served.sent_at_s.popleft())
        self._carry(self._core.step(results, now_s), now_s)
        if self._sweep_timer is None and (self._readers or self._gauges.is_stale):
            self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_S, self._guarded, self._sweep)

    def _carry(self, output: StepOutput, now_s: float) -> None:
        for worker_id, plan in output.plans:
            served = self._served.get(worker_id)
            if served is not None:  # else it was lost, and `lose` is on its way
                served.handle.submit(plan)
                served.sent_at_s.append(now_s)
                self._metrics.observe(STEP_TOKENS, plan.num_tokens)
        for worker_id, error in output.lost:
            if worker_id in self._served:
                self._served[worker_id].lose(error)
        for delivery in output.deliveries:
            reader = self._readers.get(delivery.request_id)
            if reader is None:
                raise InvariantBroken(f"request {delivery.request_id!r} has output and no reader")
            reader.stream.put(
                delivery.token_ids,
                delivery.finish,
                delivery.error,
                now_s,
                delivery.num_cached_tokens,
                delivery.logprobs,
                delivery.prompt_logprobs,
            )
            if delivery.finish is not None:
                self._end_reader(delivery.request_id, reader)
        num_tokens = sum(len(delivery.token_ids) for delivery in output.deliveries)
        if num_tokens:
            self._metrics.count(OUTPUT_TOKENS, num_tokens)
        for worker_id, event in output.kv_events:
            for subscription in self._subscriptions:
                subscription.put(worker_id, event)
        for worker_id in tuple(self._idle_workers):
            if worker_id not in self._core.workers or not self._core.num_live(worker_id):
                self._idle_workers.pop(worker_id).set()
        self._gauges.is_stale = True

    def _end_reader(self, request_id: RequestId, reader: _Reader) -> None:
        if reader.timer is not None:
            reader.timer.cancel()
        del self._readers[request_id]
        if not self._readers:
            self._idle.set()

    def _end_subscription(self, subscription: KvSubscription) -> None:
        self._subscriptions.discard(subscription)
        if not self._subscriptions:
            self._core.record_kv_events(False)
            self._heed()

    def _heed(self) -> None:
        """Turn soon if the core has something to tell: a plug-in that only was asked may have raised."""
        if self._core.has_news:
            self._wake.set()

    # -- timers -------------------------------------------------------------------------------------------------

    def _set_timer(self, request_id: RequestId, reader: _Reader, queue_s: float | None) -> None:
        """Wait for whichever comes first: the end of its patience in the queue (None: it is over), or the deadline."""
        limits = [limit for limit in (queue_s, reader.deadline_s) if limit is not None]
        reader.timer = None
        if limits:
            delay_s = max(0.0, reader.started_at_s + min(limits) - self._clock())
            reader.timer = asyncio.get_running_loop().call_later(
                delay_s, self._guarded, partial(self._expire, request_id, reader, queue_s)
            )

    def _guarded(self, call: Callable[[], None]) -> None:
        """Make a call of a timer; what it raises is a bug, which `run` raises."""
        try:
            call()
        except Exception as error:
            self._bug = self._bug or error
            self._wake.set()

    def _expire(self, request_id: RequestId, reader: _Reader, queue_s: float | None) -> None:
        self._wake.set()
        if queue_s is None or (reader.deadline_s is not None and reader.deadline_s <= queue_s):
            self._core.cancel(request_id, FinishReason.DEADLINE)
        else:
            self._core.expire_waiting(request_id, queue_s)
            self._set_timer(request_id, reader, None)

    def _sweep(self) -> None:
        """Look for readers and workers that are stuck, and bring the gauges up to date."""
        self._sweep_timer = None
        now_s = self._clock()
        for request_id, reader in tuple(self._readers.items()):
            since_s = reader.stream.unread_since_s
            if since_s is not None and now_s - since_s > self._config.max_unread_s:
                self._core.end(request_id, FinishReason.FAILED, ReaderTooSlow(self._config.max_unread_s))
                self._wake.set()
        for served in self._served.values():
            if served.sent_at_s and now_s - served.sent_at_s[0] > self._step_timeout_s:
                served.lose(WorkerLost(f"a plan has had no result for {self._step_timeout_s:g} s"))
        expiry_s = self._core.next_expiry_s()
        if expiry_s is not None and expiry_s <= now_s:
            self._core.expire_homeless(now_s)
            self._wake.set()
        self._gauges.report(self._core)
        self._heed()
        if self._readers:
            self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_S, self._guarded, self._sweep)
