"""Samples of one prompt: they share blocks with the request that they name, and with nothing else of its name."""

from dataclasses import replace

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.core import EngineCore
from control_plane.engine.router import RoundRobin
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.priority import PriorityPolicy
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.scheduler import SchedulingPolicy
from plugins.types import GenerationId, Request, RequestId, WorkerId
from tests.fakes import FakeWorker, expected_output, request, worker_info
from tests.unit.control_plane.driving import Bench

CONFIG = SchedulerConfig(prefix_hash_key="a key for these tests")
PROMPT = range(3, 13)  # ten tokens: two blocks of four and a half


def sample(request_id: str, leader: str, prompt: range = PROMPT, salt: str = "") -> Request:
    return replace(request(request_id, prompt), sibling_of=RequestId(leader), cache_salt=salt)


def scheduler_that_computed(first: Request) -> tuple[RunAheadScheduler, FakeWorker]:
    scheduler, worker = RunAheadScheduler(CONFIG, worker_info()), FakeWorker()
    scheduler.add_request(first)
    scheduler.update(worker.execute(scheduler.schedule()))
    return scheduler, worker


def test_a_sample_computes_the_last_token_of_the_prompt_alone() -> None:
    scheduler, worker = scheduler_that_computed(request("a", PROMPT))
    scheduler.add_request(sample("b", "a"))

    plan = scheduler.schedule()

    assert plan.admitted[0].num_cached_tokens == 9
    worker.execute(plan)


def test_a_sample_shares_nothing_with_another_prompt_that_has_the_name_by_now() -> None:
    scheduler, worker = scheduler_that_computed(request("a", range(100, 110)))
    scheduler.add_request(sample("b", "a"))

    plan = scheduler.schedule()

    assert plan.admitted[0].num_cached_tokens == 0
    worker.execute(plan)


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_sample_shares_nothing_with_the_same_prompt_under_another_salt(is_caching: bool) -> None:
    scheduler = RunAheadScheduler(SchedulerConfig(prefix_caching=is_caching), worker_info())
    worker = FakeWorker()
    scheduler.add_request(request("a", PROMPT))
    scheduler.update(worker.execute(scheduler.schedule()))
    scheduler.add_request(sample("b", "a", salt="mine"))

    assert scheduler.schedule().admitted[0].num_cached_tokens == 0


def test_a_request_that_names_itself_does_not_wait_for_itself() -> None:
    scheduler = RunAheadScheduler(CONFIG, worker_info())

    scheduler.add_request(sample("a", "a"))

    assert [admission.request_id for admission in scheduler.schedule().admitted] == ["a"]


def test_a_sample_of_another_generation_does_not_follow_to_a_worker_of_the_old_one() -> None:
    core = EngineCore(lambda worker: RunAheadScheduler(CONFIG, worker), AdmissionConfig(), RoundRobin())
    old, new = WorkerId("old"), WorkerId("new")
    for worker_id, generation in ((old, "1"), (new, "2")):
        core.connect(worker_id)
        core.attach(worker_id, worker_info(), GenerationId(generation), now_s=0.0)
    core.submit(request("a", PROMPT), GenerationId("1"), now_s=0.0)

    core.submit(sample("b", "a"), GenerationId("2"), now_s=0.0)

    assert (core.num_live(old), core.num_live(new)) == (1, 1)


def bench_of(*requests: Request, num_blocks: int = 64, policy: SchedulingPolicy | None = None, rows: int = 8) -> Bench:
    info = worker_info(num_blocks, max_sequences=rows)
    bench = Bench(RunAheadScheduler(CONFIG, info, policy), FakeWorker(info))
    bench.add(*requests)
    return bench


