"""Prompts that begin alike: what is found of them, what never is, and that the output stays the same.

The fake worker fails a test whose row reads a block that holds anything but its own tokens under its own salt.
"""

import pytest

from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.kv_events import BlocksCleared, BlocksRemoved, BlocksStored
from plugins.types import FinishReason, RequestId
from tests.fakes import FakeWorker, expected_output, worker_info
from tests.unit.control_plane.driving import Bench, asking

A, B = RequestId("a"), RequestId("b")
KEY = "a key for tests of prefixes"


def make_bench(num_blocks: int = 64, block_size: int = 4, is_caching: bool = True, max_sequences: int = 8) -> Bench:
    info = worker_info(num_blocks, block_size, max_sequences)
    config = SchedulerConfig(prefix_caching=is_caching, prefix_hash_key=KEY, watermark_ratio=0.0)
    return Bench(RunAheadScheduler(config, info), FakeWorker(info))


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize(
    ("num_tokens", "num_cached"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32)]
)
def test_a_prompt_that_comes_again_is_found_but_for_its_last_token(
    num_tokens: int, num_cached: int, at_once: int
) -> None:
    """B066: whole blocks, at most one token less than the prompt, and the same output each time."""
    bench = make_bench(block_size=16)
    prompt = range(3, 3 + num_tokens)

    for time in range(3):
        bench.add(*(asking(f"{time}{number}", prompt, max_tokens=5) for number in range(at_once)))
        bench.finish_all(ahead=2)

    found = [[bench.cached(f"{time}{number}") for number in range(at_once)] for time in range(3)]
    assert found == [[0] * at_once, [num_cached] * at_once, [num_cached] * at_once]
    assert set(bench.outputs.values()) == {expected_output(prompt, 5)}
    load = bench.scheduler.load()
    assert load.num_prefix_tokens == 3 * at_once * num_tokens
    assert load.num_prefix_hits == 2 * at_once * num_cached


def test_a_longer_prompt_hits_all_full_blocks_of_a_shorter_one() -> None:
    bench = make_bench()
    bench.add(asking("a", range(3, 11), max_tokens=1))
    bench.finish_all()

    bench.add(asking("b", range(3, 23), max_tokens=1))
    bench.finish_all()

    assert bench.cached("b") == 8


def test_what_was_generated_is_found_too_as_far_as_it_was_computed() -> None:
    # Prompt and output have 12 tokens together; the last one was sampled and never computed.
    bench = make_bench()
    bench.add(asking("a", range(3, 6), max_tokens=9))
    bench.finish_all(ahead=2)

    bench.add(asking("b", (*range(3, 6), *bench.outputs[A], 3, 4, 5), max_tokens=1))
    bench.finish_all()

    assert bench.cached("b") == 8


def test_nothing_that_is_still_in_flight_is_found() -> None:
    bench = make_bench()
    bench.add(asking("a", range(3, 12), max_tokens=9))
    bench.plan()
    bench.plan()
    bench.add(asking("early", range(3, 12), max_tokens=1))
    bench.plan()
    bench.answer()
    bench.add(asking("late", range(3, 12), max_tokens=1))
    bench.plan()

    assert (bench.cached("early"), bench.cached("late")) == (0, 8)


def test_a_half_computed_prompt_is_found_up_to_where_it_is() -> None:
    bench = make_bench()
    bench.add(asking("a", range(3, 53), max_tokens=1))
    bench.step()  # 32 tokens of 50
    bench.add(asking("b", range(3, 53), max_tokens=1))

    bench.finish_all()

    assert bench.cached("b") == 32
    assert bench.outputs[A] == bench.outputs[B] == expected_output(range(3, 53), 1)


@pytest.mark.parametrize(("first", "second"), [("X", ""), ("", "X"), ("X", "XA"), ("X", "X\0"), ("X", "x"), ("A", "S")])
def test_requests_with_different_salts_never_share(first: str, second: str) -> None:
    """B064: a salt is a field of its own, not a text that others can be glued to."""
    bench = make_bench()
    bench.add(asking("a", range(3, 23), cache_salt=first))
    bench.finish_all()

    bench.add(asking("b", range(3, 23), cache_salt=second))
    bench.finish_all()
    bench.add(asking("c", range(3, 23), cache_salt=second))
    bench.finish_all()

    assert (bench.cached("b"), bench.cached("c")) == (0, 16)


def test_tenants_share_unless_a_salt_keeps_them_apart() -> None:
    bench = make_bench()
    bench.add(asking("a", range(3, 23), tenant="one"))
    bench.finish_all()

    bench.add(asking("b", range(3, 23), tenant="two"))
    bench.finish_all()

    assert bench.cached("b") == 16


def test_who_asks_what_is_cached_is_told_what_an_admission_would_find() -> None:
    bench = make_bench()
    prompt = asking("b", range(3, 11), max_tokens=1)
    before = bench.scheduler.num_cached_tokens(prompt)
    bench.add(asking("a", range(3, 23)))
    bench.finish_all()

    after = bench.scheduler.num_cached_tokens(prompt)
    bench.add(prompt)
    bench.finish_all()

    assert (before, after, bench.cached("b")) == (0, 4, 4)


