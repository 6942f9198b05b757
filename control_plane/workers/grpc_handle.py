"""Speaks to a worker in another process: `WorkerHandle` over the wire.

Translates and carries; when to connect again is the business of `control_plane/workers/supervisor.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeAlias

import grpc

from control_plane.workers.result_order import ResultOrder
from plugins.errors import (
    InvariantBroken,
    PlanOutOfOrder,
    WorkerAbsent,
    WorkerLeaving,
    WorkerLost,
    WorkerOwned,
    WorkerTaken,
    WrongProtocol,
)
from plugins.types import StepPlan, StepResult, TokenizerBundle, WorkerInfo
from protos.channel import channel_options
from protos.codec import PROTOCOL_VERSION, decode_result, encode_plan
from protos.codec_info import decode_tokenizer, decode_worker_info
from protos.status import from_reason, from_rpc_error
from protos.worker.v1 import worker_pb2, worker_pb2_grpc

RunCall: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.RunRequest, worker_pb2.RunResponse]"

# What a worker says on purpose; whatever else ends a call means that it is gone.
TOLD: Final = (WorkerOwned, WorkerTaken, WorkerLeaving, WrongProtocol, PlanOutOfOrder)


class GrpcWorkerHandle:
    """One worker by its address. Used by one event loop; opened once and not reused after `close`.

    Two tasks own the stream, so that a caller who stops waiting for a result does not break it: the writer sends
    what `submit` queued, the reader queues results. Invariant: every result that is passed on is of the epoch
    that Ready told, and has the seq after the one before (`ResultOrder`).
    """

    def __init__(self, address: str, owner_id: str, max_message_bytes: int, timeout_s: float) -> None:
        self._address = address
        self._owner_id = owner_id
        self._timeout_s = timeout_s  # for each answer but a step's
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._plans: asyncio.Queue[worker_pb2.StepPlan] = asyncio.Queue()
        self._results: asyncio.Queue[StepResult | Exception | None] = asyncio.Queue()  # an error or None is the last
        self._call: RunCall | None = None
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._epoch = 0
        self._is_closed = False

    async def describe(self) -> WorkerInfo:
        with self._translated():
            response = await self._stub.Describe(worker_pb2.DescribeRequest(), timeout=self._timeout_s)
        return decode_worker_info(response.worker)

    async def tokenizer(self) -> TokenizerBundle:
        with self._translated():
            call = self._stub.GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=self._timeout_s)
            return decode_tokenizer([message async for message in call])

    async def open(self) -> WorkerInfo:
        call = self._call = self._stub.Run()
        hello = worker_pb2.Hello(protocol_version=PROTOCOL_VERSION, owner_id=self._owner_id)
        try:
            async with asyncio.timeout(self._timeout_s):
                await _send(call, worker_pb2.RunRequest(hello=hello))
                ready = (await self._receive(call)).ready
        except TimeoutError:
            raise WorkerLost(f"{self._address} did not answer within {self._timeout_s:g} s") from None
        if ready.protocol_version != PROTOCOL_VERSION:
            raise WrongProtocol(theirs=ready.protocol_version, ours=PROTOCOL_VERSION)
        info = decode_worker_info(ready.worker)
        self._epoch = ready.epoch
        self._tasks = (
            asyncio.create_task(self._write(call), name=f"plans to {self._address}"),
            asyncio.create_task(self._read(call), name=f"results from {self._address}"),
        )
        return info

    def submit(self, plan: StepPlan) -> None:
        if not self._tasks:
            raise InvariantBroken(f"plan {plan.seq} was submitted before the worker was opened")
        self._plans.put_nowait(encode_plan(plan, self._epoch))

    async def results(self) -> AsyncIterator[StepResult]:
        while True:
            item = await self._results.get()
            if isinstance(item, StepResult):
                yield item
                continue
            self._results.put_nowait(item)  # who asks again gets the same answer
            if item is None:
                return
            raise item

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._results.put_nowait(None)
        for task in self._tasks:
            task.cancel()
        if self._call is not None:
            self._call.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._channel.close()

    async def _write(self, call: RunCall) -> None:
        while True:
            await _send(call, worker_pb2.RunRequest(plan=await self._plans.get()))

    async def _read(self, call: RunCall) -> None:
        order = ResultOrder(self._epoch)
        try:
            while True:
                result, epoch = decode_result((await self._receive(call)).result)
                if order.accepts(epoch, result):
                    self._results.put_nowait(result)
        except Exception as error:  # whatever it is, who reads the results raises it
            call.cancel()
            self._results.put_nowait(error)

    async def _receive(self, call: RunCall) -> worker_pb2.RunResponse:
        """Raises: WorkerLost, or what the worker said on purpose."""
        with self._translated():
            response = await call.read()
        if not isinstance(response, worker_pb2.RunResponse):
            raise WorkerLost(f"{self._address} ended the step stream")
        if response.HasField("goodbye"):
            error = from_reason(response.goodbye.reason, response.goodbye.message)
            raise error if isinstance(error, TOLD) else WorkerLost(f"{self._address}: {error}")
        return response

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as failed:
            error = from_rpc_error(failed)
            if isinstance(error, TOLD):
                raise error from None
            if "failed to connect" in str(error):
                raise WorkerAbsent(
                    f"nothing answers at {self._address}; start a worker there, or set workers.address"
                ) from None
            gone = WorkerLost if self._tasks else WorkerAbsent
            raise gone(f"{self._address}: {error}") from None


async def _send(call: RunCall, request: worker_pb2.RunRequest) -> None:
    """Send one message; on a stream that is over nothing happens, because reading it tells why.

    A write that meets the end of its stream makes gRPC forget the peer's status and say INTERNAL instead
    (https://github.com/grpc/grpc/issues/36066): a worker that leaves on purpose says so before, in a message.
    """
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(request)
