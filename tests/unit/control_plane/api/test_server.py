"""The port itself: health, reflection, what operators see, starting and stopping."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from control_plane.api.config import ServerConfig
from plugins.errors import InvalidConfig
from plugins.types import FinishReason, TokenId
from protos.inference.v1.inference_pb2 import GenerateRequest
from tests.unit.control_plane.api.running import Running, running

SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3
INFERENCE, ADMIN = "dihedral.inference.v1.InferenceService", "dihedral.admin.v1.AdminService"


async def check(run: Running, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(run.channel)
    response = await stub.Check(  # type: ignore[attr-defined]  # the package's stubs lack the methods
        health_pb2.HealthCheckRequest(service=name)
    )
    status: int = response.status
    return status


def watch(run: Running, name: str) -> "grpc.aio.UnaryStreamCall[object, health_pb2.HealthCheckResponse]":
    stub = health_pb2_grpc.HealthStub(run.channel)
    call: grpc.aio.UnaryStreamCall[object, health_pb2.HealthCheckResponse]
    call = stub.Watch(  # type: ignore[attr-defined]  # the package's stubs lack the methods
        health_pb2.HealthCheckRequest(service=name)
    )
    return call


async def next_status(call: "grpc.aio.UnaryStreamCall[object, health_pb2.HealthCheckResponse]") -> int:
    response = await call.read()
    assert isinstance(response, health_pb2.HealthCheckResponse)
    return response.status


async def test_a_server_without_a_worker_lives_and_is_not_ready() -> None:
    async with running() as run:
        names = ("", "liveness", "readiness", INFERENCE, ADMIN)

        assert [await check(run, name) for name in names] == [SERVING, SERVING, NOT_SERVING, NOT_SERVING, NOT_SERVING]


async def test_readiness_comes_with_the_models_and_goes_with_them() -> None:
    async with running() as run:
        names = ("", "liveness", "readiness", INFERENCE, ADMIN, f"{INFERENCE}/small")

        run.health.set_models(["small"])
        ready = [await check(run, name) for name in names]
        run.health.set_models([])
        lost = [await check(run, name) for name in names]

        assert ready == [SERVING] * 6
        assert lost == [SERVING, SERVING, NOT_SERVING, NOT_SERVING, NOT_SERVING, NOT_SERVING]


async def test_a_model_that_is_served_no_longer_is_not_ready_beside_one_that_is_and_the_server_stays_ready() -> None:
    async with running() as run:
        run.health.set_models(["old", "new"])
        run.health.set_models(["new"])

        assert await check(run, f"{INFERENCE}/old") == NOT_SERVING
        assert await check(run, f"{INFERENCE}/new") == SERVING
        assert [await check(run, name) for name in ("readiness", INFERENCE, ADMIN)] == [SERVING] * 3


async def test_draining_ends_readiness_for_good_and_leaves_the_process_alive() -> None:
    async with running() as run:
        run.health.set_models(["small"])

        run.health.drain()
        run.health.set_models(["small"])

        assert await check(run, "readiness") == NOT_SERVING
        assert await check(run, f"{INFERENCE}/small") == NOT_SERVING
        assert await check(run, "liveness") == SERVING


async def test_a_health_check_of_an_unknown_name_is_not_found_and_lists_the_known_ones() -> None:
    async with running() as run:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await check(run, "readyness")

        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert "'liveness', 'readiness'" in (raised.value.details() or "")


async def test_a_watcher_is_told_each_change() -> None:
    async with running() as run:
        call = watch(run, "readiness")
        first = await next_status(call)
        run.health.set_models(["small"])
        second = await next_status(call)
        run.health.set_models([])

        assert [first, second, await next_status(call)] == [NOT_SERVING, SERVING, NOT_SERVING]


async def test_a_watcher_of_an_unknown_name_waits_until_it_is_known() -> None:
    async with running() as run:
        call = watch(run, f"{INFERENCE}/later")
        first = await next_status(call)
        run.health.set_models(["later"])

        assert [first, await next_status(call)] == [UNKNOWN, SERVING]


async def test_a_server_that_operators_have_closed_stays_not_ready_whatever_its_workers_do() -> None:
    async with running() as run:
        run.health.set_models(["small"])
        run.health.set_open(False)
        run.health.set_models(["small"])
        while_closed = [await check(run, name) for name in ("", "liveness", "readiness", f"{INFERENCE}/small")]
        run.health.set_open(True)

        assert while_closed == [SERVING, SERVING, NOT_SERVING, NOT_SERVING]
        assert [await check(run, name) for name in ("readiness", f"{INFERENCE}/small")] == [SERVING, SERVING]


async def test_stopping_tells_watchers_and_ends_their_calls() -> None:
    async with running() as run:
        run.health.set_models(["small"])
        call = watch(run, "readiness")
        first = await next_status(call)

        stopping = asyncio.create_task(run.server.stop(grace_s=60.0))

        assert [first, await next_status(call)] == [SERVING, NOT_SERVING]
        assert await call.read() is grpc.aio.EOF
        await stopping


async def test_a_stop_lets_open_streams_end_within_the_grace() -> None:
    async with running() as run:
        call = run.inference.Generate(GenerateRequest(text="a"))
        await run.engine.submitted.wait()

        stopping = asyncio.create_task(run.server.stop(grace_s=60.0))
        run.engine.streams[next(iter(run.engine.streams))].put((TokenId(2),), FinishReason.STOP, None, 0.0)

        assert [response.finish_reason async for response in call] == [1]
        await stopping


async def test_a_stop_ends_what_outlasts_the_grace_and_cancels_its_request() -> None:
    async with running() as run:
        call = run.inference.Generate(GenerateRequest(text="a"))
        await run.engine.submitted.wait()

        await run.server.stop(grace_s=0)

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        await run.engine.cancel_seen.wait()
        assert run.engine.cancelled == ["drawn"]


async def test_stopping_twice_is_stopping_once() -> None:
    async with running() as run:
        await run.server.stop(grace_s=0)
        await run.server.stop(grace_s=0)


async def test_a_port_in_use_stops_the_start_and_is_named() -> None:
    async with running() as run:
        with pytest.raises(InvalidConfig, match=f"cannot listen on 127.0.0.1:{run.port}: the port is in use"):
            async with running(config=ServerConfig(port=run.port)):
                pass


async def test_the_host_is_configured() -> None:
    with pytest.raises(InvalidConfig, match="cannot listen on 192.0.2.1:0"):
        async with running(config=ServerConfig(host="192.0.2.1", port=0)):
            pass


async def services(run: Running) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(run.channel)  # type: ignore[arg-type]  # an aio channel serves as well
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    call = stub.ServerReflectionInfo(requests)  # type: ignore[operator]  # the package's stubs lack its type
    response = await anext(aiter(call))
    return [service.name for service in response.list_services_response.service]


async def test_reflection_lists_the_services() -> None:
    async with running() as run:
        assert await services(run) == [
            ADMIN,
            INFERENCE,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        ]


async def test_reflection_can_be_turned_off() -> None:
    async with running(config=ServerConfig(port=0, reflection=False)) as run:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await services(run)

        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("key", "value"),
    [("port", -1), ("port", 65536), ("max_message_mib", 0), ("max_message_mib", 2048), ("drain_s", -1.0)],
)
def test_a_setting_that_cannot_work_is_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=f"server.{key} must be"):
        ServerConfig(**{key: value})  # type: ignore[arg-type]  # one name or the other
