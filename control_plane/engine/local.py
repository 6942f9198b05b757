"""The whole system in one process: the same core and the same worker, with no socket between them.

For notebooks, offline batches and tests. The worker is found by entry point, so that the planes need not meet.
"""

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, TypeVar

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.defaults import DefaultSampling
from control_plane.admission.extra_args import ExtraArgs, warn_of_undeclared
from control_plane.admission.submission import Submission, given
from control_plane.admission.validator import Validator
from control_plane.config import Source, load_config
from control_plane.engine.core import EngineCore
from control_plane.engine.outputs import Delivery
from control_plane.engine.router import RoundRobin
from control_plane.engine.scheduler_choice import choose_scheduler
from control_plane.engine.served import ServedModel, ServedModels
from control_plane.scheduling.config import SchedulerConfig
from control_plane.text.model import TextModel
from control_plane.workers.handle import WorkerHandle
from plugins.errors import (
    EngineClosed,
    FieldViolation,
    InvalidConfig,
    InvalidRequest,
    QueueFull,
    ServingError,
    TenantQuotaExceeded,
)
from plugins.logits_loading import LoadedProcessor, load_processors
from plugins.metrics import NoMetrics
from plugins.scheduler import Scheduler, SchedulingPolicy
from plugins.types import FinishReason, GenerationId, RequestId, SamplingParams, StepResult, TokenId, WorkerId

T = TypeVar("T")

