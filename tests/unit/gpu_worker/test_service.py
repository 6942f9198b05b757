"""The step stream as the wire sees it: one owner, plans in order, and a reader that never waits for computing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gpu_worker.server import WorkerServer
from plugins.errors import (
    InvalidRequest,
    NotServing,
    PlanOutOfOrder,
    ServingError,
    WorkerLeaving,
    WorkerOwned,
    WorkerTaken,
    WrongProtocol,
)
from plugins.types import Chunk, Row, StepPlan, StepResult, TokenizerBundle, WorkerInfo
from protos.channel import channel_options
from protos.codec import decode_result, encode_plan
from protos.codec_info import decode_tokenizer, decode_worker_info
from protos.status import from_rpc_error
from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.fakes import worker_info

BUNDLE = TokenizerBundle(
    tokenizer_json=b"{}" * 200_000, chat_template="{{ x }}", bos_token="<s>", eos_token="</s>", add_bos=True
)


class ManualWorker:
    """A worker that computes a plan when the test says so, and tells which it was given."""

    def __init__(self) -> None:
        self.num_opened = 0
        self.opened = asyncio.Event()  # again, since the test cleared it
        self.submitted: asyncio.Queue[int] = asyncio.Queue()
        self._answers: asyncio.Queue[StepResult | Exception] = asyncio.Queue()

    async def describe(self) -> WorkerInfo:
        return worker_info()

    async def tokenizer(self) -> TokenizerBundle:
        return BUNDLE

    async def open(self) -> WorkerInfo:
        self.num_opened += 1
        self.opened.set()
        return worker_info()

    def submit(self, plan: StepPlan) -> None:
        self.submitted.put_nowait(plan.seq)

    def answer(self, seq: int) -> None:
        self._answers.put_nowait(StepResult(seq=seq))

    def fail(self, error: Exception) -> None:
        self._answers.put_nowait(error)

    async def results(self) -> AsyncIterator[StepResult]:
        while True:
            item = await self._answers.get()
            if isinstance(item, Exception):
                raise item
            yield item

    async def close(self) -> None:
        return None


@dataclass
class Setting:
    """A server, its worker, and a channel to it."""

    server: WorkerServer
    channel: grpc.aio.Channel
    worker: ManualWorker = field(default_factory=ManualWorker)
    failures: list[Exception] = field(default_factory=list)

    @property
    def stub(self) -> "worker_pb2_grpc.WorkerServiceAsyncStub":
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def run(self, owner_id: str = "one") -> "Stream":
        """Open the step stream."""
        stream = Stream(self.stub.Run())
        await stream.send_hello(owner_id)
        return stream


class Stream:
    """The caller's end of one step stream."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[worker_pb2.RunRequest, worker_pb2.RunResponse]") -> None:
        self.call = call

    async def send_hello(self, owner_id: str, protocol_version: int = 2) -> None:
        hello = worker_pb2.Hello(protocol_version=protocol_version, owner_id=owner_id)
        await self.call.write(worker_pb2.RunRequest(hello=hello))

    async def send_plan(self, seq: int, epoch: int) -> None:
        plan = StepPlan(seq=seq, chunks=(Chunk(Row(0), 1),))
        await self.call.write(worker_pb2.RunRequest(plan=encode_plan(plan, epoch)))

    async def ready(self) -> worker_pb2.Ready:
        response = await self.call.read()
        assert isinstance(response, worker_pb2.RunResponse)
        assert response.HasField("ready")
        return response.ready

    async def result(self) -> tuple[int, int]:
        """The next result's seq and epoch."""
        response = await self.call.read()
        assert isinstance(response, worker_pb2.RunResponse)
        result, epoch = decode_result(response.result)
        return result.seq, epoch

    async def error(self) -> ServingError:
        """What ends the stream. Who ends it on purpose has said so in a message before."""
        goodbye: tuple[str, str] | None = None
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            while isinstance(response := await self.call.read(), worker_pb2.RunResponse):
                assert response.HasField("goodbye"), response
                assert goodbye is None
                goodbye = response.goodbye.reason, response.goodbye.message
        error = from_rpc_error(failed.value)
        assert goodbye == ((error.reason, str(error)) if isinstance(error, WorkerLeaving | WorkerTaken) else None)
        return error


@asynccontextmanager
async def listening(lease_s: float = 0.0) -> AsyncIterator[Setting]:
    """A server that has no model yet."""
    failures: list[Exception] = []
    server = WorkerServer("127.0.0.1", 0, lease_s, failures.append)
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            yield Setting(server, channel, failures=failures)
    finally:
        await server.stop()


@asynccontextmanager
async def serving(lease_s: float = 0.0) -> AsyncIterator[Setting]:
    """A server whose worker is there."""
    async with listening(lease_s) as setting:
        await setting.server.begin(setting.worker)
        yield setting


