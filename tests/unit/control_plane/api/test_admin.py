"""What operators see and do over the admin service."""

from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.facts import Intake, Link, Residency, Weights
from control_plane.workers.supervisor import WorkerView
from plugins.errors import IllegalMove, SubscriberTooSlow, UnknownWorker
from plugins.kv_events import BlocksCleared, BlocksRemoved, BlocksStored
from plugins.types import GenerationId, TokenId, WorkerId
from protos.admin.v1 import admin_pb2
from protos.status import from_rpc_error
from tests.unit.control_plane.admission.models import served_model
from tests.unit.control_plane.api.running import Running, running

ONE, TWO = "10.0.0.1:50061", "10.0.0.2:50061"
OPEN, PAUSED, DRAINING = admin_pb2.INTAKE_OPEN, admin_pb2.INTAKE_PAUSED, admin_pb2.INTAKE_DRAINING


def see_two(run: Running) -> None:
    run.see(view(ONE))
    run.see(view(TWO))


def view(address: str) -> WorkerView:
    return WorkerView(WorkerId(address), served_model().worker, "", GenerationId("small-1"))


async def readiness(run: Running) -> str:
    stub = health_pb2_grpc.HealthStub(run.channel)
    response = await stub.Check(  # type: ignore[attr-defined]  # the package's stubs lack the methods
        health_pb2.HealthCheckRequest(service="readiness")
    )
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def test_operators_see_version_uptime_intake_and_load() -> None:
    async with running(clock=[100.0, 107.5]) as run:
        run.engine.intake = Intake.DRAINING

        assert await run.admin.GetServerInfo(admin_pb2.GetServerInfoRequest()) == admin_pb2.GetServerInfoResponse(
            version="1.2.3",
            uptime_s=7.5,
            intake=DRAINING,
            num_running=3,
            num_waiting=5,
            max_waiting=1024,
            num_waiting_tokens=700,
            max_waiting_tokens=4_000_000,
        )


