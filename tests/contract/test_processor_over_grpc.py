"""Logits processors of another distribution, as its users meet them: installed by pip, found by their entry points,
in real processes of both planes."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from plugins.errors import Code, InvalidRequest
from protos.admin.v1 import admin_pb2
from protos.inference.v1 import inference_pb2
from protos.status import from_rpc_error
from tests.architecture.sources import ROOT
from tests.end_to_end.cells import REFERENCE, cell, serving
from tests.end_to_end.clients import Client, ask, connected
from tests.end_to_end.processes import FREE_PORTS, TINY, Dihedral, dihedral, run

SOURCES = ROOT / "tests/third_party/turning"
TWICE = ("--plugins.logits-processors=turn", "--log.format=json")  # once by entry point, once more by the list
PROMPT = [1, 2, 3]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the distribution, offline."""
    folder = tmp_path_factory.mktemp("installed")
    copy = tmp_path_factory.mktemp("sources") / "turning"  # building leaves files behind
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--target", str(folder), str(copy)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def plugged_in(installed: Path) -> Iterator[None]:
    """The processes of these tests see what is installed there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(installed))
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(plugged_in: None) -> AsyncIterator[tuple[Dihedral, Client]]:
    """One server for all tests that need no other."""
    async with serving(*TWICE) as running:
        yield running


def asking(extra_args: Mapping[str, Any], max_tokens: int = 4) -> inference_pb2.GenerateRequest:
    request = ask(PROMPT, max_tokens)
    request.sampling.extra_args.update(extra_args)
    return request


async def failure(client: Client, extra_args: Mapping[str, Any]) -> tuple[int, str, str]:
    """Ask, and return code, reason and message of what ended the answer."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.answer(asking(extra_args))
    error = from_rpc_error(caught.value)
    return error.code, error.reason, str(error)


async def violations(client: Client, extra_args: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Ask, and return path and reason of all that is wrong."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.answer(asking(extra_args))
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest), error
    return [(each.field, each.reason) for each in error.violations]


# -- found in both planes -----------------------------------------------------------------------------------------


async def test_a_processor_of_another_distribution_is_found_in_both_planes_and_given_twice_is_applied_twice(
    server: tuple[Dihedral, Client],
) -> None:
    running, client = server
    plain = await client.answer(ask(PROMPT, 1))

    turned = await client.answer(asking({"turn": 5}, max_tokens=1))

    assert turned.token_ids[0] == plain.token_ids[0] + 2 * 5
    listed = (await client.admin.ListPlugins(admin_pb2.ListPluginsRequest())).logits_processors
    assert [(each.name, each.place, each.distribution, list(each.extra_arg_names)) for each in listed] == [
        ("trouble", "turning:Trouble", "turning 1.5", ["trouble"]),
        ("turn", "turning:Turn", "turning 1.5", ["turn", "turn_after"]),
        ("turn", "turning:Turn", "turning 1.5", ["turn", "turn_after"]),
    ]
    assert json.loads(listed[1].parameter_schema)["properties"]["turn"] == {"type": "integer", "minimum": 1}
    assert [line for line in running.log if "logits_processor_undeclared" in line] == []


async def test_what_a_processor_is_asked_for_is_checked_at_admission(server: tuple[Dihedral, Client]) -> None:
    """B085."""
    _, client = server

    assert await violations(client, {"turn": "far"}) == [("sampling.extra_args.turn", "SCHEMA_VIOLATION")]
    assert await violations(client, {"turn": 1.5}) == [("sampling.extra_args.turn", "SCHEMA_VIOLATION")]
    assert await violations(client, {"turn": [1, {"x": None}]}) == [("sampling.extra_args.turn", "SCHEMA_VIOLATION")]
    assert await violations(client, {"trun": 1}) == [("sampling.extra_args.trun", "UNKNOWN_ARGUMENT")]
    assert await violations(client, {"turn": "x" * 10_000_000}) == [("sampling.extra_args", "TOO_LONG")]
    assert await violations(client, {"turn": 13}) == [("sampling.extra_args", "REFUSED_BY_PROCESSOR")]