async def health(setting: Setting, name: str) -> str:
    response = await health_pb2_grpc.HealthStub(setting.channel).Check(  # type: ignore[attr-defined]  # the package's stubs lack the methods
        health_pb2.HealthCheckRequest(service=name)
    )
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def test_a_worker_that_loads_is_alive_and_not_ready() -> None:
    async with listening() as setting:
        states = [
            await health(setting, name) for name in ("", "liveness", "readiness", "dihedral.worker.v1.WorkerService")
        ]

    assert states == ["SERVING", "SERVING", "NOT_SERVING", "NOT_SERVING"]


async def test_a_worker_that_has_loaded_is_ready() -> None:
    async with serving() as setting:
        states = [
            await health(setting, name) for name in ("", "liveness", "readiness", "dihedral.worker.v1.WorkerService")
        ]

    assert states == ["SERVING", "SERVING", "SERVING", "SERVING"]


async def test_calls_are_refused_while_it_loads() -> None:
    async with listening() as setting:
        with pytest.raises(grpc.aio.AioRpcError) as described:
            await setting.stub.Describe(worker_pb2.DescribeRequest())
        ran = await (await setting.run()).error()

    assert isinstance(from_rpc_error(described.value), NotServing)
    assert str(ran) == "the worker is loading its model; retry in 1 s"


async def test_it_describes_itself_and_hands_its_tokenizer_over() -> None:
    async with serving() as setting:
        described = await setting.stub.Describe(worker_pb2.DescribeRequest())
        pieces = [piece async for piece in setting.stub.GetTokenizer(worker_pb2.GetTokenizerRequest())]

    assert decode_worker_info(described.worker) == worker_info()
    assert decode_tokenizer(pieces) == BUNDLE
    assert [len(piece.data) for piece in pieces] == [262144, 137856]


