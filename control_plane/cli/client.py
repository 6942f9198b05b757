"""A client of one control plane, as the commands use it: values in, values out, our own errors.

Keeps a channel; what is printed, and when, is the commands' business.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.api.config import MAX_MESSAGE_MIB
from control_plane.cli.options import Sampling
from control_plane.cli.results import Completion, ServerStatus, WorkerStatus
from control_plane.cli.transport_errors import translate
from plugins.errors import FieldViolation, InvalidRequest
from protos.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.channel import MIB, channel_options
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2, inference_pb2_grpc

READINESS = "readiness"  # the health service's name for "a request would be taken"
CONNECT_TIMEOUT_S = 10.0  # for calls that only ask
WHOLE_NUMBERS = {  # what the fields of a message can carry, and what the server takes of it
    "max_tokens": "[1, 2**32), or left out",
    "top_k": "[0, 2**32), 0 keeps all tokens",
    "seed": "[0, 2**64), or left out",
}


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last one; `completion` is set in the last."""

    text: str
    completion: Completion | None


class Client:
    """A channel to one control plane. Use it as an async context manager, within one event loop.

    Every method raises the ServingError that the server raised, or one that says what became of the connection.
    Any size of message is tried: the limit that counts is the server's.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._address, options=channel_options(MAX_MESSAGE_MIB * MIB))
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[tuple[str, str]],
        sampling: Sampling,
        model: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream a completion of a text, or of a chat of (role, content). Closing the iterator cancels the request."""
        request = _request(prompt, sampling, model)
        started, first = time.monotonic(), None
        parts: list[str] = []
        token_ids: list[int] = []
        call = self._inference.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                if first is None and response.token_ids:
                    first = time.monotonic()
                parts.append(response.text)
                token_ids += response.token_ids
                if not response.finish_reason:
                    yield Delta(response.text, None)
                    continue
                reason = common_pb2.FinishReason.Name(response.finish_reason)
                yield Delta(
                    response.text,
                    Completion(
                        text="".join(parts),
                        token_ids=tuple(token_ids),
                        finish_reason=reason.removeprefix("FINISH_REASON_").lower(),
                        prompt_tokens=response.usage.prompt_tokens,
                        output_tokens=response.usage.output_tokens,
                        cached_tokens=response.usage.cached_tokens,
                        first_token_s=(first or time.monotonic()) - started,
                        total_s=time.monotonic() - started,
                    ),
                )
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._address, timeout_s, time.monotonic() - started) from error
        finally:
            call.cancel()

    async def models(self) -> tuple[str, ...]:
        """Return the names of the models that are served now."""
        try:
            response = await self._inference.ListModels(inference_pb2.ListModelsRequest(), timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._address) from error
        return tuple(model.name for model in response.models)

    async def readiness(self) -> AsyncGenerator[bool, None]:
        """Tell whether requests are taken: now, and at each change, until the server goes away."""
        call = self._health.Watch(  # type: ignore[attr-defined]  # the package's stubs lack the methods
            health_pb2.HealthCheckRequest(service=READINESS)
        )
        try:
            async for response in call:
                yield response.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._address) from error
        finally:
            call.cancel()

    async def status(self) -> ServerStatus:
        """Ask for everything that operators look at first."""
        try:
            server = await self._admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=CONNECT_TIMEOUT_S)
            listed = await self._admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=CONNECT_TIMEOUT_S)
            health = await self._health.Check(  # type: ignore[attr-defined]  # the package's stubs lack the methods
                health_pb2.HealthCheckRequest(service=READINESS), timeout=CONNECT_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._address) from error
        return ServerStatus(
            address=self._address,
            readiness=health_pb2.HealthCheckResponse.ServingStatus.Name(health.status).lower(),
            version=server.version,
            uptime_s=server.uptime_s,
            intake=_word(admin_pb2.Intake.Name(server.intake)),
            num_running=server.num_running,
            num_waiting=server.num_waiting,
            max_waiting=server.max_waiting,
            workers=tuple(_worker(worker) for worker in listed.workers),
        )


def local_address(host: str, port: int) -> str:
    """Return how a process of this machine calls what listens on this host and port."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _request(prompt: str | Sequence[tuple[str, str]], sampling: Sampling, model: str) -> inference_pb2.GenerateRequest:
    """Write a request; its limits are the server's. Raises: InvalidRequest: a value that its field cannot carry."""
    try:
        request = inference_pb2.GenerateRequest(model=model, sampling=_sampling(sampling))
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.messages.extend(inference_pb2.ChatMessage(role=role, content=text) for role, text in prompt)
    except UnicodeEncodeError as error:
        description = f"is not valid Unicode: {error.reason}"
        raise InvalidRequest([FieldViolation("prompt", "NOT_UNICODE", description)]) from error
    return request


def _sampling(sampling: Sampling) -> common_pb2.SamplingParams:
    message = common_pb2.SamplingParams()
    violations = []
    for field in fields(sampling):
        value = getattr(sampling, field.name)
        if value is None or value is False:
            continue
        try:
            setattr(message, field.name, value)
        except ValueError:  # such as a count below 0
            description = f"is {value}; must be in {WHOLE_NUMBERS[field.name]}"
            violations.append(FieldViolation(f"sampling.{field.name}", "OUT_OF_RANGE", description))
    if violations:
        raise InvalidRequest(violations)
    return message


def _worker(worker: admin_pb2.Worker) -> WorkerStatus:
    status = WorkerStatus(worker=worker.worker_id, link=_word(admin_pb2.Link.Name(worker.link)), detail=worker.detail)
    if not worker.HasField("model"):
        return status
    return replace(
        status,
        model=worker.model.name,
        dtype=worker.model.dtype,
        parameters=worker.model.num_parameters,
        context=worker.model.max_model_len,
        free_blocks=worker.num_free_blocks,
        num_blocks=worker.num_blocks,
        block_size=worker.block_size,
        kv_cache_dtype=worker.kv_cache_dtype,
        kv_mib=worker.kv_bytes / MIB,
        load_s=worker.load_s,
    )


def _word(name: str) -> str:
    return name.partition("_")[2].lower()
