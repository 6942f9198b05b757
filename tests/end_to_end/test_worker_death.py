"""What else a worker's death may not do: hang a caller, fool a probe, leave a process, or bring old state back."""

import asyncio
import os
import signal
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2

from control_plane.cli.demo import children
from plugins.errors import Code
from protos.status import from_rpc_error
from tests.end_to_end.cells import REFERENCE, cell, serving
from tests.end_to_end.clients import ask, connected, load, questions
from tests.end_to_end.fragile_worker import FATAL
from tests.end_to_end.processes import FREE_PORTS, Dihedral, dihedral, ended, watch

SERVE = ("serve", *REFERENCE, *FREE_PORTS)
FRAGILE = (sys.executable, "-m", "tests.end_to_end.fragile_worker")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def kill_worker(server: Dihedral) -> None:
    os.kill(server.worker_pid(), signal.SIGKILL)


async def test_a_request_that_kills_two_workers_fails_alone_and_by_name() -> None:
    async with (
        cell("--workers.router=round_robin", worker_program=FRAGILE) as running,
        connected(running.control_plane.address) as client,
        running.kept_running() as deaths,
        load(client, questions(16, 300)) as clients,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.answer(ask([FATAL, 5, 6], 20))
        await clients.moved()

    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (Code.INTERNAL, "QUERY_OF_DEATH")
    assert deaths == [1, 1]


@pytest.mark.parametrize("is_decoding", [False, True], ids=["idle", "decoding"])
async def test_readiness_tells_of_a_dead_worker_at_once_and_liveness_does_not(is_decoding: bool) -> None:
    """Case B135: health stays SERVING when a worker is dead."""
    question = ask([5, 6, 7], 600, temperature=1.0, seed=3)
    async with serving() as (server, client):
        undisturbed = await client.answer(question)
        watching = client.health.Watch(health_pb2.HealthCheckRequest(service="readiness"))  # type: ignore[attr-defined]
        statuses = aiter(watching)
        before = (await anext(statuses)).status
        started = asyncio.Event()
        stream = asyncio.create_task(client.answer(question, started.set)) if is_decoding else None
        if stream is not None:
            await started.wait()

        kill_worker(server)
        told = (await anext(statuses)).status
        liveness = await client.health.Check(  # type: ignore[attr-defined]
            health_pb2.HealthCheckRequest(service="liveness")
        )
        later = (await anext(statuses)).status
        answer = await stream if stream is not None else undisturbed
        watching.cancel()

    assert (before, told, liveness.status, later) == (SERVING, NOT_SERVING, SERVING, SERVING)
    assert answer == undisturbed


async def test_streams_that_run_and_streams_that_wait_all_end_when_the_worker_dies() -> None:
    """Case B136: callers hang after the worker has died."""
    requests = questions(64, 400)
    async with serving("--worker.max-sequences=32") as (server, client):
        undisturbed = await asyncio.gather(*(client.answer(request) for request in requests))
        streams = [asyncio.create_task(client.answer(request)) for request in requests]
        await client.holds(num_running=32, num_waiting=32)

        kill_worker(server)
        answers = await asyncio.gather(*streams)
        [worker] = await client.idle_workers()

    assert [answer.num_finals for answer in answers] == [1] * 64
    assert answers == undisturbed
    assert worker.num_free_blocks == worker.num_blocks


async def test_a_worker_that_dies_three_times_before_it_serves_ends_serve_and_nothing_is_left() -> None:
    """Case B139: a start that times out leaves workers behind."""
    async with dihedral(*SERVE) as server:
        workers = []
        since = 0
        for _ in range(3):
            pid = (await server.logged("worker_started", since))["pid"]
            since = len(server.log)
            assert isinstance(pid, int)
            workers.append(watch(pid))
            os.kill(pid, signal.SIGKILL)
        code = await server.process.wait()
        for worker in workers:
            await ended(worker)
        left = children(server.process.pid)

    assert code == 1
    assert server.log[-1] == (
        "dihedral: the worker died 3 times before it could serve (last: SIGKILL); its own messages are above"
    )
    assert left == []


async def test_a_worker_that_hangs_while_it_loads_is_killed_with_serve() -> None:
    """Case B139: a start that times out leaves workers behind."""
    async with dihedral(*SERVE) as server:
        pid = (await server.logged("worker_started"))["pid"]
        assert isinstance(pid, int)
        worker = watch(pid)
        os.kill(pid, signal.SIGSTOP)

        server.process.send_signal(signal.SIGTERM)
        code = await server.process.wait()

        await ended(worker)

    assert code == 0


async def test_a_worker_that_comes_back_has_nothing_cached_and_says_the_same() -> None:
    """Case B143: a restart brings back old state."""
    question = ask(range(3, 103), 20)
    async with serving() as (server, client):
        first, second = await client.answer(question), await client.answer(question)
        since = len(server.log)

        kill_worker(server)
        await server.logged("worker_ready", since)
        third, fourth = await client.answer(question), await client.answer(question)
        [worker] = await client.idle_workers()

    assert [each.cached_tokens for each in (first, second, third, fourth)] == [0, 96, 0, 96]
    assert first == second == third == fourth
    assert worker.num_free_blocks == worker.num_blocks


async def test_a_control_plane_that_comes_back_believes_nothing_of_what_the_worker_had_cached() -> None:
    """Case B143: a restart brings back old state."""
    question = ask(range(3, 103), 20)
    async with cell("--workers.owner-id=one", num_workers=1) as running:
        async with connected(running.control_plane.address) as client:
            first, second = await client.answer(question), await client.answer(question)

        running.control_plane.process.kill()
        await running.control_plane.process.wait()
        again = await running.add_control_plane(f"--workers.address={running.addresses[0]}", "--workers.owner-id=one")
        await again.ready()
        async with connected(again.address) as client:
            third, fourth = await client.answer(question), await client.answer(question)
            [worker] = await client.idle_workers()

    assert [each.cached_tokens for each in (first, second, third, fourth)] == [0, 96, 0, 96]
    assert first == second == third == fourth
    assert worker.num_free_blocks == worker.num_blocks
