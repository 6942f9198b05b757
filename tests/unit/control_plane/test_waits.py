"""Rows that wait for their next token: computed again, out of nobody's way, and with the same output in the end."""

import random
from collections.abc import Callable

import pytest

from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from control_plane.scheduling.synchronous import SynchronousScheduler
from plugins.errors import WorkerLeaving
from plugins.scheduler import Scheduler
from plugins.types import FinishReason, RequestId, Row, StepResult, WorkerId, WorkerInfo
from tests.fakes import FakeWorker, expected_output, worker_info
from tests.unit.control_plane.driving import Bench, Cluster, StopsAt, asking, outputs

A, B = RequestId("a"), RequestId("b")
W = WorkerId("w")
CONFIG = SchedulerConfig(prefix_hash_key="a key for these tests")


def times(num: int, name: str = "a") -> Callable[[RequestId], bool]:
    """Let one request's row wait so often, and no other."""
    left = iter(range(num))
    return lambda request_id: request_id == name and next(left, None) is not None


def now_and_then(seed: int) -> Callable[[RequestId], bool]:
    """Let any row wait at four tokens of ten."""
    draw = random.Random(seed)
    return lambda request_id: draw.random() < 0.4


def bench_whose_rows_wait(waits: Callable[[RequestId], bool], num_blocks: int = 64) -> Bench:
    worker = FakeWorker(worker_info(num_blocks))
    worker.waits = waits
    return Bench(RunAheadScheduler(CONFIG, worker.info), worker)


@pytest.mark.parametrize("num_waits", [1, 2, 25])
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_row_that_waits_gets_its_own_tokens_and_no_more_than_it_may(ahead: int, num_waits: int) -> None:
    bench = bench_whose_rows_wait(times(num_waits))
    bench.add(asking("a", range(3, 10), max_tokens=6), asking("b", (9, 9), max_tokens=6))

    bench.finish_all(ahead)

    assert bench.outputs == {A: expected_output(range(3, 10), 6), B: expected_output((9, 9), 6)}
    assert bench.ends == {A: FinishReason.LENGTH, B: FinishReason.LENGTH}
    assert bench.scheduler.kv.num_free == 64


def test_the_last_known_token_alone_is_computed_again() -> None:
    bench = bench_whose_rows_wait(times(3))
    bench.add(asking("a", range(3, 10), max_tokens=2))

    bench.finish_all()

    assert [plan.chunks[0].num_tokens for plan in bench.plans if plan.chunks] == [7, 1, 1, 1, 1]


def test_a_neighbour_goes_on_while_a_row_waits_for_ever() -> None:
    bench = bench_whose_rows_wait(lambda request_id: request_id == "a")
    bench.add(asking("a", max_tokens=6), asking("b", (9, 9), max_tokens=30))

    for _ in range(40):
        bench.step()

    assert bench.outputs == {B: expected_output((9, 9), 30)}
    assert bench.scheduler.load().num_running == 1


def test_a_row_that_waits_with_the_next_plan_in_flight_is_computed_again_by_that_plan() -> None:
    bench = bench_whose_rows_wait(times(1))
    bench.add(asking("a", range(3, 7), max_tokens=3))
    bench.plan()
    second = bench.plan()
    bench.answer()
    bench.answer()

    third = bench.plan()

    assert [len(second.chunks), len(third.chunks)] == [1, 1]
    assert bench.outputs == {A: expected_output(range(3, 7), 1)}
    bench.answer()
    bench.finish_all(2)
    assert bench.outputs == {A: expected_output(range(3, 7), 3)}


def test_a_block_is_found_by_others_once_its_last_token_was_computed_for_good() -> None:
    """The eighth token of the prompt fills its second block, and waits three times."""
    bench = bench_whose_rows_wait(times(3))
    bench.add(asking("a", range(3, 11), max_tokens=9))
    num_cached = []
    for _ in range(5):
        bench.step()
        num_cached.append(bench.scheduler.load().num_cached_blocks)

    assert num_cached == [1, 1, 1, 2, 2]


def test_a_cancel_while_a_row_waits_gives_everything_back() -> None:
    bench = bench_whose_rows_wait(lambda request_id: True)
    bench.add(asking("a", max_tokens=6))
    bench.plan()
    bench.plan()
    bench.answer()

    bench.scheduler.cancel_request(A)
    bench.finish_all()

    assert (bench.scheduler.kv.num_free, bench.outputs) == (64, {})


def test_rows_that_wait_and_lose_their_blocks_meanwhile_start_over_with_what_they_have() -> None:
    num_preemptions = 0
    for seed in range(40):
        bench = bench_whose_rows_wait(now_and_then(seed), num_blocks=6)
        prompts = {RequestId(f"r{number}"): (3, 4, 5 + number) for number in range(4)}
        bench.add(*(asking(name, prompt, max_tokens=14) for name, prompt in prompts.items()))

        bench.finish_all(ahead=2)

        num_preemptions += bench.scheduler.load().num_preemptions
        assert bench.outputs == {name: expected_output(prompt, 14) for name, prompt in prompts.items()}
        assert bench.scheduler.kv.num_free == 6
    assert num_preemptions > 40


@pytest.mark.parametrize("kind", [RunAheadScheduler, SynchronousScheduler])
@pytest.mark.parametrize("seed", range(6))
def test_outputs_of_one_request_wait_each_for_itself_and_their_books_stay_right(kind: type, seed: int) -> None:
    def make(worker: WorkerInfo) -> Scheduler:
        scheduler: Scheduler = kind(CONFIG, worker)
        return scheduler

    cluster = Cluster(make)
    for name in ("w", "v"):
        cluster.attach(name)
        worker = cluster.workers[WorkerId(name)]
        worker.waits = now_and_then(seed)
        worker.siblings = {RequestId(f"a·{index}") for index in range(4)}
    cluster.submit_together(*outputs("a", 4, range(3, 13), 12), watchers=[StopsAt(1), StopsAt(5), None, StopsAt(12)])
    cluster.submit(asking("b", (9, 9), max_tokens=20))
    for _ in range(7):
        cluster.step_all()

    cluster.kill("w", WorkerLeaving("it is restarted"))
    cluster.finish_all()

    assert cluster.lost == []
    assert [len(cluster.outputs[RequestId(name)]) for name in ("a", "a·1", "a·2", "a·3", "b")] == [1, 5, 12, 12, 20]
    assert cluster.outputs[RequestId("a·2")] == expected_output(range(3, 13), 12)
    assert cluster.core.load().num_free_blocks == 64


def test_a_row_that_is_not_named_has_lost_its_token() -> None:
    """Who waits says so: a result that leaves the row out is no result of its plan."""
    cluster = Cluster()
    cluster.attach("w")
    cluster.workers[W].waits = times(1)
    cluster.submit(asking("a", (3, 4), max_tokens=2))
    cluster.step()
    (waits, *_) = cluster.on_their_way[W]
    cluster.on_their_way[W] = [StepResult(seq=waits.seq)]

    cluster.step("w")

    assert (waits.rows, waits.counts, waits.finishes) == ((Row(0),), (0,), (None,))
    assert [error.reason for _, error in cluster.lost] == ["PLAN_OUT_OF_ORDER"]
