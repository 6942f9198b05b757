"""The hooks, line by line, as their users meet them: in process, and in real processes over gRPC."""

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from control_plane.cli.commands import main
from control_plane.engine.local import LocalEngine
from control_plane.engine.scheduler_choice import choose_scheduler
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from control_plane.scheduling.synchronous import SynchronousScheduler
from plugins.conformance.policy import check_policy
from plugins.errors import Code, InvalidConfig
from plugins.scheduler import SchedulingPolicy
from plugins.types import FinishReason, Request, SamplingParams, StepPlan
from protos.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from protos.status import from_rpc_error
from tests.architecture.sources import ROOT
from tests.end_to_end.processes import FREE_PORTS, TINY, Dihedral, dihedral

HERE = "tests.contract.test_hooks"
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class Dummy(SynchronousScheduler):
    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        raise Exception("Exception raised by Dummy")


class Patient(SynchronousScheduler):
    """Works, one plan at a time."""


class Hasty(RunAheadScheduler):
    """Works, and runs ahead."""


class LastComePolicy(SchedulingPolicy):
    def order(self, request: Request) -> float:
        return -request.arrival


class BrokenPolicy(SchedulingPolicy):
    def order(self, request: Request) -> float:
        raise LookupError("no such tenant")


@contextmanager
def local_engine(**keys: Any) -> Iterator[LocalEngine]:
    with LocalEngine(load_format="dummy", dtype="float32", threads=1, num_blocks=64, **keys) as engine:
        yield engine


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.message == "scheduler_not_public"]


# -- the scheduler, in process ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler_cls", [Dummy, f"{HERE}:Dummy"], ids=["class object", "name"])
def test_what_a_scheduler_raises_reaches_the_caller_as_it_was(scheduler_cls: Any) -> None:
    with local_engine(scheduler_cls=scheduler_cls) as engine:
        engine.add_request("0", "foo", SamplingParams(max_tokens=1))

        with pytest.raises(Exception, match="Dummy") as caught:
            engine.step()

    assert str(caught.value) == "Exception raised by Dummy"
    assert type(caught.value) is Exception


@pytest.mark.parametrize("policy", [BrokenPolicy, f"{HERE}:BrokenPolicy"], ids=["class object", "name"])
def test_what_a_policy_raises_reaches_the_caller_as_it_was(policy: Any) -> None:
    with (
        local_engine(policy=policy) as engine,
        pytest.raises(LookupError, match="^no such tenant$"),
    ):
        engine.add_request("0", "foo", SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    "keys",
    [
        {"scheduler_cls": Patient},
        {"scheduler_cls": f"{HERE}:Hasty"},
        {"scheduler_cls": f"{HERE}.Hasty"},
        {"scheduler": SchedulerConfig(scheduler_cls=f"{HERE}:Patient")},
        {"scheduler": SchedulerConfig(async_scheduling=False)},
        {"scheduler": SchedulerConfig(policy=f"{HERE}:LastComePolicy")},
        {"policy": LastComePolicy},
        {"policy": "fair_share"},
    ],
    ids=[
        "class object",
        "pkg.mod:Class",
        "pkg.mod.Class",
        "configured",
        "synchronous",
        "policy",
        "policy object",
        "fair share",
    ],
)
def test_every_scheduler_gives_the_tokens_of_the_built_in_one(keys: dict[str, Any]) -> None:
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3, 6]]
    with local_engine() as engine:
        expected = [completion.token_ids for completion in engine.generate(prompts, GREEDY)]

    with local_engine(**keys) as engine:
        completions = engine.generate(prompts, GREEDY)

    assert [completion.token_ids for completion in completions] == expected
    assert {completion.finish for completion in completions} == {FinishReason.LENGTH}


def test_an_engine_imports_the_chosen_scheduler_alone() -> None:
    source = (
        "import sys\n"
        "from control_plane.engine.local import LocalEngine\n"
        "from control_plane.scheduling.config import SchedulerConfig\n"
        "with LocalEngine(scheduler=SchedulerConfig(async_scheduling=False), load_format='dummy', threads=1,\n"
        "                 num_blocks=8) as engine:\n"
        "    names = ('run_ahead', 'synchronous')\n"
        "    print(*(name for name in names if 'control_plane.scheduling.' + name in sys.modules))\n"
    )

    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT)

    assert run.stdout == "synchronous\n", run.stderr