def test_a_sample_waits_until_the_prompt_is_known_to_be_computed_and_copies_the_block_in_the_middle() -> None:
    bench = bench_of(request("a", PROMPT), sample("b", "a"))

    alone, still_alone = bench.plan(), bench.plan()
    bench.answer()
    together = bench.plan()

    assert [len(plan.admitted) for plan in (alone, still_alone, together)] == [1, 0, 1]
    (admission,) = together.admitted
    (copy,) = together.block_copies
    held = alone.chunks[0].new_blocks
    assert (copy.source, admission.block_ids) == (held[2], (*held[:2], copy.destination))
    assert [(chunk.row, chunk.num_tokens) for chunk in together.chunks] == [(0, 1), (1, 1)]


def test_samples_say_what_their_prompt_says_alone_whatever_its_length() -> None:
    for num_tokens in (1, 2, 4, 5, 8, 9, 40):
        prompt = range(3, 3 + num_tokens)
        bench = bench_of(request("a", prompt, max_tokens=9))
        bench.add(*(replace(sample(name, "a", prompt), sampling=request("", max_tokens=9).sampling) for name in "bc"))

        bench.finish_all(ahead=2)

        assert list(bench.outputs.values()) == [expected_output(prompt, 9)] * 3
        assert bench.scheduler.kv.num_free == 64
        assert [bench.cached(name) for name in "bc"] == [num_tokens - 1] * 2


def test_of_a_prompt_that_fills_its_blocks_the_last_one_is_copied_without_its_last_token() -> None:
    bench = bench_of(request("a", range(3, 11)), sample("b", "a", range(3, 11)))
    first = bench.step()

    plan = bench.plan()

    held = first.chunks[0].new_blocks
    assert [copy.source for copy in plan.block_copies] == [held[1]]
    assert plan.admitted[0].block_ids[0] == held[0]
    assert plan.admitted[0].num_cached_tokens == 7


def test_of_a_prompt_with_one_token_more_than_its_blocks_nothing_is_copied() -> None:
    bench = bench_of(request("a", range(3, 12)), sample("b", "a", range(3, 12)))
    first = bench.step()

    plan = bench.plan()

    assert plan.block_copies == ()
    assert plan.admitted[0].block_ids == first.chunks[0].new_blocks[:2]
    assert plan.admitted[0].num_cached_tokens == 8


def test_samples_go_on_when_the_one_they_wait_for_is_cancelled() -> None:
    bench = bench_of(request("a", range(3, 53), max_tokens=9), sample("b", "a", range(3, 53)))
    bench.add(sample("c", "a", range(3, 53)))
    bench.plan()  # 32 tokens of 50

    bench.scheduler.cancel_request(RequestId("a"))
    bench.finish_all(ahead=2)

    assert [bench.outputs[RequestId(name)] for name in "bc"] == [expected_output(range(3, 53), 4)] * 2
    assert bench.scheduler.kv.num_free == 64


def test_samples_go_on_when_the_one_they_wait_for_is_cancelled_before_it_ran() -> None:
    bench = bench_of(request("a", PROMPT), sample("b", "a"))

    bench.scheduler.cancel_request(RequestId("a"))

    assert [each.request_id for each in bench.plan().admitted] == ["b"]


def test_samples_find_the_prompt_in_the_cache_when_the_one_they_waited_for_ended_with_it() -> None:
    bench = bench_of(request("a", PROMPT, max_tokens=1), sample("b", "a"))

    bench.finish_all(ahead=2)

    assert bench.cached("b") == 8
    assert bench.outputs[RequestId("b")] == expected_output(PROMPT, 4)


def test_a_sample_that_waits_may_be_cancelled() -> None:
    bench = bench_of(request("a", PROMPT), sample("b", "a"), sample("c", "a"))
    bench.plan()

    bench.scheduler.cancel_request(RequestId("b"))
    load = bench.scheduler.load()
    bench.finish_all(ahead=2)

    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (1, 1, len(PROMPT))
    assert sorted(bench.ends) == ["a", "c"]


