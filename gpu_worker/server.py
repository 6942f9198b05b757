"""One worker's gRPC server: its service, health, reflection and the port they share.

Listens before there is a model, so that probes are answered while it loads and a taken port is told at once.
"""

import time
from collections.abc import Callable
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gpu_worker.ownership import Ownership
from gpu_worker.service import Worker, WorkerServicer
from protos.channel import bind, internal_server_options
from protos.interceptor import ErrorInterceptor
from protos.worker.v1 import worker_pb2, worker_pb2_grpc

SERVICE: Final = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
LIVENESS: Final = ("", "liveness")  # names that the health service knows: the loop turns
READINESS: Final = ("readiness", SERVICE)  # the model is loaded
STOP_GRACE_S: Final = 1.0  # for calls in flight, once the step stream has ended


class WorkerServer:
    """Serves from `start` to `stop`, a worker from `begin` on. Used from one event loop.

    `on_failure` is told the error after which the worker can compute no more.
    """

    def __init__(self, host: str, port: int, lease_s: float, on_failure: Callable[[Exception], None]) -> None:
        self._host = host
        self._port = port
        self._servicer = WorkerServicer(Ownership(lease_s, time.monotonic), on_failure)
        self._health = health.aio.HealthServicer()

    async def start(self) -> int:
        """Listen, alive and not ready; return the port. Raises: InvalidConfig: the port cannot be had."""
        self._server = grpc.aio.server(options=internal_server_options(), interceptors=[ErrorInterceptor()])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        port = bind(self._server, self._host, self._port)
        await self._set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._set(READINESS, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        return port

    async def begin(self, worker: Worker) -> None:
        """The model is loaded: answer with this worker, and say so."""
        self._servicer.begin(worker)
        await self._set(READINESS, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Say that nothing more is taken, end the step stream, let calls in flight end, then close the port."""
        await self._set(READINESS, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._servicer.stop()
        await self._server.stop(STOP_GRACE_S)

    async def _set(self, names: tuple[str, ...], status: int) -> None:
        for name in names:
            await self._health.set(name, status)
