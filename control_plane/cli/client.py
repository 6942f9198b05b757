"""A client of one control plane, as the commands use it: values in, values out, our own errors.

Keeps a channel; what is printed, and when, is the commands' business.
"""

import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.api.config import MAX_MESSAGE_MIB
from control_plane.cli.answer_reader import AnswerReader
from control_plane.cli.options import NOBODY, PLAIN, Account, Details, Sampling
from control_plane.cli.request_message import write_request
from control_plane.cli.results import CacheReset, Completion, IntakeStatus, ServerStatus
from control_plane.cli.status import intake_status, server_status
from control_plane.cli.transport_errors import translate
from plugins.errors import FieldViolation, InvalidRequest
from protos.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.channel import MIB, channel_options
from protos.inference.v1 import inference_pb2, inference_pb2_grpc

IntakeMove = Literal["pause", "drain", "resume"]

READINESS = "readiness"  # the health service's name for "a request would be taken"
CONNECT_TIMEOUT_S = 10.0  # for calls that only ask


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last one; `completion` is set in the last."""

    text: str
    completion: Completion | None
    index: int = 0  # of the output
    prompt: str = ""  # what is told of it, with echo


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
        account: Account = NOBODY,
        details: Details = PLAIN,
    ) -> AsyncGenerator[Delta, None]:
        """Stream a completion of a text, or of a chat of (role, content). Closing the iterator cancels the request."""
        request = write_request(prompt, sampling, details, model, account)
        started = time.monotonic()
        answer = AnswerReader(time.monotonic)
        call = self._inference.Generate(request, timeout=timeout_s, metadata=_metadata(account))
        try:
            async for response in call:
                answer.read(response)
                completion = answer.complete() if response.HasField("usage") else None
                yield Delta(response.text, completion, response.index, response.prompt.text)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._address, timeout_s, time.monotonic() - started) from error
        finally:
            call.cancel()

    async def token_texts(self, token_ids: Collection[int], model: str = "") -> dict[int, str]:
        """Return what each of some tokens reads alone; special ones have no text."""
        unique = sorted(set(token_ids))
        requests = [inference_pb2.DetokenizeRequest(model=model, token_ids=[each]) for each in unique]
        try:
            calls = [self._inference.Detokenize(each, timeout=CONNECT_TIMEOUT_S) for each in requests]
            return {token_id: (await call).text for token_id, call in zip(unique, calls, strict=True)}
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._address) from error

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
        readiness = health_pb2.HealthCheckResponse.ServingStatus.Name(health.status).lower()
        return server_status(self._address, readiness, server, listed)

    async def move_intake(self, move: IntakeMove, workers: Sequence[str]) -> IntakeStatus:
        """Pause, drain or open some workers; none: the whole server."""
        timeout_s = CONNECT_TIMEOUT_S
        response: admin_pb2.PauseResponse | admin_pb2.DrainResponse | admin_pb2.ResumeIntakeResponse
        try:
            match move:
                case "pause":
                    response = await self._admin.Pause(admin_pb2.PauseRequest(worker_ids=workers), timeout=timeout_s)
                case "drain":
                    response = await self._admin.Drain(admin_pb2.DrainRequest(worker_ids=workers), timeout=timeout_s)
                case "resume":
                    request = admin_pb2.ResumeIntakeRequest(worker_ids=workers)
                    response = await self._admin.ResumeIntake(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._address) from error
        return intake_status(response.intake)

    async def reset_prefix_cache(self, workers: Sequence[str]) -> CacheReset:
        """Let some workers forget their cached prompts; none: all of them."""
        request = admin_pb2.ResetPrefixCacheRequest(worker_ids=workers)
        try:
            response = await self._admin.ResetPrefixCache(request, timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._address) from error
        return CacheReset(reset=", ".join(response.worker_ids))


def local_address(host: str, port: int) -> str:
    """Return how a process of this machine calls what listens on this host and port."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _metadata(account: Account) -> tuple[tuple[str, str], ...]:
    """Tell the tenant. Raises: InvalidRequest: no call can carry it."""
    tenant, field = account.tenant, f"metadata.{account.tenant_key}"
    if not (tenant.isascii() and tenant.isprintable()):
        description = "may only contain printable ASCII characters"
        raise InvalidRequest([FieldViolation(field, "NOT_PRINTABLE_ASCII", description)])
    return ((account.tenant_key, tenant),) if tenant else ()
