"""The service that operators call: how the control plane and its workers are.

Reports; the facts belong to the engine and the worker's supervisor.
"""

from collections.abc import Callable
from typing import Any, Protocol

import grpc

from control_plane.engine.facts import Facts, Intake, Link, Residency, Weights
from control_plane.workers.supervisor import WorkerView
from plugins.scheduler import SchedulerLoad
from protos.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.codec_info import encode_model_info

Context = grpc.aio.ServicerContext[Any, Any]

INTAKES = {
    Intake.OPEN: admin_pb2.INTAKE_OPEN,
    Intake.PAUSED: admin_pb2.INTAKE_PAUSED,
    Intake.DRAINING: admin_pb2.INTAKE_DRAINING,
}
RESIDENCIES = {
    Residency.RESIDENT: admin_pb2.RESIDENCY_RESIDENT,
    Residency.SUSPENDING: admin_pb2.RESIDENCY_SUSPENDING,
    Residency.ASLEEP: admin_pb2.RESIDENCY_ASLEEP,
    Residency.WAKING: admin_pb2.RESIDENCY_WAKING,
}
WEIGHTS = {
    Weights.VALID: admin_pb2.WEIGHTS_VALID,
    Weights.UPDATING: admin_pb2.WEIGHTS_UPDATING,
    Weights.NEEDS_WEIGHTS: admin_pb2.WEIGHTS_NEEDS_WEIGHTS,
}
LINKS = {
    Link.CONNECTING: admin_pb2.LINK_CONNECTING,
    Link.LIVE: admin_pb2.LINK_LIVE,
    Link.LOST: admin_pb2.LINK_LOST,
    Link.FAILED: admin_pb2.LINK_FAILED,
}


class Engine(Protocol):
    """What operators want to know of the engine."""

    def load(self) -> SchedulerLoad:
        """Tell how busy it is."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Reports on one control plane and its worker. Lives on the control plane's event loop."""

    def __init__(
        self,
        engine: Engine,
        facts: Facts,
        worker: Callable[[], WorkerView],
        max_waiting: int,
        version: str,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._worker = worker
        self._max_waiting = max_waiting
        self._version = version
        self._clock = clock  # seconds, monotonic
        self._started_at = clock()

    async def GetServerInfo(
        self, request: admin_pb2.GetServerInfoRequest, context: Context
    ) -> admin_pb2.GetServerInfoResponse:
        load = self._engine.load()
        return admin_pb2.GetServerInfoResponse(
            version=self._version,
            uptime_s=self._clock() - self._started_at,
            intake=INTAKES[self._facts.intake],
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            max_waiting=self._max_waiting,
        )

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: Context
    ) -> admin_pb2.ListWorkersResponse:
        view = self._worker()
        worker = admin_pb2.Worker(
            worker_id=view.worker_id,
            link=LINKS[self._facts.link],
            residency={tag: RESIDENCIES[residency] for tag, residency in self._facts.residency.items()},
            weights=WEIGHTS[self._facts.weights],
            detail=view.detail,
        )
        if view.info is not None:
            worker.model.CopyFrom(encode_model_info(view.info.model))
            worker.incarnation = view.info.incarnation
            worker.num_blocks = view.info.num_blocks
            worker.num_free_blocks = self._engine.load().num_free_blocks
            worker.block_size = view.info.block_size
            worker.kv_cache_dtype = view.info.kv_cache_dtype
            worker.kv_bytes = view.info.kv_bytes
            worker.load_s = view.info.load_s
        return admin_pb2.ListWorkersResponse(workers=[worker])
