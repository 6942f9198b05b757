"""The service that clients call: generation, and what they need to know of models and tokens.

Translates between messages and values; what is allowed is admission's business, how errors look on the wire that of
`protos/interceptor.py`, which must wrap this servicer.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import grpc

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.long_work import LongWork
from control_plane.admission.submission import Admitted
from control_plane.admission.tokens import token_id_violations
from control_plane.admission.validator import Validator
from control_plane.api.answer import Answer
from control_plane.api.meter import RequestMeter
from control_plane.api.prompt_parts import echo_parts
from control_plane.api.reader_watch import ReaderWatch
from control_plane.api.submissions import read_submission, read_tenant, read_text
from control_plane.engine.served import ServedModel, ServedModels
from control_plane.engine.stopping import StopWatcher
from control_plane.engine.streams import OutputStream
from plugins.errors import DeadlineExceeded, FieldViolation, InvalidRequest, NotServing, ServingError
from plugins.metrics import Metrics
from plugins.types import GenerationId, Request, RequestId, TokenId
from protos.codec_info import encode_model_info
from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from protos.inference.v1.inference_pb2 import PromptPart

Context = grpc.aio.ServicerContext[Any, Any]

CLOCK_SLACK_S: Final = 0.1  # a caller's clock started so much earlier: its deadline is told by its cancelling the call
MAX_CANCELLED: Final = 1000  # ids of one call


class Engine(Protocol):
    """What generation needs of the engine."""

    def submit(
        self,
        requests: Sequence[Request],
        generation: GenerationId,
        deadline_s: float | None,
        max_queue_s: float,
        watchers: Sequence[StopWatcher | None] | None = None,
    ) -> list[OutputStream]:
        """Start all outputs of one request, or none; a watcher says where its output ends.

        Raises: NotServing, DuplicateRequest, QueueFull, TenantQuotaExceeded.
        """

    def cancel(self, request_id: RequestId) -> None:
        """End a request early, with all its outputs. Unknown and ended ones are ignored."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves every model of one control plane. Lives on the control plane's event loop."""

    def __init__(
        self,
        models: ServedModels,
        validator: Validator,
        engine: Engine,
        config: AdmissionConfig,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._models = models
        self._validator = validator
        self._engine = engine
        self._max_deadline_s = config.max_deadline_s
        self._max_unread_s = config.max_unread_s
        self._tenant_key = config.tenant_key
        self._long_work = LongWork(config.max_reading)
        self._metrics = metrics
        self._clock = clock  # seconds, monotonic

    def close(self) -> None:
        """Read no more prompts. Idempotent."""
        self._long_work.close()

    async def Generate(  # type: ignore[override]  # the stub knows generators alone; writing costs less per message
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        meter = RequestMeter(self._metrics, self._clock)
        outcome, refusal = "internal", None
        try:
            async with ReaderWatch(context, self._max_unread_s) as watch:
                await self._generate(request, context, meter, watch)
            outcome = meter.outcome or outcome
        except ServingError as error:
            outcome, refusal = error.code.name.lower(), error
            raise
        except asyncio.CancelledError:  # the client went away, or its deadline passed
            is_late = self._deadline_s(context) < CLOCK_SLACK_S
            outcome = meter.outcome or ("deadline_exceeded" if is_late else "cancelled")
            raise
        finally:
            meter.end(outcome, refusal)

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelResponse:
        num_ids = len(request.request_ids)
        if num_ids > MAX_CANCELLED:
            description = f"has {num_ids} ids; at most {MAX_CANCELLED} are allowed, send the others in further calls"
            raise InvalidRequest([FieldViolation("request_ids", "TOO_MANY", description)])
        for request_id in request.request_ids:
            if request_id.isascii():  # as callers' names are; those of further outputs are not, and name no request
                self._engine.cancel(RequestId(request_id))
        return inference_pb2.CancelResponse()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        token_ids = await self._long_work.run(request.ByteSize(), lambda: self._validator.tokenize(read_text(request)))
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        model = self._validator.find_model(request.model)
        text = await self._long_work.run(request.ByteSize(), lambda: _detokenize(model, request.token_ids))
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        models = [encode_model_info(model.worker.model) for model in self._models.all()]
        return inference_pb2.ListModelsResponse(models=models)

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        model = self._validator.find_model(request.model)
        return inference_pb2.GetModelResponse(model=encode_model_info(model.worker.model))

    async def _generate(
        self, message: inference_pb2.GenerateRequest, context: Context, meter: RequestMeter, watch: ReaderWatch
    ) -> None:
        """Serve one request to its end: all of its outputs, or an error for all of them."""
        tenant = read_tenant(context, self._tenant_key)
        admitted, echo = await self._admit(message, tenant)
        try:
            answer = Answer(admitted, echo, meter, watch)
            streams = self._submit(admitted, answer, context)
        except NotServing:
            generation = admitted.model.generation
            if self._validator.find_model(message.model).generation == generation:
                raise
            # An upgrade went by while the prompt was read: what was true of the old generation is looked at anew.
            admitted, echo = await self._admit(message, tenant)
            answer = Answer(admitted, echo, meter, watch)
            streams = self._submit(admitted, answer, context)
        request = admitted.requests[0]
        try:
            meter.admit(request, admitted.model.worker.model.name)
            await answer.tell(streams)
        finally:
            if not all(stream.is_ended for stream in streams):
                self._engine.cancel(request.request_id)

    async def _admit(self, message: inference_pb2.GenerateRequest, tenant: str) -> tuple[Admitted, list[PromptPart]]:
        """Read and check a request; returns with it what is to be told of its prompt."""
        is_slow = message.sampling.HasField("structured_output")  # its grammar is tried, which may take long
        return await self._long_work.run(message.ByteSize(), lambda: self._read(message, tenant), is_slow)

    def _read(self, message: inference_pb2.GenerateRequest, tenant: str) -> tuple[Admitted, list[PromptPart]]:
        admitted = self._validator.validate(read_submission(message, tenant))
        return admitted, echo_parts(admitted) if admitted.echo else []

    def _submit(self, admitted: Admitted, answer: Answer, context: Context) -> Sequence[OutputStream]:
        deadline_s = self._deadline_s(context)
        if deadline_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request was admitted")
        return self._engine.submit(
            admitted.requests, admitted.model.generation, deadline_s, admitted.max_queue_s, answer.watchers
        )

    def _deadline_s(self, context: Context) -> float:
        """Seconds that the request may still take."""
        remaining_s: float | None = context.time_remaining()
        return self._max_deadline_s if remaining_s is None else min(remaining_s, self._max_deadline_s)


def _detokenize(model: ServedModel, token_ids: Any) -> str:
    violations = token_id_violations("token_ids", token_ids, model.worker.model.vocab_size)
    if violations:
        raise InvalidRequest(violations)
    return model.text.decode([TokenId(token_id) for token_id in token_ids])
