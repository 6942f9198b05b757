"""grpc.health.v1: whether this process lives, and whether it would take a request.

Liveness stays up while the server drains or waits for a worker, so that only a process that is stuck is restarted.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

INFERENCE_SERVICE = "dihedral.inference.v1.InferenceService"
ADMIN_SERVICE = "dihedral.admin.v1.AdminService"
LIVENESS, READINESS = "liveness", "readiness"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Health by name: "" and liveness, readiness, each service, and each model as service/model.

    Unlike the package's own servicer it changes at once, without waiting for watchers; its watches end when it is
    closed, so that they do not hold up a stop; and liveness survives draining. Lives on one event loop.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": SERVING, LIVENESS: SERVING}
        self._statuses |= dict.fromkeys((READINESS, INFERENCE_SERVICE, ADMIN_SERVICE), NOT_SERVING)
        self._changed = asyncio.Event()  # set and replaced at each change
        self._models: frozenset[str] = frozenset()
        self._is_open = True
        self._is_draining = False
        self._is_closed = False

    def set_models(self, models: Iterable[str]) -> None:
        """Say which models have a worker that takes requests; with one of them the server is ready."""
        self._models = frozenset(models)
        self._tell()

    def set_open(self, is_open: bool) -> None:
        """Say whether operators let requests in; while they do not, everything but liveness is NOT_SERVING."""
        self._is_open = is_open
        self._tell()

    def drain(self) -> None:
        """Take no requests any more: everything but liveness is NOT_SERVING for good."""
        self._is_draining = True
        self._tell()

    def close(self) -> None:
        """Drain, and end all watches."""
        self.drain()
        self._is_closed = True
        self._wake_watchers()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            known = ", ".join(repr(name) for name in sorted(self._statuses))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no such service; known: {known}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _tell(self) -> None:
        """Work the statuses out; a model that is served no longer stays known."""
        lets_in = self._is_open and not self._is_draining
        served = {f"{INFERENCE_SERVICE}/{model}" for model in self._models} if lets_in else set()
        for name in (self._statuses.keys() | served) - {"", LIVENESS}:
            is_model = name.startswith(f"{INFERENCE_SERVICE}/")
            is_up = name in served if is_model else bool(served)
            self._statuses[name] = SERVING if is_up else NOT_SERVING
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
