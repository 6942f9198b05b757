"""The public gRPC server: puts the services on one port, and takes them off it again."""

import logging

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from control_plane.api.admin import AdminServicer
from control_plane.api.config import ServerConfig
from control_plane.api.health import ADMIN_SERVICE, INFERENCE_SERVICE, HealthServicer
from control_plane.api.inference import InferenceServicer
from plugins.errors import InvariantBroken
from protos.admin.v1 import admin_pb2_grpc
from protos.channel import MIB, bind, public_server_options
from protos.inference.v1 import inference_pb2_grpc
from protos.interceptor import ErrorInterceptor

logger = logging.getLogger(__name__)


class ApiServer:
    """One public port. Started and stopped once, on the event loop of the control plane."""

    def __init__(
        self, config: ServerConfig, inference: InferenceServicer, admin: AdminServicer, health: HealthServicer
    ) -> None:
        self._config = config
        self._inference = inference
        self._admin = admin
        self._health = health
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listen, and return the port. Raises: InvalidConfig: the port is taken or the host is not ours."""
        if self._server is not None:
            raise InvariantBroken("the server was started twice")
        options = public_server_options(self._config.max_message_mib * MIB)
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=options)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._config.reflection:
            names = (INFERENCE_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        port = bind(server, self._config.host, self._config.port)
        self._server = server
        await server.start()
        logger.info("server_started", extra={"host": self._config.host, "port": port})
        return port

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls; those that are open may go on for the grace, then they end with UNAVAILABLE. Idempotent."""
        self._health.close()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)
            self._inference.close()
            logger.info("server_stopped")
