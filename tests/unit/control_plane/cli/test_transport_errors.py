"""What gRPC itself tells a client is said in our words, with the key or the flag that changes it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from control_plane.cli.client import Client
from control_plane.cli.options import Sampling
from control_plane.cli.transport_errors import translate
from plugins.errors import Code, DeadlineExceeded, ServingError
from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from protos.status import abort

Context = grpc.aio.ServicerContext[Any, Any]


class Endless(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with one word, then with an error if it has one, else with nothing more."""

    def __init__(self) -> None:
        self.error: ServingError | None = None

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(token_ids=[1], text="one ")
        if self.error is not None:
            await abort(context, self.error)
        await asyncio.Event().wait()


@asynccontextmanager
async def endless() -> AsyncIterator[tuple[Endless, grpc.aio.Server, Client]]:
    servicer = Endless()  # type: ignore[abstract]  # only Generate is called
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1000)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Client(f"127.0.0.1:{port}") as client:
        yield servicer, server, client
    await server.stop(None)


async def test_a_message_above_the_limit_names_the_key_of_the_limit() -> None:
    async with endless() as (_, _, client):
        with pytest.raises(ServingError) as caught:
            await anext(client.generate("x" * 2000, Sampling()))

    assert caught.value.code == Code.RESOURCE_EXHAUSTED
    assert str(caught.value) == (
        "the message is too large (2003 bytes, at most 1000); send less, or raise server.max_message_mib"
    )


async def test_a_server_that_stops_amid_an_answer_names_the_key_of_its_patience() -> None:
    async with endless() as (_, server, client), aclosing(client.generate("x", Sampling())) as deltas:
        await anext(deltas)

        await server.stop(0)
        with pytest.raises(ServingError) as caught:
            await anext(deltas)

    assert caught.value.code == Code.UNAVAILABLE
    assert str(caught.value) == ("the server stopped before the answer was complete: its server.drain_s had elapsed")


@pytest.mark.parametrize("timeout_s", [1e-9, 0.05])
async def test_a_deadline_of_ours_names_its_flag(timeout_s: float) -> None:
    async with endless() as (_, _, client):
        with pytest.raises(DeadlineExceeded) as caught:
            async for _ in client.generate("x", Sampling(), timeout_s=timeout_s):
                pass

    assert str(caught.value) == (f"the answer was not complete within {timeout_s:g} s; give it longer with --timeout")


async def test_a_deadline_of_ours_that_the_server_tells_first_names_the_flag_too() -> None:
    async with endless() as (servicer, _, client):
        servicer.error = DeadlineExceeded("the deadline passed before the output was complete")
        with pytest.raises(DeadlineExceeded) as caught:
            async for _ in client.generate("x", Sampling(), timeout_s=0.09):
                pass

    assert str(caught.value) == "the answer was not complete within 0.09 s; give it longer with --timeout"


async def test_a_deadline_of_the_server_keeps_its_words() -> None:
    async with endless() as (servicer, _, client):
        servicer.error = DeadlineExceeded("the deadline passed before the output was complete")
        with pytest.raises(DeadlineExceeded) as caught:
            async for _ in client.generate("x", Sampling(), timeout_s=600):
                pass

    assert str(caught.value) == "the deadline passed before the output was complete"


@pytest.mark.parametrize(
    ("code", "details", "message"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:5: Connection refused",
            "no server answers at 10.0.0.1:5; start one with `dihedral serve`",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "errors resolving foo:1: [field:hostname lookup error:address lookup failed]",
            "the host of 10.0.0.1:5 is not known; correct the address",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Socket closed",
            "the connection to the server at 10.0.0.1:5 was lost (Socket closed)",
        ),
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "Deadline Exceeded",
            "the server at 10.0.0.1:5 did not answer in time",
        ),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "Method not found!"),
    ],
)
def test_each_end_of_a_connection_has_its_words(code: grpc.StatusCode, details: str, message: str) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    assert str(translate(error, "10.0.0.1:5")) == message