WORKER = WorkerId("local")  # there is but one
GENERATION = GenerationId("local")


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of one request."""

    request_id: RequestId
    token_ids: tuple[TokenId, ...]
    text: str
    finish: FinishReason
    error: ServingError | None  # set when the end is not STOP or LENGTH


class LocalEngine:
    """One model and its engine, driven step by step by the thread that calls it.

    Also a context manager. The worker answers on an event loop of its own thread, so that a caller may have a loop
    of its own, as notebooks do.
    """

    def __init__(
        self,
        *,
        scheduler: SchedulerConfig | None = None,
        scheduler_cls: type[Scheduler] | str | None = None,
        policy: type[SchedulingPolicy] | str | None = None,
        admission: AdmissionConfig | None = None,
        logits_processors: Sequence[type[Any] | str] = (),
        logits_processor_config: Mapping[str, Any] | None = None,
        **worker: object,
    ) -> None:
        """Load the model; `worker` are keys of the worker's configuration, such as model="path" or threads=1.

        `scheduler_cls` and `policy` are classes of yours, or their names; they win over those that `scheduler` names.
        `logits_processors` are applied after those of entry points, each with its section of the config, by name.
        Raises: InvalidConfig: a key is unknown (the nearest one is told) or its value is wrong, a plug-in cannot be
            loaded, or the worker's packages are not installed.
        """
        config = scheduler or SchedulerConfig()
        if isinstance(scheduler_cls, str):
            config, scheduler_cls = replace(config, scheduler_cls=scheduler_cls), None
        if isinstance(policy, str):
            config, policy = replace(config, policy=policy), None
        make_scheduler = choose_scheduler(config, scheduler_cls, policy=policy)
        admission_config = admission or AdmissionConfig()
        defaults = DefaultSampling(admission_config.default_sampling, admission_config.model_defaults)
        self._models = ServedModels(as_served=defaults.apply)
        processors = load_processors(logits_processors, logits_processor_config or {})
        warn_of_undeclared(processors)
        self._validator = Validator(
            self._models, admission_config, draw_seed=lambda: secrets.randbits(64), extra_args=ExtraArgs(processors)
        )
        self._core = EngineCore(
            make_scheduler,
            admission_config,
            RoundRobin(),
            target_inter_token_ms=config.target_inter_token_ms,
            reraises=True,
        )
        self._coming: Future[StepResult] | None = None  # the result that a step waits for
        self._failure: Exception | None = None  # what ended the engine: a scheduler that raised, a broken worker
        self._worker = _build_worker(worker, processors)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="local-engine", daemon=True)
        self._thread.start()
        self._results = self._worker.results()
        try:
            info = self._wait(self._worker.open())
            text = TextModel.from_bundle(self._wait(self._worker.tokenizer()))
        except BaseException:
            self.close()
            raise
        self._models.add(WORKER, ServedModel(info, text, GENERATION))
        self.model = self._models.get("")
        self._core.connect(WORKER)
        try:
            self._core.attach(WORKER, info, GENERATION, time.monotonic())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def add_request(
        self, request_id: str, prompt: str | Sequence[int], sampling: SamplingParams | None = None
    ) -> RequestId:
        """Start a request; "" lets the engine choose its id, which is returned.

        Raises: InvalidRequest: names every field that is wrong; DuplicateRequest; QueueFull.
        """
        is_text, is_bytes = isinstance(prompt, str), isinstance(prompt, bytes)
        if is_bytes or not (is_text or all(type(token_id) is int for token_id in prompt)):
            raise InvalidRequest([FieldViolation("prompt", "WRONG_TYPE", "must be a text or whole numbers")])
        self._check_open()
        submission = Submission(
            request_id=request_id,
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            sampling={} if sampling is None else given(sampling),
        )
        (request,) = self._validator.validate(submission).requests
        self._core.submit(request, GENERATION, time.monotonic())
        return request.request_id

    def cancel(self, request_id: RequestId) -> None:
        """End a request early; its delivery comes with the next step. Unknown and ended ones are ignored."""
        self._core.cancel(request_id)

    def has_work(self) -> bool:
        """True while a request has not ended."""
        return self._core.has_work()

    def step(self) -> tuple[Delivery, ...]:
        """Wait for the oldest plan in flight, if there is one, plan ahead, and return what became of requests.

        An interrupted step loses nothing: the next one waits for the same result.
        Raises: whatever the scheduler or the worker raises, as it was; from then on every step raises the same.
        """
        self._check_open()
        if self._failure is not None:
            raise self._failure
        if self._core.num_in_flight(WORKER) and self._coming is None:
            self._coming = asyncio.run_coroutine_threadsafe(_next(self._results), self._loop)
        results: tuple[tuple[WorkerId, StepResult], ...] = ()
        if self._coming is not None:
            results = ((WORKER, self._coming.result()),)
            self._coming = None
        try:
            output = self._core.step(results, time.monotonic())
            for _, error in output.lost:
                raise error
        except Exception as error:
            self._failure = error
            raise
        for _, plan in output.plans:
            self._loop.call_soon_threadsafe(self._worker.submit, plan)
        return output.deliveries

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete all prompts together and return their outputs in the same order.

        Requests that `add_request` started go on meanwhile, and their deliveries are dropped.
        Raises: as `add_request`; the other prompts are then cancelled.
        """
        if isinstance(prompts, str):
            raise InvalidRequest([FieldViolation("prompts", "WRONG_TYPE", "must be a list of prompts, not one text")])
        token_ids: dict[RequestId, list[TokenId]] = {}
        ends: dict[RequestId, Delivery] = {}
        waiting = deque(prompts)
        try:
            while waiting or len(ends) < len(token_ids):
                # The queue is bounded: the rest of a long list goes in as it empties.
                while waiting and (request_id := self._add_if_room(waiting[0], sampling)) is not None:
                    waiting.popleft()
                    token_ids[request_id] = []
                for delivery in self.step():
                    if delivery.request_id in token_ids:
                        token_ids[delivery.request_id] += delivery.token_ids
                        if delivery.finish is not None:
                            ends[delivery.request_id] = delivery
        except BaseException:
            for request_id in token_ids if self._failure is None else ():
                self.cancel(request_id)
            raise
        return [self._complete(ends[request_id], tuple(ids)) for request_id, ids in token_ids.items()]

    def _add_if_room(self, prompt: str | Sequence[int], sampling: SamplingParams | None) -> RequestId | None:
        """Start a request; None if the queue is full, and what is at hand will make room."""
        if self._core.num_waiting >= self._core.max_waiting and self._core.has_work():
            return None  # before the prompt is read, which may take long
        try:
            return self.add_request("", prompt, sampling)
        except (QueueFull, TenantQuotaExceeded):
            if not self._core.has_work():
                raise
            return None

    def close(self) -> None:
        """Let the worker go and stop its threads. Idempotent."""
        if self._loop.is_closed():
            return
        self._wait(self._worker.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_open(self) -> None:
        if self._loop.is_closed():
            raise EngineClosed

    def _complete(self, end: Delivery, token_ids: tuple[TokenId, ...]) -> Completion:
        finish = end.finish or FinishReason.FAILED
        return Completion(end.request_id, token_ids, self.model.text.decode(token_ids), finish, end.error)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _next(results: Any) -> StepResult:
    result: StepResult = await anext(results)
    return result


def _build_worker(values: dict[str, object], processors: Sequence[LoadedProcessor]) -> WorkerHandle:
    config_class = _load("dihedral.config_sections", "worker")
    build = _load("dihedral.worker_factories", "local")
    given = Source({f"worker.{key}": value for key, value in values.items()}, "of LocalEngine", _argument)
    config = load_config({"worker": config_class}, given, {}, None).section(config_class)
    worker: WorkerHandle = build(config, NoMetrics(), lambda phase, done, total: None, processors)
    return worker


def _argument(key: str) -> str:
    return key.removeprefix("worker.")


def _load(group: str, name: str) -> Any:
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    if not found:
        raise InvalidConfig(f"no {name!r} in the entry-point group {group}; install the package with its worker extra")
    return found[0].load()
