"""`dihedral serve` from outside: it answers, ends without a trace, and outlives its worker."""

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import aclosing

import pytest

from control_plane.cli.client import Client
from control_plane.cli.demo import scrape, totals
from control_plane.cli.options import Sampling
from plugins.errors import Code, ServingError
from tests.end_to_end.clients import ask, connected
from tests.end_to_end.processes import FREE_PORTS, TINY, dihedral, ended, run, watch

SERVE = ("serve", *TINY, *FREE_PORTS)
TORCH_FREE = (sys.executable, "-m", "tests.architecture.torch_free", "control_plane.cli:main")
LONG = Sampling(max_tokens=2000, ignore_eos=True, temperature=0)
SHORT = Sampling(max_tokens=300, ignore_eos=True, temperature=0)


async def test_serve_answers_generate_status_and_scrapes_and_ends_without_a_trace() -> None:
    async with dihedral(*SERVE) as server:
        await server.ready()
        worker = watch(server.worker_pid())

        code, out, err = await run(
            "generate", "Hello", "--address", server.address, "--max-tokens=5", "--ignore-eos", "--json"
        )
        status = json.loads((await run("status", "--json", "--address", server.address))[1])
        counted = totals(await asyncio.to_thread(scrape, server.metrics_url))
        server.process.send_signal(signal.SIGTERM)

        assert (code, err) == (0, "")
        answer = json.loads(out)
        assert (answer["output_tokens"], answer["finish_reason"]) == (5, "length")
        assert status["readiness"] == "serving"
        assert status["workers"][0]["free_blocks"] == status["workers"][0]["num_blocks"]
        assert counted["dihedral_output_tokens_total"] == 5
        assert await server.process.wait() == 0
        await ended(worker)


async def test_the_logged_configuration_names_the_worker_that_serves() -> None:
    async with dihedral(*SERVE) as server:
        await server.ready()

        config = await server.logged("config_resolved")
        status = json.loads((await run("status", "--json", "--address", server.address))[1])

    worker, workers = config["worker"], config["workers"]
    assert isinstance(worker, dict)
    assert isinstance(workers, dict)
    assert status["workers"][0]["worker"] == workers["address"] == f"127.0.0.1:{worker['port']}"


async def test_the_first_signal_lets_running_streams_end() -> None:
    async with dihedral(*SERVE) as server:
        await server.ready()
        async with Client(server.address) as client, aclosing(client.generate("Hello", SHORT)) as deltas:
            await anext(deltas)

            server.process.send_signal(signal.SIGINT)
            rest = [delta async for delta in deltas]

        last = rest[-1].completion
        assert last is not None
        assert (last.output_tokens, last.finish_reason) == (300, "length")
        assert await server.process.wait() == 0


async def test_the_second_signal_ends_them() -> None:
    async with dihedral(*SERVE) as server:
        await server.ready()
        worker = watch(server.worker_pid())
        async with Client(server.address) as client, aclosing(client.generate("Hello", LONG)) as deltas:
            await anext(deltas)

            server.process.send_signal(signal.SIGTERM)
            await server.logged("signal_received")
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(ServingError) as caught:
                while True:
                    await anext(deltas)

        assert caught.value.code in (Code.UNAVAILABLE, Code.CANCELLED)
        assert await server.process.wait() == 1
        await ended(worker)


async def test_prompts_probes_and_scrapes_are_logged_at_no_level() -> None:
    async with dihedral(*SERVE, "--log.level=debug") as server:
        await server.ready()

        await run("generate", "xyzzy plugh", "--address", server.address, "--max-tokens=5", "--ignore-eos")
        await run("status", "--address", server.address)
        await asyncio.to_thread(scrape, server.metrics_url)
        server.process.send_signal(signal.SIGTERM)
        await server.process.wait()

    log = "\n".join(server.log)
    assert "config_resolved" in log
    assert "xyzzy" not in log
    assert "Health" not in log
    assert "GET" not in log