def test_samples_wait_on_while_the_one_they_wait_for_has_lost_its_row() -> None:
    leader = replace(request("a", range(3, 53)), priority=10)
    bench = bench_of(leader, policy=PriorityPolicy(ageing_s=10.0), rows=1)
    bench.add(replace(sample("b", "a", range(3, 53)), priority=10))
    bench.step()
    bench.add(replace(request("urgent", (3,), max_tokens=3), arrival_s=1.0))

    bench.finish_all(ahead=2)

    assert [each.request_id for plan in bench.plans for each in plan.admitted] == ["a", "urgent", "a", "b"]
    assert bench.outputs[RequestId("b")] == expected_output(range(3, 53), 4)


def test_a_sample_that_waits_for_room_finds_the_prompt_even_when_its_sibling_has_lost_its_row() -> None:
    leader = replace(request("a", PROMPT, max_tokens=9), priority=10)
    bench = bench_of(leader, policy=PriorityPolicy(ageing_s=10.0), rows=1)
    bench.add(replace(sample("b", "a"), priority=9))
    bench.step()  # a's prompt is computed: b may start, is the more urgent one, and takes the row
    bench.finish_all(ahead=2)

    assert [each.request_id for plan in bench.plans for each in plan.admitted] == ["a", "b", "a"]
    assert bench.cached("b") == 8
    assert bench.outputs[RequestId("a")] == expected_output(PROMPT, 9)


def test_cancelling_all_samples_gives_every_block_back() -> None:
    """B046: four samples, cancelled after ten tokens."""
    bench = bench_of(request("a", PROMPT, max_tokens=50))
    bench.add(*(replace(sample(name, "a"), sampling=request("", max_tokens=50).sampling) for name in "bcd"))
    for _ in range(11):
        bench.step()

    for name in "abcd":
        bench.scheduler.cancel_request(RequestId(name))
    bench.step()

    assert [len(bench.outputs[RequestId(name)]) for name in "abcd"] == [11, 10, 10, 10]
    assert bench.scheduler.kv.num_free == 64
    assert not bench.scheduler.has_work()


def test_samples_of_different_lengths_end_one_by_one() -> None:
    """B046: the first to end is the one whose blocks the others share."""
    bench = bench_of(request("a", PROMPT, max_tokens=2))
    lengths = {"b": 5, "c": 20, "d": 50}
    bench.add(*(replace(sample(name, "a"), sampling=request("", max_tokens=n).sampling) for name, n in lengths.items()))

    bench.finish_all(ahead=2)

    assert list(bench.ends) == ["a", "b", "c", "d"]
    assert bench.outputs == {RequestId(name): expected_output(PROMPT, n) for name, n in {"a": 2, **lengths}.items()}


def test_a_sample_of_a_sample_waits_for_that_one() -> None:
    bench = bench_of(request("a", PROMPT), sample("b", "a"), sample("c", "b"))

    bench.finish_all(ahead=2)

    assert [each.request_id for plan in bench.plans for each in plan.admitted] == ["a", "b", "c"]
    assert bench.outputs[RequestId("c")] == expected_output(PROMPT, 4)


def test_a_sample_that_is_continued_elsewhere_needs_no_sibling() -> None:
    said = expected_output(PROMPT, 4)
    bench = bench_of(replace(sample("b", "a"), output_token_ids=said[:2]))

    bench.finish_all(ahead=2)

    assert bench.outputs == {RequestId("b"): said[2:]}


def test_samples_share_nothing_across_a_reset_but_what_the_running_one_holds() -> None:
    bench = bench_of(request("a", PROMPT, max_tokens=20))
    bench.step()
    bench.scheduler.reset_prefix_cache()
    bench.worker.siblings.add(RequestId("b"))
    bench.worker.forbid_older_hits()

    bench.add(sample("b", "a"), request("c", PROMPT))
    bench.finish_all(ahead=2)

    assert (bench.cached("b"), bench.cached("c")) == (9, 0)
