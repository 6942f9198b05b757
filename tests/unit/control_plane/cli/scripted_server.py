"""A small server that speaks the public protos, for the commands that ask one."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from plugins.errors import InvalidRequest, UnknownWorker
from protos.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from protos.status import to_status

Context = Any  # grpc.ServicerContext has no type arguments that fit both stub packages


class ScriptedInference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers "one two three" to everything, and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.refusal: InvalidRequest | None = None
        self.responses: list[inference_pb2.GenerateResponse] = []  # in place of those words
        self.breaks_after_one_word = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.refusal is not None:
            context.abort_with_status(rpc_status.to_status(to_status(self.refusal)))
        if self.responses:
            yield from self.responses
            return
        yield inference_pb2.GenerateResponse(request_id="r1", token_ids=[1], text="one ")
        self.may_go_on.wait()
        if self.breaks_after_one_word:
            context.abort(grpc.StatusCode.INTERNAL, "the cable was cut")
        yield inference_pb2.GenerateResponse(token_ids=[2], text="two ")
        yield inference_pb2.GenerateResponse(
            token_ids=[3],
            text="three",
            finish_reason=common_pb2.FINISH_REASON_STOP,
            usage=inference_pb2.Usage(prompt_tokens=5, output_tokens=3),
        )

    def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Token 0 is special; the others are letters."""
        return inference_pb2.DetokenizeResponse(
            text="".join(chr(ord("a") + token_id - 1) for token_id in request.token_ids if token_id)
        )


class ScriptedAdmin(admin_pb2_grpc.AdminServiceServicer):
    """One busy server with the workers that the test puts, and what it was told to do with them."""

    def __init__(self) -> None:
        self.workers = [described("10.0.0.1:50061")]
        self.calls: list[tuple[str, list[str]]] = []

    def GetServerInfo(
        self, request: admin_pb2.GetServerInfoRequest, context: Context
    ) -> admin_pb2.GetServerInfoResponse:
        return admin_pb2.GetServerInfoResponse(
            version="0.1.0",
            uptime_s=12.0,
            intake=admin_pb2.INTAKE_OPEN,
            num_running=2,
            num_waiting=1,
            max_waiting=1024,
            num_waiting_tokens=300,
            max_waiting_tokens=5000,
        )

    def ListWorkers(self, request: admin_pb2.ListWorkersRequest, context: Context) -> admin_pb2.ListWorkersResponse:
        return admin_pb2.ListWorkersResponse(workers=self.workers)

    def Pause(self, request: admin_pb2.PauseRequest, context: Context) -> admin_pb2.PauseResponse:
        return admin_pb2.PauseResponse(intake=self._move("Pause", request.worker_ids, context))

    def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        return admin_pb2.DrainResponse(intake=self._move("Drain", request.worker_ids, context))

    def ResumeIntake(self, request: admin_pb2.ResumeIntakeRequest, context: Context) -> admin_pb2.ResumeIntakeResponse:
        return admin_pb2.ResumeIntakeResponse(intake=self._move("ResumeIntake", request.worker_ids, context))

    def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        self.calls.append(("ResetPrefixCache", list(request.worker_ids)))
        return admin_pb2.ResetPrefixCacheResponse(worker_ids=request.worker_ids or ["10.0.0.1:50061", "b:2"])

    def _move(self, name: str, worker_ids: Sequence[str], context: Context) -> admin_pb2.IntakeReport:
        self.calls.append((name, list(worker_ids)))
        if "nobody:1" in worker_ids:
            context.abort_with_status(rpc_status.to_status(to_status(UnknownWorker("nobody:1", ["10.0.0.1:50061"]))))
        worker = admin_pb2.WorkerIntake(worker_id="10.0.0.1:50061", intake=admin_pb2.INTAKE_PAUSED)
        return admin_pb2.IntakeReport(server=admin_pb2.INTAKE_DRAINING, workers=[worker])


def described(worker_id: str) -> admin_pb2.Worker:
    """A worker that serves the model "tiny"."""
    return admin_pb2.Worker(
        worker_id=worker_id,
        link=admin_pb2.LINK_LIVE,
        intake=admin_pb2.INTAKE_OPEN,
        model=common_pb2.ModelInfo(name="tiny", dtype="float32", num_parameters=1000, max_model_len=64),
        generation="tiny-0a1b2c3d",
        is_newest_generation=True,
        num_running=2,
        num_waiting=1,
        num_blocks=8,
        num_free_blocks=5,
        num_cached_blocks=3,
        prefix_tokens=400,
        prefix_hits=100,
        block_size=16,
        kv_cache_dtype="float32",
        kv_bytes=2 * 1024 * 1024,
        load_s=0.5,
        weights_version="v1",
        plugins=["dihedral.schedulers:mine 1.0"],
    )


class Ready(health_pb2_grpc.HealthServicer):
    """Always ready."""

    def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class ScriptedServer:
    """The three services on a port of their own."""

    def __init__(self) -> None:
        self.inference = ScriptedInference()  # type: ignore[abstract]  # only Generate is called
        self._server = grpc.server(ThreadPoolExecutor(2))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.inference, self._server)
        self.admin = ScriptedAdmin()  # type: ignore[abstract]  # nobody subscribes
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(Ready(), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()
