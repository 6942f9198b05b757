"""Serves one worker over gRPC: describes it, hands its tokenizer over, and runs its step stream.

Moves plans in and results out; who may do so is decided in `gpu_worker/ownership.py`, computing is the worker's.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Protocol

import grpc

from gpu_worker.ownership import Ownership
from plugins.errors import (
    FieldViolation,
    InvalidRequest,
    InvariantBroken,
    NotServing,
    PlanOutOfOrder,
    ServingError,
    WorkerLeaving,
    WorkerTaken,
    WrongProtocol,
)
from plugins.types import StepPlan, StepResult, TokenizerBundle, WorkerInfo
from protos.codec import PROTOCOL_VERSION, decode_plan, encode_result
from protos.codec_info import encode_tokenizer, encode_worker_info
from protos.worker.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

GOODBYE_S: Final = 1.0  # for a caller to leave by itself


class Worker(Protocol):
    """The worker in this process. Every method is called from the event loop, and none waits for the device there."""

    async def describe(self) -> WorkerInfo: ...

    async def tokenizer(self) -> TokenizerBundle: ...

    async def open(self) -> WorkerInfo:
        """Forget all rows; the next plan has seq 1. May be called again, once every plan before it was answered."""

    def submit(self, plan: StepPlan) -> None: ...

    def results(self) -> AsyncIterator[StepResult]:
        """Yield one result per plan. Called anew after each `open`, when the iterator before it was given up."""

    async def close(self) -> None: ...


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """The worker's service. Used from one event loop; answers NOT_SERVING until `begin`, WORKER_LEAVING after `stop`.

    Invariant: at most one stream is open on the worker, the one that took it last; the one before it has
    seen every plan of its own answered, and the worker has forgotten its rows.
    """

    def __init__(self, ownership: Ownership, on_failure: Callable[[Exception], None]) -> None:
        self._ownership = ownership
        self._on_failure = on_failure  # told once, when the worker can compute no more
        self._worker: Worker | None = None
        self._is_stopping = False
        self._stream: _StepStream | None = None

    def begin(self, worker: Worker) -> None:
        """The model is loaded: answer with this worker from now on."""
        self._worker = worker

    async def stop(self) -> None:
        """End the stream at once, after the results that are complete, and refuse another.

        Its owner moves the requests to another worker meanwhile. Returns when the plans that were under way are
        answered, which nobody reads any more.
        """
        self._worker = None
        self._is_stopping = True
        if self._stream is not None:
            self._stream.end(self._absence())
            await self._stream.finished.wait()

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(worker=encode_worker_info(await self._loaded().describe()))

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        for message in encode_tokenizer(await self._loaded().tokenizer()):
            yield message

    async def Run(
        self,
        request_iterator: AsyncIterator[worker_pb2.RunRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[worker_pb2.RunResponse]:
        hello = _hello(await anext(aiter(request_iterator), worker_pb2.RunRequest()))
        stream = self._take(self._loaded(), hello.owner_id)
        try:
            async for response in stream.responses(request_iterator):
                yield response
        finally:
            stream.close()

    def _loaded(self) -> Worker:
        if self._worker is None:
            raise self._absence()
        return self._worker

    def _absence(self) -> ServingError:
        if self._is_stopping:
            return WorkerLeaving("it was asked to stop")
        return NotServing("the worker is loading its model")

    def _take(self, worker: Worker, owner_id: str) -> "_StepStream":
        epoch = self._ownership.take(owner_id)
        logger.info("worker_taken", extra={"owner_id": owner_id, "epoch": epoch})
        previous = self._stream
        if previous is not None:
            previous.end(WorkerTaken(owner_id))
        self._stream = _StepStream(worker, self._ownership, epoch, previous, self._on_failure)
        return self._stream


class _StepStream:
    """One owner's stream, from Hello to its end. Owned by its call.

    The reader hands plans to the worker and never waits for one; the collector takes results; the call itself
    sends them. So a plan that releases a row is read while the plan before it computes.
    """

    def __init__(
        self,
        worker: Worker,
        ownership: Ownership,
        epoch: int,
        previous: "_StepStream | None",
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.finished = asyncio.Event()  # the worker is free of this stream
        self._worker = worker
        self._ownership = ownership
        self._epoch = epoch
        self._previous = previous
        self._on_failure = on_failure
        self._outbox: asyncio.Queue[StepResult | Exception | None] = asyncio.Queue()  # an error or None ends the call
        self._num_computing = 0  # plans that the worker has not answered
        self._is_idle = asyncio.Event()  # there are none
        self._is_idle.set()
        self._reader: asyncio.Task[None] | None = None
        self._collector: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def end(self, error: ServingError | None) -> None:
        """Let the call end with this error at once: results that are not there yet are not sent."""
        self._outbox.put_nowait(error)

    async def responses(self, requests: AsyncIterator[worker_pb2.RunRequest]) -> AsyncIterator[worker_pb2.RunResponse]:
        """Yield Ready, then results, until the caller leaves or something ends the stream."""
        if self._previous is not None:
            await self._previous.finished.wait()
        if self._outbox.empty():
            info = await self._worker.open()
            self._collector = asyncio.create_task(self._collect(), name="step results")
            self._reader = asyncio.create_task(self._read(requests), name="step plans")
            ready = worker_pb2.Ready(
                protocol_version=PROTOCOL_VERSION,
                epoch=self._epoch,
                lease_s=self._ownership.lease_s,
                worker=encode_worker_info(info),
            )
            yield worker_pb2.RunResponse(ready=ready)
        while (item := await self._outbox.get()) is not None:
            if isinstance(item, WorkerLeaving | WorkerTaken):
                # The caller may be writing, and gRPC then forgets the status: https://github.com/grpc/grpc/issues/36066
                yield worker_pb2.RunResponse(goodbye=worker_pb2.Goodbye(reason=item.reason, message=str(item)))
                await asyncio.sleep(GOODBYE_S)
            if isinstance(item, Exception):
                raise item
            yield worker_pb2.RunResponse(result=encode_result(item, self._epoch))
            self._ownership.note_answer(self._epoch)

    def close(self) -> None:
        """The call is over: start the lease, and let the worker forget in its own time. Never waits."""
        self._ownership.release(self._epoch)
        logger.info("worker_released", extra={"epoch": self._epoch})
        self._closing = asyncio.create_task(self._free_worker(), name="step stream end")

    async def _read(self, requests: AsyncIterator[worker_pb2.RunRequest]) -> None:
        try:
            async for request in requests:
                if not request.HasField("plan"):
                    raise PlanOutOfOrder("a message without a plan came where a plan belongs")
                plan, epoch = decode_plan(request.plan)
                self._ownership.accept_plan(self._epoch, epoch, plan.seq)
                self._worker.submit(plan)
                self._num_computing += 1
                self._is_idle.clear()
            end = None
        except Exception as error:  # whatever it is, the call raises it, when the plans before it are answered
            end = error
        await self._is_idle.wait()
        self._outbox.put_nowait(end)

    async def _collect(self) -> None:
        try:
            async for result in self._worker.results():
                self._num_computing -= 1
                self._outbox.put_nowait(result)
                if self._num_computing == 0:
                    self._is_idle.set()
                    if self._closing is not None:
                        return
            raise InvariantBroken("the worker ended its results while it was in use")
        except Exception as error:
            self._fail(error)

    async def _free_worker(self) -> None:
        """Wait until the worker has answered what it was given, then let it forget the rows."""
        try:
            if self._previous is not None:
                await self._previous.finished.wait()
                self._previous = None
            if self._reader is not None and self._collector is not None:
                self._reader.cancel()
                if self._num_computing == 0:
                    self._collector.cancel()
                await asyncio.wait([self._reader, self._collector])
                await self._worker.open()
        except Exception as error:
            self._fail(error)
        finally:
            self.finished.set()

    def _fail(self, error: Exception) -> None:
        self._outbox.put_nowait(error)
        if not isinstance(error, ServingError) or isinstance(error, InvariantBroken):
            self._on_failure(error)


def _hello(request: worker_pb2.RunRequest) -> worker_pb2.Hello:
    """Raises: WrongProtocol; InvalidRequest: no owner is named; PlanOutOfOrder: something else came first."""
    if not request.HasField("hello"):
        raise PlanOutOfOrder("the step stream must begin with Hello")
    if request.hello.protocol_version != PROTOCOL_VERSION:
        raise WrongProtocol(theirs=request.hello.protocol_version, ours=PROTOCOL_VERSION)
    if not request.hello.owner_id:
        raise InvalidRequest([FieldViolation("hello.owner_id", "EMPTY", "must name the control plane")])
    return request.hello