async def test_operators_see_a_worker_with_its_facts_sizes_and_load() -> None:
    async with running() as run:
        facts = run.see(view(ONE))
        facts.move_link(Link.LIVE)
        facts.move_intake(Intake.PAUSED)
        facts.weights = Weights.UPDATING
        facts.residency["kv_cache"] = Residency.ASLEEP

        (worker,) = (await run.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers

        assert (worker.worker_id, worker.link, worker.detail) == (ONE, admin_pb2.LINK_LIVE, "")
        assert (worker.intake, worker.weights) == (PAUSED, admin_pb2.WEIGHTS_UPDATING)
        assert dict(worker.residency) == {
            "weights": admin_pb2.RESIDENCY_RESIDENT,
            "kv_cache": admin_pb2.RESIDENCY_ASLEEP,
        }
        assert (worker.model.name, worker.incarnation, worker.load_s) == ("small", "first", 0.5)
        assert (worker.num_blocks, worker.num_free_blocks, worker.block_size) == (64, 40, 16)
        assert (worker.kv_cache_dtype, worker.kv_bytes) == ("float32", 4096)
        assert (worker.num_running, worker.num_waiting, worker.num_preemptions) == (2, 1, 6)
        assert (worker.num_cached_blocks, worker.prefix_tokens, worker.prefix_hits) == (9, 400, 100)
        assert (worker.generation, worker.is_newest_generation) == ("small-1", True)
        assert (list(worker.generation_difference), worker.is_leaving) == ([], False)


async def test_an_older_generation_tells_in_what_it_differs_from_the_newest() -> None:
    async with running() as run:
        run.see(replace(view(ONE), is_newest=False, differences=("dtype: float32 -> bfloat16",), is_leaving=True))

        (worker,) = (await run.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers

        assert (worker.generation, worker.is_newest_generation) == ("small-1", False)
        assert list(worker.generation_difference) == ["dtype: float32 -> bfloat16"]
        assert worker.is_leaving


async def test_a_worker_that_was_never_reached_is_listed_with_the_reason() -> None:
    async with running() as run:
        run.see(WorkerView(WorkerId(ONE), None, "connection refused"))

        (worker,) = (await run.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers

        assert (worker.link, worker.detail) == (admin_pb2.LINK_CONNECTING, "connection refused")
        assert not worker.HasField("model")
        assert (worker.generation, worker.is_newest_generation) == ("", False)


async def test_the_whole_server_pauses_resumes_and_drains_and_readiness_follows() -> None:
    async with running() as run:
        see_two(run)
        run.health.set_models(["small"])

        paused = (await run.admin.Pause(admin_pb2.PauseRequest())).intake
        while_paused = await readiness(run)
        resumed = (await run.admin.ResumeIntake(admin_pb2.ResumeIntakeRequest())).intake
        while_open = await readiness(run)
        drained = (await run.admin.Drain(admin_pb2.DrainRequest())).intake

        assert [paused.server, resumed.server, drained.server] == [PAUSED, OPEN, DRAINING]
        assert [worker.intake for worker in drained.workers] == [OPEN, OPEN]
        assert [while_paused, while_open, await readiness(run)] == ["NOT_SERVING", "SERVING", "NOT_SERVING"]


async def test_readiness_goes_when_the_last_open_worker_is_paused_by_its_name() -> None:
    async with running() as run:
        see_two(run)
        run.health.set_models(["small"])

        await run.admin.Drain(admin_pb2.DrainRequest(worker_ids=[TWO]))
        with_one_open = await readiness(run)
        await run.admin.Pause(admin_pb2.PauseRequest(worker_ids=[ONE]))
        with_none = await readiness(run)
        await run.admin.ResumeIntake(admin_pb2.ResumeIntakeRequest(worker_ids=[TWO]))

        assert [with_one_open, with_none, await readiness(run)] == ["SERVING", "NOT_SERVING", "SERVING"]


async def test_only_the_named_workers_move_and_readiness_stays() -> None:
    async with running() as run:
        see_two(run)
        run.health.set_models(["small"])

        report = (await run.admin.Drain(admin_pb2.DrainRequest(worker_ids=[TWO, TWO]))).intake

        assert report.server == OPEN
        assert [(worker.worker_id, worker.intake) for worker in report.workers] == [(ONE, OPEN), (TWO, DRAINING)]
        assert await readiness(run) == "SERVING"


async def test_moving_where_it_is_already_is_no_error() -> None:
    async with running() as run:
        see_two(run)

        for _ in range(2):
            await run.admin.Drain(admin_pb2.DrainRequest())
            report = (await run.admin.Drain(admin_pb2.DrainRequest(worker_ids=[ONE]))).intake

        assert (report.server, report.workers[0].intake) == (DRAINING, DRAINING)


async def test_an_illegal_move_is_refused_with_the_legal_ones_and_moves_nobody() -> None:
    async with running() as run:
        see_two(run)
        await run.admin.Drain(admin_pb2.DrainRequest(worker_ids=[TWO]))

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await run.admin.Pause(admin_pb2.PauseRequest(worker_ids=[ONE, TWO]))

        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert isinstance(from_rpc_error(raised.value), IllegalMove)
        assert raised.value.details() == (
            f"intake of worker '{TWO}' cannot move from DRAINING to PAUSED; from there it may move to OPEN"
        )
        assert run.engine.workers[WorkerId(ONE)].intake is Intake.OPEN


async def test_a_server_that_drains_cannot_pause() -> None:
    async with running() as run:
        await run.admin.Drain(admin_pb2.DrainRequest())

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await run.admin.Pause(admin_pb2.PauseRequest())

        assert raised.value.details() == (
            "intake of the server cannot move from DRAINING to PAUSED; from there it may move to OPEN"
        )


async def test_an_unknown_worker_is_not_found_and_the_known_ones_are_named() -> None:
    async with running() as run:
        see_two(run)

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await run.admin.Drain(admin_pb2.DrainRequest(worker_ids=[ONE, "elsewhere:1"]))

        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert isinstance(from_rpc_error(raised.value), UnknownWorker)
        assert raised.value.details() == f"worker 'elsewhere:1' is not known here; known: {ONE}, {TWO}"
        assert run.engine.workers[WorkerId(ONE)].intake is Intake.OPEN


async def test_the_caches_of_some_workers_or_of_all_are_reset() -> None:
    async with running() as run:
        see_two(run)

        some = await run.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(worker_ids=[TWO]))
        every = await run.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())

        assert (list(some.worker_ids), list(every.worker_ids)) == ([TWO], [ONE, TWO])
        assert run.engine.resets == [(TWO,), ()]


async def test_a_subscriber_is_told_first_that_it_sees_everything_from_now_on_and_then_each_event() -> None:
    async with running() as run:
        call = aiter(run.admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest()))
        first = await anext(call)
        run.engine.subscription.put(ONE, BlocksStored((b"b", b"c"), b"a", (TokenId(5), TokenId(6)), 1))
        run.engine.subscription.put(TWO, BlocksCleared())
        run.engine.subscription.put(ONE, BlocksRemoved((b"c",)))
        events = [(await anext(call)).event for _ in range(3)]

        assert first.WhichOneof("message") == "subscribed"
        assert events == [
            admin_pb2.KvEvent(
                worker_id=ONE,
                seq=1,
                stored=admin_pb2.BlocksStored(
                    block_hashes=[b"b", b"c"], parent_hash=b"a", token_ids=[5, 6], block_size=1
                ),
            ),
            admin_pb2.KvEvent(worker_id=TWO, seq=1, cleared=admin_pb2.BlocksCleared()),
            admin_pb2.KvEvent(worker_id=ONE, seq=2, removed=admin_pb2.BlocksRemoved(block_hashes=[b"c"])),
        ]


async def test_a_subscriber_that_goes_away_is_collected_for_no_longer() -> None:
    async with running() as run:
        call = run.admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest())
        await call.read()

        call.cancel()

        await run.engine.subscription.closed.wait()


async def test_a_subscriber_that_has_missed_events_is_told_to_start_over() -> None:
    async with running() as run:
        call = run.admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest())
        await call.read()
        run.engine.subscription.fail(SubscriberTooSlow(4096))

        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call.details() == (
            "4096 events were left unread, and further ones are lost; forget what the events told, subscribe again, "
            "and read faster"
        )
        await run.engine.subscription.closed.wait()


async def test_a_subscriber_that_stops_reading_is_ended_after_the_limit() -> None:
    async with running(admission=AdmissionConfig(max_unread_s=0.2)) as run:
        call = run.admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest())
        await call.read()

        for _ in range(64):  # more than the transport takes for a client that does not read
            run.engine.subscription.put(ONE, BlocksRemoved((b"x" * 1_000_000,)))

        await run.engine.subscription.closed.wait()