def test_without_caching_nothing_is_found() -> None:
    bench = make_bench(is_caching=False)
    for name in ("a", "b"):
        bench.add(asking(name, range(3, 23)))
        bench.finish_all()

    assert bench.cached("b") == 0
    assert bench.scheduler.num_cached_tokens(asking("c", range(3, 23))) == 0
    assert bench.scheduler.load().num_cached_blocks == 0


def test_a_row_that_failed_leaves_nothing_to_be_found() -> None:
    bench = make_bench()
    bench.worker.failing.add(A)
    bench.add(asking("a", range(3, 23)))
    bench.step()

    bench.add(asking("b", range(3, 23)))
    bench.finish_all()

    assert bench.ends == {A: FinishReason.FAILED, B: FinishReason.LENGTH}
    assert bench.cached("b") == 0


def test_a_preempted_request_finds_its_own_blocks_again_and_is_not_counted_twice() -> None:
    # b gives way when a grows into its third block, and of b's own 7 computed tokens one block is still there.
    bench = make_bench(num_blocks=4)
    bench.add(asking("a", range(10, 18), max_tokens=4), asking("b", range(20, 27), max_tokens=4))

    bench.finish_all()

    assert [each.num_cached_tokens for each in bench.admissions("b")] == [0, 4]
    assert (bench.scheduler.load().num_prefix_tokens, bench.scheduler.load().num_prefix_hits) == (15, 0)
    assert bench.outputs[B] == expected_output(range(20, 27), 4)


def test_nothing_that_was_computed_before_a_reset_is_found_after_it() -> None:
    bench = make_bench()
    bench.add(asking("a", range(3, 11), max_tokens=20))
    bench.step()
    bench.plan()

    bench.scheduler.reset_prefix_cache()
    bench.worker.forbid_older_hits()
    bench.add(asking("b", range(3, 11), max_tokens=20))
    bench.finish_all(ahead=2)
    bench.add(asking("c", range(3, 11), max_tokens=1))
    bench.finish_all(ahead=2)

    assert (bench.cached("b"), bench.cached("c")) == (0, 4)
    assert bench.outputs[A] == bench.outputs[B] == expected_output(range(3, 11), 20)


def test_what_a_request_generates_after_a_reset_is_not_found_if_it_ran_before() -> None:
    bench = make_bench()
    bench.add(asking("a", range(3, 11), max_tokens=20))
    bench.step()
    bench.scheduler.reset_prefix_cache()
    bench.finish_all(ahead=2)

    bench.add(asking("b", (*range(3, 11), *bench.outputs[A]), max_tokens=1))
    bench.finish_all()

    assert bench.cached("b") == 0
    assert bench.scheduler.load().num_cached_blocks == 7  # b's own


def test_a_preempted_request_that_returns_after_a_reset_is_found_again() -> None:
    bench = make_bench(num_blocks=4)
    bench.add(asking("a", range(10, 18), max_tokens=2), asking("b", range(20, 27), max_tokens=4))
    bench.step()
    bench.step()  # b gives way

    bench.scheduler.reset_prefix_cache()
    bench.worker.forbid_older_hits()
    bench.finish_all(ahead=2)

    assert [each.num_cached_tokens for each in bench.admissions("b")] == [0, 0]
    assert bench.scheduler.num_cached_tokens(asking("c", range(20, 29))) == 4


def test_events_tell_what_was_stored_only_while_somebody_listens() -> None:
    bench = make_bench()
    bench.add(asking("a", range(3, 11), max_tokens=1))
    bench.finish_all()
    unheard = bench.scheduler.take_kv_events()

    bench.scheduler.record_kv_events(True)
    bench.add(asking("b", range(30, 43), max_tokens=1))
    bench.finish_all()
    (stored,) = bench.scheduler.take_kv_events()
    bench.scheduler.reset_prefix_cache()
    cleared = bench.scheduler.take_kv_events()
    bench.scheduler.record_kv_events(False)
    bench.add(asking("c", range(50, 63), max_tokens=1))
    bench.finish_all()

    assert isinstance(stored, BlocksStored)
    assert (stored.token_ids, stored.block_size) == (tuple(range(30, 42)), 4)
    assert len({stored.parent_hash, *stored.block_hashes}) == 4
    assert (unheard, cleared, bench.scheduler.take_kv_events()) == ((), (BlocksCleared(),), ())


def test_an_event_continues_where_the_one_before_it_ended_and_removals_name_the_same_blocks() -> None:
    bench = make_bench(num_blocks=4)
    bench.scheduler.record_kv_events(True)
    bench.add(asking("a", range(3, 8), max_tokens=8))
    bench.finish_all()
    first, second, *_ = bench.scheduler.take_kv_events()
    bench.add(asking("b", range(30, 45), max_tokens=1))  # takes all four blocks
    bench.finish_all()

    removed, *_ = bench.scheduler.take_kv_events()
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert second.parent_hash == first.block_hashes[0]
    assert first.token_ids == (3, 4, 5, 6)
    assert first.block_hashes[0] in removed.block_hashes