async def test_reflection_lists_its_services() -> None:
    async with listening() as setting:
        stub = reflection_pb2_grpc.ServerReflectionStub(setting.channel)  # type: ignore[arg-type]  # any channel will do
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))  # type: ignore[operator]  # the stubs lack its type
        listed = [service.name async for reply in call for service in reply.list_services_response.service]

    assert listed == [
        "dihedral.worker.v1.WorkerService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    ]


async def test_hello_is_answered_by_ready_with_epoch_lease_and_sizes() -> None:
    async with serving(lease_s=2.5) as setting:
        ready = await (await setting.run()).ready()

    assert (ready.protocol_version, ready.epoch, ready.lease_s) == (2, 1, 2.5)
    assert decode_worker_info(ready.worker) == worker_info()


async def test_the_reader_takes_the_next_plan_while_the_one_before_it_computes() -> None:
    async with serving() as setting:
        stream = await setting.run()
        await stream.ready()
        await stream.send_plan(1, epoch=1)
        await stream.send_plan(2, epoch=1)

        submitted = [await setting.worker.submitted.get(), await setting.worker.submitted.get()]
        setting.worker.answer(1)
        setting.worker.answer(2)
        answered = [await stream.result(), await stream.result()]

    assert submitted == [1, 2]
    assert answered == [(1, 1), (2, 1)]


async def test_another_owner_is_refused_by_name_and_harms_nobody() -> None:
    async with serving(lease_s=5.0) as setting:
        stream = await setting.run("one")
        await stream.ready()

        refused = await (await setting.run("two")).error()
        await stream.send_plan(1, epoch=1)
        setting.worker.answer(await setting.worker.submitted.get())

        assert isinstance(refused, WorkerOwned)
        assert "control plane 'one' owns this worker" in str(refused)
        assert await stream.result() == (1, 1)


async def test_the_same_owner_replaces_its_own_stream_in_the_next_epoch() -> None:
    async with serving(lease_s=5.0) as setting:
        old = await setting.run("one")
        await old.ready()

        new = await setting.run("one")

        assert (await new.ready()).epoch == 2
        assert isinstance(await old.error(), WorkerTaken)
        await new.send_plan(1, epoch=2)
        setting.worker.answer(await setting.worker.submitted.get())
        assert await new.result() == (1, 2)


async def test_the_worker_is_handed_on_when_the_plans_of_the_old_stream_are_computed() -> None:
    async with serving() as setting:
        old = await setting.run("one")
        await old.ready()
        await old.send_plan(1, epoch=1)
        await setting.worker.submitted.get()

        new = await setting.run("one")
        await old.error()
        num_opened_before = setting.worker.num_opened
        setting.worker.answer(1)
        await new.ready()

        assert num_opened_before == 1
        await new.send_plan(1, epoch=2)
        setting.worker.answer(await setting.worker.submitted.get())
        assert await new.result() == (1, 2)


async def test_a_stream_that_ends_makes_the_worker_forget_its_rows() -> None:
    async with serving(lease_s=0.0) as setting:
        stream = await setting.run("one")
        await stream.ready()
        await stream.call.done_writing()
        assert await stream.call.read() is grpc.aio.EOF

        await (await setting.run("two")).ready()

        assert setting.worker.num_opened == 3  # for one, after one, for two


@pytest.mark.parametrize(("seq", "epoch"), [(1, 0), (1, 2), (2, 1), (0, 1)])
async def test_a_plan_out_of_order_ends_the_stream(seq: int, epoch: int) -> None:
    async with serving() as setting:
        stream = await setting.run()
        await stream.ready()
        await stream.send_plan(seq, epoch)

        error = await stream.error()

    assert isinstance(error, PlanOutOfOrder)
    assert setting.worker.submitted.empty()


async def test_the_plans_before_one_out_of_order_are_answered_first() -> None:
    async with serving() as setting:
        stream = await setting.run()
        await stream.ready()
        await stream.send_plan(1, epoch=1)
        await stream.send_plan(3, epoch=1)
        setting.worker.answer(await setting.worker.submitted.get())

        assert await stream.result() == (1, 1)
        assert str(await stream.error()) == "plan 3 came after plan 1 in epoch 1"


async def test_each_answer_makes_room_for_another_plan() -> None:
    async with serving() as setting:
        stream = await setting.run()
        await stream.ready()
        answered = []
        for seq in range(1, 31):
            await stream.send_plan(seq, epoch=1)
            setting.worker.answer(await setting.worker.submitted.get())
            answered.append(await stream.result())

    assert answered == [(seq, 1) for seq in range(1, 31)]


async def test_a_malformed_plan_ends_the_stream_and_names_the_column() -> None:
    async with serving() as setting:
        stream = await setting.run()
        await stream.ready()
        broken = worker_pb2.StepPlan(epoch=1, seq=1, decode_steps=1, chunk_rows_i32=b"abc")
        await stream.call.write(worker_pb2.RunRequest(plan=broken))

        error = await stream.error()

    assert str(error) == "malformed plan 1: chunk_rows_i32 has 3 bytes, which is no number of int32"


async def test_a_second_hello_ends_the_stream() -> None:
    async with serving() as setting:
        stream = await setting.run()
        await stream.ready()
        await stream.send_hello("one")

        assert str(await stream.error()) == "a message without a plan came where a plan belongs"


async def test_a_stream_must_begin_with_hello() -> None:
    async with serving() as setting:
        with_plan, empty = Stream(setting.stub.Run()), Stream(setting.stub.Run())
        await with_plan.send_plan(1, epoch=1)
        await empty.call.done_writing()
        errors = [await with_plan.error(), await empty.error()]

    assert [str(error) for error in errors] == ["the step stream must begin with Hello"] * 2


async def test_another_protocol_version_is_refused() -> None:
    async with serving() as setting:
        stream = Stream(setting.stub.Run())
        await stream.send_hello("one", protocol_version=9)

        error = await stream.error()

    assert isinstance(error, WrongProtocol)
    assert str(error) == "the peer speaks step protocol 9, this process 2; run the same release on both"


async def test_an_owner_without_a_name_is_refused() -> None:
    async with serving() as setting:
        error = await (await setting.run("")).error()

    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "hello.owner_id"


async def test_a_worker_that_can_compute_no_more_ends_the_stream_and_is_told() -> None:
    broken = RuntimeError("device lost")
    async with serving() as setting:
        stream = await setting.run()
        await stream.ready()
        await stream.send_plan(1, epoch=1)
        await setting.worker.submitted.get()
        setting.worker.fail(broken)

        error = await stream.error()

    assert error.reason == "INTERNAL"
    assert setting.failures == [broken]


async def test_stopping_sends_what_was_computed_and_ends_the_stream_without_waiting_for_the_rest() -> None:
    async with serving() as setting:
        stream = await setting.run()
        await stream.ready()
        for seq in (1, 2):
            await stream.send_plan(seq, epoch=1)
            await setting.worker.submitted.get()
        setting.worker.answer(1)
        first = await stream.result()

        stopping = asyncio.create_task(setting.server.stop())
        error = await stream.error()
        is_waiting = not stopping.done()
        setting.worker.answer(2)
        await stopping

    assert (first, is_waiting) == ((1, 1), True)
    assert isinstance(error, WorkerLeaving)
    assert str(error) == "the worker is leaving: it was asked to stop"
    assert setting.worker.num_opened == 2


async def test_whoever_asks_a_worker_that_stops_is_told_that_it_leaves() -> None:
    async with serving() as setting:
        stream = await setting.run()
        await stream.ready()
        await stream.send_plan(1, epoch=1)
        await setting.worker.submitted.get()
        stopping = asyncio.create_task(setting.server.stop())
        await stream.error()

        with pytest.raises(grpc.aio.AioRpcError) as described:
            await setting.stub.Describe(worker_pb2.DescribeRequest())
        setting.worker.answer(1)
        await stopping

    assert isinstance(from_rpc_error(described.value), WorkerLeaving)


async def test_a_caller_that_goes_away_leaves_the_worker_free_for_the_next() -> None:
    async with serving(lease_s=0.0) as setting:
        stream = await setting.run("one")
        await stream.ready()
        setting.worker.opened.clear()
        stream.call.cancel()
        await setting.worker.opened.wait()

        assert (await (await setting.run("two")).ready()).epoch == 2
