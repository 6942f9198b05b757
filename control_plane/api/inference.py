"""The service that clients call: generation, and what they need to know of models and tokens.

Translates between messages and values; what is allowed is admission's business, how errors look on the wire that of
`protos/interceptor.py`, which must wrap this servicer.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.long_work import LongWork
from control_plane.admission.sampling import token_id_violations
from control_plane.admission.submission import Admitted, ChatMessage, Submission
from control_plane.admission.validator import Validator
from control_plane.api.meter import RequestMeter
from control_plane.api.reader_watch import ReaderWatch
from control_plane.engine.served import ServedModel, ServedModels
from control_plane.engine.streams import Output, OutputStream
from plugins.errors import DeadlineExceeded, FieldViolation, InvalidRequest, NotServing, ServingError
from plugins.metrics import Metrics
from plugins.types import FinishReason, GenerationId, Request, RequestId, TokenId
from protos.codec_info import encode_model_info
from protos.codec_sampling import given_sampling
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2, inference_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

CLOCK_SLACK_S: Final = 0.1  # a caller's clock started so much earlier: its deadline is told by its cancelling the call
MAX_CANCELLED: Final = 1000  # ids of one call
OUTCOMES: Final = {reason: reason.name.lower() for reason in FinishReason}


class Engine(Protocol):
    """What generation needs of the engine."""

    def submit(self, request: Request, generation: GenerationId, deadline_s: float | None) -> OutputStream:
        """Start a request. Raises: NotServing, DuplicateRequest, QueueFull, TenantQuotaExceeded."""

    def cancel(self, request_id: RequestId) -> None:
        """End a request early. Unknown and ended ones are ignored."""


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
            self._engine.cancel(RequestId(request_id))
        return inference_pb2.CancelResponse()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        token_ids = await self._long_work.run(
            request.ByteSize(), lambda: self._validator.tokenize(_submission(request))
        )
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
        """Serve one request to its end."""
        submission = _submission(message, _tenant(context, self._tenant_key))
        admitted = await self._validate(submission, message.ByteSize())
        request, model = admitted.requests[0], admitted.model
        try:
            stream = self._submit(request, model, context)
        except NotServing:
            if self._validator.find_model(submission.model).generation == model.generation:
                raise
            # An upgrade went by while the prompt was read: what was true of the old generation is looked at anew.
            admitted = await self._validate(submission, message.ByteSize())
            request, model = admitted.requests[0], admitted.model
            stream = self._submit(request, model, context)
        try:
            meter.admit(request, model.worker.model.name)
            responses = _Responses(request, model, meter)
            while True:
                output = await stream.next()
                response = responses.next(output)
                if output.finish is not None and output.error is None:
                    meter.complete(OUTCOMES[output.finish])  # also if the client hangs up on this message
                if response.token_ids or response.text or response.finish_reason:
                    await watch.write(response)
                if output.error is not None:
                    raise output.error
                if output.finish is not None:
                    return
        finally:
            if not stream.is_ended:
                self._engine.cancel(request.request_id)

    async def _validate(self, submission: Submission, num_bytes: int) -> Admitted:
        return await self._long_work.run(num_bytes, lambda: self._validator.validate(submission))

    def _submit(self, request: Request, model: ServedModel, context: Context) -> OutputStream:
        deadline_s = self._deadline_s(context)
        if deadline_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request was admitted")
        return self._engine.submit(request, model.generation, deadline_s)

    def _deadline_s(self, context: Context) -> float:
        """Seconds that the request may still take."""
        remaining_s: float | None = context.time_remaining()
        return self._max_deadline_s if remaining_s is None else min(remaining_s, self._max_deadline_s)


class _Responses:
    """Makes one request's responses, in order: its id in the first, its end in the last."""

    def __init__(self, request: Request, model: ServedModel, meter: RequestMeter) -> None:
        self._request_id: str = request.request_id
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._detokenizer = model.text.detokenizer()
        self._meter = meter

    def next(self, output: Output) -> inference_pb2.GenerateResponse:
        text = self._detokenizer.push(output.token_ids)
        if output.finish is not None:
            text += self._detokenizer.flush()
        self._meter.deliver(len(output.token_ids))
        response = inference_pb2.GenerateResponse(request_id=self._request_id, token_ids=output.token_ids, text=text)
        self._request_id = ""
        if output.finish is not None and output.error is None:
            response.finish_reason = common_pb2.FinishReason.ValueType(output.finish)
            response.usage.prompt_tokens = self._num_prompt_tokens
            response.usage.output_tokens = self._meter.num_output_tokens
            response.usage.cached_tokens = output.num_cached_tokens
        return response


def _tenant(context: Context, key: str) -> str:
    """Return what the call's metadata says under this key; values that are given several times count as one list."""
    values = [value for name, value in context.invocation_metadata() or () if name == key]
    return ",".join(value if isinstance(value, str) else value.decode("latin-1") for value in values)


def _submission(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, tenant: str = "") -> Submission:
    text = token_ids = messages = None
    match request.WhichOneof("input"):
        case "text":
            text = request.text
        case "chat":
            messages = [ChatMessage(role=each.role, content=each.content) for each in request.chat.messages]
    if isinstance(request, inference_pb2.TokenizeRequest):
        return Submission(model=request.model, text=text, messages=messages)
    if request.WhichOneof("input") == "tokens":
        token_ids = request.tokens.ids
    return Submission(
        request_id=request.request_id,
        model=request.model,
        text=text,
        token_ids=token_ids,
        messages=messages,
        sampling=given_sampling(request.sampling),
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=tenant,
    )


def _detokenize(model: ServedModel, token_ids: Any) -> str:
    violations = token_id_violations("token_ids", token_ids, model.worker.model.vocab_size)
    if violations:
        raise InvalidRequest(violations)
    return model.text.decode([TokenId(token_id) for token_id in token_ids])
