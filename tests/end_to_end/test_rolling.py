"""What operators do to a running cell: restart and upgrade its workers, add and remove some, end its control plane."""

import asyncio
import json
import signal
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from plugins.errors import Code
from protos.status import from_rpc_error
from tests.end_to_end.cells import REFERENCE, cell
from tests.end_to_end.clients import Client, ask, connected, load, questions
from tests.end_to_end.processes import run


async def generations(address: str) -> dict[str, tuple[str, str]]:
    """Ask `dihedral status` for each state of a generation: how many workers of one are live, and how they differ."""
    _, out, _ = await run("status", "--json", "--address", address)
    return {each["state"]: (each["live_workers"], each["differs"]) for each in json.loads(out)["generations"]}


async def until_idle(client: Client, address: str) -> None:
    """Wait until a worker has no request."""
    while True:
        [worker] = [worker for worker in await client.workers() if worker.worker_id == address]
        if worker.num_running == worker.num_waiting == 0:
            return
        await asyncio.sleep(0.02)


async def test_a_rolling_restart_costs_no_stream_and_no_token() -> None:
    async with (
        cell() as running,
        connected(running.control_plane.address) as client,
        load(client, questions(32, 200)) as clients,
    ):
        for number in (0, 1):
            assert await running.stop(number) == 0
            await running.restart(number)
            await clients.moved()

        reasons = [line for line in running.control_plane.log if '"event": "worker_lost"' in line]
        seen = await generations(running.control_plane.address)

    assert len(reasons) == 2
    assert all("it was asked to stop" in reason for reason in reasons), reasons
    assert seen == {"newest": ("2 of 2", "")}


async def test_an_upgrade_lets_old_requests_end_and_gives_new_ones_to_the_new_generation() -> None:
    async with (
        cell() as running,
        connected(running.control_plane.address) as client,
        load(client, questions(16, 200)) as clients,
    ):
        address = running.control_plane.address
        since = len(running.control_plane.log)

        await running.stop(0)
        await running.restart(0, "--worker.max-sequences=48")
        opened = await running.control_plane.logged("generation_opened", since)
        midway = await generations(address)
        await until_idle(client, running.addresses[1])
        await clients.moved()  # on the new generation alone
        await running.stop(1)
        await running.restart(1, "--worker.max-sequences=48")
        await clients.moved()
        done = await generations(address)

    assert opened["differences"] == ["max_sequences: 64 -> 48"]
    assert midway == {"newest": ("1 of 1", ""), "draining": ("1 of 1", "max_sequences: 64 -> 48")}
    assert done == {"newest": ("2 of 2", "")}


async def test_a_control_plane_that_is_asked_to_stop_ends_its_streams_in_order_and_refuses_others() -> None:
    question = ask([5, 6, 7], 1500, temperature=1.0, seed=3)
    async with cell("--drain-s=60", num_workers=1) as running, connected(running.control_plane.address) as client:
        undisturbed = await client.answer(question)
        started = asyncio.Event()
        stream = asyncio.create_task(client.answer(question, started.set))
        await started.wait()

        running.control_plane.process.send_signal(signal.SIGTERM)
        await running.control_plane.logged("signal_received")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            while True:  # what came before it looked at the signal was taken
                await client.answer(ask([8], 1))
        answer = await stream
        code = await running.control_plane.process.wait()

    error = from_rpc_error(refused.value)
    assert (error.code, error.retry_after_s) == (Code.UNAVAILABLE, 1.0)
    assert dict(refused.value.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1000"
    assert answer == undisturbed
    assert code == 0


async def test_a_second_control_plane_is_told_who_owns_the_worker_and_gets_it_when_the_first_is_gone() -> None:
    question = ask([5, 6, 7], 300, temperature=1.0, seed=3)
    worker_words = (*REFERENCE, "--worker.lease-s=0.5")
    async with cell("--workers.owner-id=first", num_workers=1, worker_words=worker_words) as running:
        places = f"--workers.address={running.addresses[0]}"
        async with connected(running.control_plane.address) as client, load(client, [question]) as clients:
            second = await running.add_control_plane(places, "--workers.owner-id=second")
            await second.logged("worker_unreachable")
            port = (await second.logged("server_started"))["port"]
            status = json.loads((await run("status", "--json", "--address", f"127.0.0.1:{port}"))[1])
            await clients.moved()

        running.control_plane.process.send_signal(signal.SIGTERM)
        await running.control_plane.process.wait()
        await second.ready()
        async with connected(second.address) as client:
            answer = await client.answer(question)

    assert status["readiness"] == "not_serving"
    assert "control plane 'first' owns this worker" in status["workers"][0]["detail"]
    assert len(answer.token_ids) == 300


async def test_workers_come_and_go_with_the_lines_of_a_file(tmp_path: Path) -> None:
    places = tmp_path / "workers"
    async with cell(
        "--workers.refresh-s=0.1", places=lambda addresses: write_lines(places, addresses), num_workers=1
    ) as running:
        log, address = running.control_plane, running.control_plane.address
        async with connected(address) as client, load(client, questions(8, 200)) as clients:
            await running.add_worker()
            write_lines(places, ["# both", *running.addresses])
            await log.logged("worker_ready", worker_id=running.addresses[1])
            both = [worker.worker_id for worker in await client.workers()]
            await clients.moved()

            write_lines(places, running.addresses[1:])
            await log.logged("worker_removed", worker_id=running.addresses[0])
            left = [worker.worker_id for worker in await client.workers()]
            await clients.moved()
        lost = [line for line in log.log if '"event": "worker_lost"' in line]

    assert both == sorted(running.addresses)
    assert left == running.addresses[1:]
    assert lost == []


def write_lines(path: Path, lines: Sequence[str]) -> str:
    """Put lines into a file, all at once as editors do, and tell what `workers.address` calls it."""
    draft = path.with_suffix(".draft")
    draft.write_text("\n".join(lines), encoding="utf-8")
    draft.replace(path)
    return f"file:{path}"
