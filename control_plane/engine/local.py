"""The whole system in one process: the same core and the same worker, with no socket between them.

For notebooks, offline batches and tests.
"""

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.defaults import DefaultSampling
from control_plane.admission.extra_args import ExtraArgs, warn_of_undeclared
from control_plane.admission.structured_output import GrammarCompiler
from control_plane.admission.submission import ChatMessage, Submission, given
from control_plane.admission.validator import Validator
from control_plane.engine.completions import Completion, OutputCollector
from control_plane.engine.core import EngineCore
from control_plane.engine.local_worker import build_worker
from control_plane.engine.outputs import Delivery
from control_plane.engine.router import RoundRobin
from control_plane.engine.scheduler_choice import choose_scheduler
from control_plane.engine.served import ServedModel, ServedModels
from control_plane.scheduling.config import SchedulerConfig
from control_plane.text.model import TextModel
from control_plane.text.stream import TextStream
from plugins.errors import EngineClosed, FieldViolation, InvalidRequest, QueueFull, TenantQuotaExceeded
from plugins.logits_loading import load_processors
from plugins.scheduler import Scheduler, SchedulingPolicy
from plugins.types import GenerationId, Request, RequestId, SamplingParams, StepResult, WorkerId

T = TypeVar("T")

WORKER = WorkerId("local")  # there is but one
GENERATION = GenerationId("local")


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
        self._grammars = GrammarCompiler(admission_config)
        self._validator = Validator(
            self._models,
            admission_config,
            draw_seed=lambda: secrets.randbits(64),
            extra_args=ExtraArgs(processors),
            grammars=self._grammars,
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
        self._worker = build_worker(worker, processors)
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
        """Start a request; "" lets the engine choose its id, which is returned. No sampling: the model's defaults.

        Further outputs have names of their own, which begin with this one; it stands for all of them in `cancel`.
        Raises: InvalidRequest: names every field that is wrong; DuplicateRequest; QueueFull.
        """
        self._check_open()
        requests, _ = self._submit(_read_prompt(request_id, prompt, sampling))
        return requests[0].request_id

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
        self._check_open()
        return self._complete_all(_read_prompt("", prompt, sampling) for prompt in prompts)

    def chat(
        self,
        conversations: Sequence[Sequence[ChatMessage]],
        sampling: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Completion]:
        """Answer all conversations together, each of which may call these tools. Otherwise as `generate`."""
        self._check_open()
        return self._complete_all(
            Submission(messages=messages, tools=tools, sampling={} if sampling is None else given(sampling))
            for messages in conversations
        )

    def _complete_all(self, submissions: Iterable[Submission]) -> list[Completion]:
        """Carry all of them out together; the outputs of each are one completion."""
        waiting = deque(submissions)
        started: list[list[OutputCollector]] = []
        running: dict[RequestId, OutputCollector] = {}
        try:
            while waiting or running:
                # The queue is bounded: the rest of a long list goes in as it empties.
                while waiting and (outputs := self._submit_if_room(waiting[0])) is not None:
                    waiting.popleft()
                    started.append(list(outputs.values()))
                    running |= outputs
                for delivery in self.step():
                    if (output := running.get(delivery.request_id)) is not None:
                        output.take(delivery)
                        if output.is_complete:
                            del running[delivery.request_id]
        except BaseException:
            for request_id in running if self._failure is None else ():
                self.cancel(request_id)
            raise
        return [first.complete([other.complete() for other in others]) for first, *others in started]

    def _submit_if_room(self, submission: Submission) -> dict[RequestId, OutputCollector] | None:
        """Start a request; None if the queue is full, and what is at hand will make room."""
        if self._core.num_waiting >= self._core.max_waiting and self._core.has_work():
            return None  # before the prompt is read, which may take long
        try:
            requests, texts = self._submit(submission)
        except (QueueFull, TenantQuotaExceeded):
            if not self._core.has_work():
                raise
            return None
        return {each.request_id: OutputCollector(each, text) for each, text in zip(requests, texts, strict=True)}

    def _submit(self, submission: Submission) -> tuple[tuple[Request, ...], list[TextStream]]:
        """Start all outputs of a request; the engine watches those texts that can end one."""
        requests = self._validator.validate(submission).requests
        texts = self.model.text.streams([request.sampling for request in requests])
        watchers = [text if text.is_watching else None for text in texts]
        self._core.submit_all(requests, GENERATION, time.monotonic(), watchers)
        return requests, texts

    def close(self) -> None:
        """Let the worker go and stop its threads. Idempotent."""
        if self._loop.is_closed():
            return
        self._grammars.close()
        self._wait(self._worker.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_open(self) -> None:
        if self._loop.is_closed():
            raise EngineClosed

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _next(results: Any) -> StepResult:
    result: StepResult = await anext(results)
    return result


def _read_prompt(request_id: str, prompt: str | Sequence[int], sampling: SamplingParams | None) -> Submission:
    """Raises: InvalidRequest: the prompt is neither a text nor tokens."""
    is_text, is_bytes = isinstance(prompt, str), isinstance(prompt, bytes)
    if is_bytes or not (is_text or all(type(token_id) is int for token_id in prompt)):
        raise InvalidRequest([FieldViolation("prompt", "WRONG_TYPE", "must be a text or whole numbers")])
    return Submission(
        request_id=request_id,
        text=prompt if isinstance(prompt, str) else None,
        token_ids=None if isinstance(prompt, str) else prompt,
        sampling={} if sampling is None else given(sampling),
    )