def test_a_class_of_yours_warns_once_and_tells_its_depth(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(RunAheadScheduler):
        pass

    for _ in range(3):
        choose_scheduler(SchedulerConfig(), Mine)

    (warning,) = warnings(caplog)
    fields = warning.__dict__
    assert warning.levelno == logging.WARNING
    assert fields["scheduler_cls"].startswith(f"{HERE}:") and fields["scheduler_cls"].endswith("Mine")
    assert fields["max_plans_in_flight"] == 2
    assert fields["detail"] == "the interface of schedulers is not public: it may change with any release"


def test_a_subclass_of_the_synchronous_one_is_told_that_it_loses_run_ahead(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(SynchronousScheduler):
        pass

    choose_scheduler(SchedulerConfig(async_scheduling=True), Mine)

    (warning,) = warnings(caplog)
    assert warning.__dict__["max_plans_in_flight"] == 1
    assert "it derives from SynchronousScheduler and so loses run-ahead" in warning.__dict__["detail"]


def test_two_classes_warn_once_each(caplog: pytest.LogCaptureFixture) -> None:
    class One(RunAheadScheduler):
        pass

    class Two(RunAheadScheduler):
        pass

    for cls in (One, Two, One, Two):
        choose_scheduler(SchedulerConfig(), cls)

    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize("name", ["mine", "nowhere.mod:Class", f"{HERE}:LastComePolicy", f"{HERE}:Nothing"])
def test_a_name_that_leads_to_no_scheduler_stops_the_start(name: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"scheduler\.scheduler_cls '{re.escape(name)}'"):
        LocalEngine(scheduler_cls=name, load_format="dummy")


def example(name: str) -> str:
    """The source on the page that defines this class."""
    page = (ROOT / "docs/scheduler.md").read_text(encoding="utf-8")
    (source,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"class {name}(" in each]
    return str(source)


def test_the_policy_of_the_page_keeps_its_promises() -> None:
    names: dict[str, Any] = {}
    exec(example("ShortestFirst"), names)

    results = check_policy(names["ShortestFirst"])

    assert [result for result in results if not result.passed] == []


def test_the_scheduler_of_the_page_keeps_its_promises_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.py").write_text(example("OneAtATime"))
    monkeypatch.syspath_prepend(str(tmp_path))

    assert main(["plugins", "check", "one:OneAtATime"]) == 0

    prompts = [[1, 2, 3], [4, 5], [1, 2, 3, 6]]
    with local_engine() as engine:
        expected = [completion.token_ids for completion in engine.generate(prompts, GREEDY)]
    with local_engine(scheduler_cls="one:OneAtATime") as engine:
        assert [completion.token_ids for completion in engine.generate(prompts, GREEDY)] == expected


# -- the scheduler, over gRPC -------------------------------------------------------------------------------------

FAILING = '''
"""A scheduler that fails at requests of a certain name, and tells which of its instances it is."""

from control_plane.scheduling.run_ahead import RunAheadScheduler


class Failing(RunAheadScheduler):
    num_instances = 0

    def __init__(self, config, worker, policy=None):
        super().__init__(config, worker, policy)
        Failing.num_instances += 1
        self.number = Failing.num_instances

    def schedule(self, throttle_prefills=False):
        if any(request_id.startswith("fail") for request_id in self._sequences):
            raise Exception(f"instance {self.number} met a request that it fails at")
        return super().schedule(throttle_prefills)
'''


class Client:
    """A raw client of one server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(channel)

    async def tokens(self, request_id: str, max_tokens: int = 4, started: asyncio.Event | None = None) -> list[int]:
        """Generate, waiting for a worker if there is none. Raises: grpc.aio.AioRpcError."""
        request = inference_pb2.GenerateRequest(request_id=request_id, tokens=inference_pb2.TokenIds(ids=[1, 2, 3]))
        request.sampling.max_tokens = max_tokens
        request.sampling.temperature = 0
        request.sampling.ignore_eos = True
        while True:
            tokens: list[int] = []
            try:
                async for response in self._inference.Generate(request):
                    tokens += response.token_ids
                    if started is not None:
                        started.set()
                return tokens
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.05)

    async def failure(
        self, request_id: str, max_tokens: int = 4, started: asyncio.Event | None = None
    ) -> tuple[int, str, str]:
        """Generate, and return code, reason and message of what ended it."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.tokens(request_id, max_tokens, started)
        error = from_rpc_error(caught.value)
        return error.code, error.reason, str(error)

    async def worker(self) -> admin_pb2.Worker:
        return (await self._admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers[0]


@asynccontextmanager
async def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Dihedral, Client]]:
    (folder / "planted_scheduler.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    words = ("serve", *TINY, *FREE_PORTS, "--scheduler.scheduler-cls=planted_scheduler:Failing", "--log.format=json")
    async with dihedral(*words) as server:
        await server.ready()
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield server, Client(channel)


async def test_a_scheduler_that_raises_ends_its_requests_and_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, monkeypatch) as (server, client):
        expected = await client.tokens("before")
        started = asyncio.Event()
        neighbour = asyncio.create_task(client.failure("neighbour", max_tokens=2000, started=started))
        await started.wait()

        failure = await client.failure("fail 1")

        message = "the scheduler raised Exception: instance 1 met a request that it fails at"
        assert failure == (Code.INTERNAL, "PLUGIN_FAILED", message)
        assert await neighbour == failure
        assert await client.tokens("after") == expected
        assert (await client.failure("fail 2"))[2].endswith("instance 2 met a request that it fails at")
        assert (await server.logged("scheduler_not_public"))["max_plans_in_flight"] == 2
        assert [line for line in server.log if '"event": "scheduler_not_public"' in line][1:] == []


async def test_the_third_failure_in_a_minute_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, monkeypatch) as (server, client):
        for number in (1, 2, 3):
            _, reason, message = await client.failure(f"fail {number}")
            assert (reason, message.split(": ")[1][:10]) == ("PLUGIN_FAILED", f"instance {number}")

        given_up = await server.logged("worker_given_up")
        worker = await client.worker()

        assert "instance 3 met a request" in str(given_up["why"])
        assert admin_pb2.Link.Name(worker.link) == "LINK_FAILED"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.tokens("after"), 1.0)  # refused with UNAVAILABLE, however often it is tried
