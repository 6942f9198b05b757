"""Workers die, freeze and come back under load, and no client can tell: every stream ends with the right tokens."""

import json
import logging
import signal
import time
from collections.abc import Sequence

import pytest

from protos.inference.v1 import inference_pb2
from tests.architecture.sources import ROOT
from tests.end_to_end.cells import REFERENCE, cell
from tests.end_to_end.clients import Answer, ask, connected, load, questions

REAL = ("--dtype=float32", "--max-model-len=2048", "--worker.kv-cache-gib=1", "--worker.threads=1")

logger = logging.getLogger(__name__)


async def kill_again_and_again(
    num_kills: int, worker_words: Sequence[str], requests: Sequence[inference_pb2.GenerateRequest]
) -> list[Answer]:
    """Kill one of two workers under load, each time when all streams move again; returns the answers."""
    async with (
        cell(worker_words=worker_words) as running,
        connected(running.control_plane.address) as client,
    ):
        async with load(client, requests) as clients:
            for kill in range(num_kills):
                victim = running.workers[kill % 2].process
                victim.kill()
                await victim.wait()
                await clients.moved()
                await running.restart(kill % 2)
                await clients.moved()
        workers = await client.idle_workers()

    logger.info("%d answers, longest pause %.2f s", clients.num_answers, clients.longest_pause_s)
    assert clients.num_answers >= len(requests)
    assert [worker.num_free_blocks for worker in workers] == [worker.num_blocks for worker in workers]
    return clients.answers


async def test_killing_a_worker_under_32_streams_costs_no_stream_and_no_token() -> None:
    answers = await kill_again_and_again(4, REFERENCE, questions(32, 400))

    assert [len(answer.token_ids) for answer in answers] == [400] * 32


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_ten_kills_leave_the_goldens_of_a_real_model_as_they_are() -> None:
    """Half are sampled with seeds over 49,152 words: the clients insist on what they got when nothing happened."""
    goldens = json.loads((ROOT / "tests/golden/smollm2.json").read_text(encoding="utf-8"))["goldens"] * 2
    seeded = [ask(golden["prompt"], 32, temperature=1.0, seed=seed) for seed, golden in enumerate(goldens)]

    answers = await kill_again_and_again(10, REAL, [ask(golden["prompt"], 32) for golden in goldens] + seeded)

    assert [list(answer.token_ids) for answer in answers[:16]] == [golden["output"] for golden in goldens]
    assert len({answer.token_ids for answer in answers[16:]}) == 16


@pytest.mark.parametrize("heartbeat_s", [1, pytest.param(5, marks=pytest.mark.long)])
async def test_a_frozen_worker_is_lost_its_late_results_change_nothing_and_it_is_used_again(heartbeat_s: int) -> None:
    async with (
        cell(f"--workers.heartbeat-s={heartbeat_s}", "--workers.router=round_robin") as running,
        connected(running.control_plane.address) as client,
        load(client, questions(32, 400)) as clients,
    ):
        since = len(running.control_plane.log)
        frozen, address = running.workers[0].process, running.addresses[0]

        frozen.send_signal(signal.SIGSTOP)
        stopped_at_s = time.monotonic()
        lost = await running.control_plane.logged("worker_lost", since, worker_id=address)
        noticed_s = time.monotonic() - stopped_at_s
        await clients.moved()  # all of them, while it is still frozen
        frozen.send_signal(signal.SIGCONT)
        await running.control_plane.logged("worker_ready", since, worker_id=address)
        while not {worker.worker_id: worker.num_running for worker in await client.workers()}[address]:
            await clients.moved()
        await clients.moved()

    logger.info("noticed after %.2f s, longest pause %.2f s", noticed_s, clients.longest_pause_s)
    assert f"it has not answered for {heartbeat_s} s (workers.heartbeat_s)" in str(lost["why"])
    assert clients.num_answers >= 32