TROUBLES = [
    ("ValueError", Code.INVALID_ARGUMENT, "trouble refuses it: such trouble is not wanted"),
    ("validate_params", Code.INTERNAL, "failed in validate_params: KeyError: 'what it looked for'"),
    ("add_request", Code.INTERNAL, "failed in add_request: KeyError: 'what it looked for'"),
    ("apply_staged_writes", Code.INTERNAL, "failed in apply_staged_writes: KeyError: 'what it looked for'"),
    ("apply", Code.INTERNAL, "failed in apply: KeyError: 'what it looked for'"),
    ("wrong shape", Code.INTERNAL, "failed in apply: it returned (2, "),
]


async def test_a_processor_that_fails_ends_the_request_that_needs_it_and_no_other(
    server: tuple[Dihedral, Client],
) -> None:
    """B083."""
    _, client = server
    neighbour = asking({"turn": 1}, max_tokens=150)
    golden = await client.answer(neighbour)
    for trouble, code, said in TROUBLES:
        started = asyncio.Event()
        running = asyncio.create_task(client.answer(neighbour, started.set))
        await started.wait()

        found = await failure(client, {"trouble": trouble})

        is_alone = not running.done()
        assert found[:2] == (code, "PLUGIN_FAILED" if code is Code.INTERNAL else "INVALID_REQUEST")
        assert said in found[2]
        assert code is Code.INVALID_ARGUMENT or "logits processor trouble (turning:Trouble)" in found[2]
        assert is_alone, trouble
        assert await running == golden, trouble


async def test_a_new_tensor_is_as_good_as_the_one_that_was_given(server: tuple[Dihedral, Client]) -> None:
    _, client = server

    assert await client.answer(asking({"trouble": "new tensor"})) == await client.answer(ask(PROMPT, 4))


async def test_what_a_processor_had_counted_is_counted_again_on_the_worker_that_takes_a_request_over() -> None:
    request = asking({"turn": 5, "turn_after": 200}, max_tokens=300)
    is_half = asyncio.Event()
    num_messages = 0

    def count() -> None:
        nonlocal num_messages
        num_messages += 1
        if num_messages == 100:
            is_half.set()

    async with (
        cell("--log.format=json", num_workers=2, worker_words=REFERENCE) as running,
        connected(running.control_plane.address) as client,
    ):
        golden = await client.answer(request)
        answering = asyncio.create_task(client.answer(request, count))
        await is_half.wait()
        (busy,) = [worker.worker_id for worker in await client.workers() if worker.num_running]
        running.workers[running.addresses.index(busy)].process.kill()

        answer = await answering
        lost = await running.control_plane.logged("worker_lost")

    assert answer == golden
    assert lost["worker_id"] == busy


# -- refused at the start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["serve", "control-plane"])
async def test_a_processor_that_imports_torch_at_the_top_stops_the_control_plane_with_the_remedy(command: str) -> None:
    words = TINY if command == "serve" else ()

    code, _, err = await run(command, *words, *FREE_PORTS, "--plugins.logits-processors=turning_eager:Eager")

    assert code == 2
    assert err.splitlines()[-1] == (
        "dihedral: plugins.logits_processors 'turning_eager:Eager' (turning_eager:Eager of turning 1.5) cannot be "
        "loaded: BlockedImport: torch is blocked in the control plane, which has no tensors; import it inside the "
        "methods that need it, or install a version of turning that fits"
    )


async def test_a_worker_with_other_processors_is_refused_and_both_lists_are_told() -> None:
    async with cell("--log.format=json", num_workers=1, worker_words=REFERENCE) as running:
        port = running.addresses[0].rpartition(":")[2]
        await running.stop(0)
        words = (*REFERENCE, f"--port={port}", "--metrics.port=0", "--plugins.logits-processors=turn")
        async with dihedral("worker", *words):
            why = (
                "the worker has the logits processors turning:Trouble, turning:Turn, turning:Turn, this control plane "
                "turning:Trouble, turning:Turn; install the same plug-ins and set the same plugins.logits_processors "
                "on both"
            )
            await running.control_plane.logged("worker_unreachable", why=why)