async def test_killing_serve_leaves_no_process_behind() -> None:
    async with dihedral(*SERVE) as server:
        await server.ready()
        worker = watch(server.worker_pid())

        server.process.kill()

        await ended(worker)


async def test_streams_of_a_killed_worker_wait_for_its_successor_and_go_on_where_they_were() -> None:
    question = ask([5, 6, 7], 600, temperature=1.0, seed=3)
    async with dihedral(*SERVE, "--dtype=float32") as server:
        await server.ready()
        first_worker = server.worker_pid()
        async with connected(server.address) as client:
            undisturbed = await client.answer(question)
            started = [asyncio.Event() for _ in range(4)]
            streams = [asyncio.create_task(client.answer(question, each.set)) for each in started]
            for each in started:
                await each.wait()

            os.kill(first_worker, signal.SIGKILL)
            answers = await asyncio.gather(*streams)

        assert answers == [undisturbed] * 4
        assert server.worker_pid() != first_worker


async def test_the_control_plane_serves_without_torch_with_a_worker_in_another_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async with (
        dihedral("worker", *TINY, f"--port={port}", "--metrics.port=0"),
        dihedral("control-plane", f"--workers.address=127.0.0.1:{port}", *FREE_PORTS, program=TORCH_FREE) as server,
    ):
        await server.ready()
        code, out, _ = await run(
            "generate", "Hello", "--address", server.address, "--max-tokens=4", "--ignore-eos", "--json"
        )

    assert code == 0
    assert json.loads(out)["output_tokens"] == 4


async def test_a_worker_without_torch_is_refused_with_the_remedy() -> None:
    async with dihedral("worker", *TINY, *FREE_PORTS, program=TORCH_FREE) as worker:
        code = await worker.process.wait()

    assert code == 2
    assert worker.log[-1].startswith("dihedral: command 'worker' (gpu_worker.cli:main of dihedral) cannot be loaded: ")
    assert worker.log[-1].endswith("install what it needs, such as pip install 'dihedral[worker]'")


async def test_a_control_plane_without_a_worker_says_so() -> None:
    async with dihedral("control-plane", "--workers.address=127.0.0.1:1", *FREE_PORTS) as server:
        port = (await server.logged("server_started"))["port"]

        code, _, err = await run("generate", "Hello", "--address", f"127.0.0.1:{port}")

    assert code == 1
    assert err.startswith("dihedral: no model is served now: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "/nowhere/model.gguf", *FREE_PORTS), "/nowhere/model.gguf"),
        (("serve", __file__, *FREE_PORTS), __file__),
        (("serve", "--load-format=nonsense", *FREE_PORTS), "nonsense"),
    ],
)
async def test_a_worker_that_cannot_start_stops_serve_with_its_message(words: tuple[str, ...], message: str) -> None:
    async with dihedral(*words) as server:
        code = await server.process.wait()

    complaints = [line for line in server.log if line.startswith("dihedral: ")]
    assert code == 2
    assert message in complaints[0]
    assert complaints[1] == "dihedral: the worker could not start; its own message is above"


async def test_the_demo_shows_three_chats_and_that_they_were_counted() -> None:
    demo = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "control_plane.cli.demo", *TINY, stdout=asyncio.subprocess.PIPE
    )

    out, _ = await demo.communicate()

    lines = out.decode().splitlines()
    assert demo.returncode == 0
    assert [line[:5] for line in lines if line[3:5] == " >"] == ["[1] >", "[2] >", "[3] >"]
    assert "  dihedral_requests_total 3 (as streamed)" in lines
    assert lines[-1] == "Both processes stopped (exit code 0)."


async def test_a_port_in_use_stops_serve_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async with dihedral("serve", *TINY, f"--port={port}", "--metrics.port=0") as server:
            code = await server.process.wait()

    assert code == 2
    assert server.log[-1].startswith(f"dihedral: cannot listen on 127.0.0.1:{port}: the port is in use")
    assert not [line for line in server.log if "worker_started" in line]
