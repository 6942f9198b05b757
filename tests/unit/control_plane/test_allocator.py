"""Block tables: how they start, grow and share, what is given back, and what a later prompt finds."""

import pytest

from control_plane.kv.allocator import Allocator, Fork, Start
from control_plane.kv.hashing import BlockHash
from plugins.errors import InvariantBroken
from plugins.kv_events import BlocksCleared, BlocksRemoved, BlocksStored
from plugins.types import BlockCopy, BlockId, RequestId, TokenId

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
ROOT = BlockHash(b"root")
CHAIN = [BlockHash(b"h1"), BlockHash(b"h2"), BlockHash(b"h3")]
TOKENS = tuple(map(TokenId, range(12)))


def allocator_with_a_cached_chain(num_blocks: int = 4, num_named: int = 2) -> Allocator:
    """Blocks of four tokens; the first ones, in order, are those of CHAIN, and nobody holds them."""
    kv = Allocator(num_blocks, block_size=4)
    kv.grow(A, num_named * 4)
    kv.publish(A, CHAIN[:num_named], 0, ROOT, TOKENS[: num_named * 4])
    kv.release(A)
    return kv


# -- tables -------------------------------------------------------------------------------------------------------


def test_a_table_grows_by_whole_blocks_and_only_when_it_must() -> None:
    kv = Allocator(num_blocks=4, block_size=4)

    grown = [kv.grow(A, num_tokens) for num_tokens in (1, 4, 5, 12)]

    assert grown == [(0,), (), (1,), (2,)]
    assert kv.table(A) == (0, 1, 2)
    assert kv.num_free == 1


def test_growth_that_does_not_fit_changes_nothing() -> None:
    kv = Allocator(num_blocks=2, block_size=4)
    kv.grow(A, 4)

    refused = kv.grow(A, 16)

    assert refused is None
    assert kv.table(A) == (0,)
    assert kv.num_free == 1


def test_release_returns_every_block_and_may_be_said_twice() -> None:
    kv = Allocator(num_blocks=4, block_size=4)
    kv.grow(A, 8)
    kv.grow(B, 4)

    kv.release(A)
    kv.release(A)

    assert kv.table(A) == ()
    assert kv.table(B) == (2,)
    assert kv.num_free == 3
    kv.check()


# -- starting with cached blocks ----------------------------------------------------------------------------------


def test_a_sequence_starts_with_the_cached_blocks_of_its_prompt_and_others_for_the_rest() -> None:
    kv = allocator_with_a_cached_chain()

    start = kv.start(B, 13, CHAIN)

    assert start == Start(cached=(BlockId(0), BlockId(1)), new=(BlockId(2), BlockId(3)))
    assert kv.table(B) == (0, 1, 2, 3)
    assert (kv.num_free, kv.num_cached) == (0, 2)
    kv.check()


def test_asking_what_matches_changes_nothing() -> None:
    kv = allocator_with_a_cached_chain()

    assert kv.num_matched(CHAIN) == 2
    assert kv.num_matched(CHAIN[1:]) == 1
    assert kv.num_matched([]) == 0
    assert (kv.num_free, kv.num_cached) == (4, 2)


def test_cached_blocks_that_somebody_holds_are_shared_and_cost_no_free_block() -> None:
    kv = allocator_with_a_cached_chain()
    kv.start(B, 9, CHAIN[:2])

    start = kv.start(C, 9, CHAIN[:2])

    assert start == Start(cached=(BlockId(0), BlockId(1)), new=(BlockId(3),))
    assert kv.num_free == 0
    kv.release(B)
    assert kv.num_free == 1
    kv.check()


def test_a_prompt_of_exactly_n_blocks_computes_its_last_one() -> None:
    """B066: the caller leaves out the hash of the last block, so that a token remains to be computed."""
    kv = allocator_with_a_cached_chain()

    with pytest.raises(InvariantBroken, match="2 blocks to share leave nothing to compute of 8 tokens"):
        kv.start(B, 8, CHAIN[:2])
    start = kv.start(B, 8, CHAIN[:1])

    assert start == Start(cached=(BlockId(0),), new=(BlockId(2),))


def test_a_start_that_would_leave_too_few_blocks_free_changes_nothing() -> None:
    kv = allocator_with_a_cached_chain(num_blocks=4)
    kv.records_events = True

    refused = [kv.start(B, 9, CHAIN[:2], spare=2), kv.start(B, 17, CHAIN[:2])]

    assert refused == [None, None]
    assert kv.table(B) == ()
    assert (kv.num_free, kv.num_cached, kv.take_events()) == (4, 2, ())
    assert kv.start(B, 9, CHAIN[:2], spare=1) == Start(cached=(BlockId(0), BlockId(1)), new=(BlockId(2),))


def test_a_refused_start_leaves_the_order_of_eviction_alone() -> None:
    kv = allocator_with_a_cached_chain(num_blocks=3, num_named=1)  # block 0 is h1 and older than
    kv.grow(B, 8)
    kv.publish(B, [BlockHash(b"x1"), BlockHash(b"x2")], 0, ROOT, TOKENS[:8])  # blocks 2 and 1
    kv.release(B)

    refused = kv.start(C, 5, CHAIN[:1], spare=2)

    assert refused is None
    assert kv.grow(C, 4) == (0,)


def test_blocks_that_were_matched_are_not_evicted_for_the_same_sequence() -> None:
    kv = allocator_with_a_cached_chain(num_blocks=3, num_named=3)

    start = kv.start(B, 9, CHAIN[:2])

    assert start == Start(cached=(BlockId(0), BlockId(1)), new=(BlockId(2),))
    assert kv.num_matched(CHAIN) == 2
    kv.check()


def test_a_sequence_that_has_blocks_cannot_start() -> None:
    kv = allocator_with_a_cached_chain()
    kv.grow(B, 4)

    with pytest.raises(InvariantBroken, match="b starts with 1 blocks"):
        kv.start(B, 4, [])


def test_without_caching_nothing_is_named_and_nothing_is_found() -> None:
    kv = Allocator(num_blocks=3, block_size=4, is_caching=False)
    kv.grow(A, 8)
    kv.publish(A, CHAIN[:2], 0, ROOT, TOKENS[:8])
    kv.release(A)

    start = kv.start(B, 9, CHAIN[:2])

    assert start == Start(cached=(), new=(BlockId(0), BlockId(1), BlockId(2)))
    assert kv.num_cached == 0


# -- eviction -----------------------------------------------------------------------------------------------------


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    kv = allocator_with_a_cached_chain(num_blocks=3, num_named=3)

    left = []
    for request_id in (A, B, C):
        kv.grow(request_id, 4)
        left.append(kv.num_matched(CHAIN))

    assert left == [2, 1, 0]
    assert [kv.table(request_id) for request_id in (A, B, C)] == [(2,), (1,), (0,)]


def test_the_chain_that_was_used_last_survives() -> None:
    kv = allocator_with_a_cached_chain(num_blocks=3, num_named=1)
    other = [BlockHash(b"x1")]
    kv.start(B, 4, [])
    kv.publish(B, other, 0, ROOT, TOKENS[:4])
    kv.release(B)
    kv.start(C, 5, CHAIN[:1])
    kv.release(C)

    kv.grow(A, 8)

    assert (kv.num_matched(CHAIN[:1]), kv.num_matched(other)) == (1, 0)


# -- publishing ---------------------------------------------------------------------------------------------------


def test_of_two_sequences_with_the_same_prompt_the_first_to_publish_names_its_blocks() -> None:
    kv = Allocator(num_blocks=4, block_size=4)
    for request_id in (A, B):
        kv.start(request_id, 5, CHAIN[:1])
        kv.publish(request_id, CHAIN[:1], 0, ROOT, TOKENS[:4])

    kv.release(B)
    kv.release(A)

    assert kv.num_cached == 1
    assert kv.start(C, 5, CHAIN[:1]) == Start(cached=(BlockId(0),), new=(BlockId(1),))
    kv.check()


def test_blocks_are_published_as_they_fill_the_shared_ones_once_more_without_harm() -> None:
    kv = allocator_with_a_cached_chain(num_named=1)
    kv.start(B, 12, CHAIN[:1])

    kv.publish(B, CHAIN[:2], 0, ROOT, TOKENS[:8])
    kv.publish(B, CHAIN[2:], 2, CHAIN[1], TOKENS[8:])

    assert kv.num_matched(CHAIN) == 3
    kv.check()


def test_more_blocks_than_the_table_has_cannot_be_published() -> None:
    kv = Allocator(num_blocks=4, block_size=4)
    kv.grow(A, 8)

    with pytest.raises(InvariantBroken, match=r"a publishes blocks \[1, 3\) and has 2"):
        kv.publish(A, CHAIN[1:], 1, CHAIN[0], TOKENS[4:])


# -- siblings -----------------------------------------------------------------------------------------------------


def test_a_fork_at_the_end_of_a_block_shares_and_copies_nothing() -> None:
    kv = Allocator(num_blocks=4, block_size=4)
    kv.grow(A, 12)

    fork = kv.fork(B, A, num_shared_tokens=8, num_tokens=9)

    assert fork == Fork(shared=(BlockId(0), BlockId(1)), copy=None, new=(BlockId(3),))
    assert kv.table(B) == (0, 1, 3)
    assert kv.num_free == 0
    kv.check()


def test_a_fork_inside_a_block_copies_that_block() -> None:
    kv = Allocator(num_blocks=5, block_size=4)
    kv.grow(A, 7)

    fork = kv.fork(B, A, num_shared_tokens=6, num_tokens=10)

    assert fork == Fork(shared=(BlockId(0),), copy=BlockCopy(BlockId(1), BlockId(2)), new=(BlockId(3),))
    assert kv.table(B) == (0, 2, 3)
    kv.check()


def test_a_fork_of_less_than_a_block_shares_none() -> None:
    kv = Allocator(num_blocks=2, block_size=4)
    kv.grow(A, 4)

    fork = kv.fork(B, A, num_shared_tokens=3, num_tokens=4)

    assert fork == Fork(shared=(), copy=BlockCopy(BlockId(0), BlockId(1)), new=())


def test_shared_blocks_live_until_the_last_sibling_ends() -> None:
    kv = Allocator(num_blocks=4, block_size=4)
    kv.grow(A, 8)
    kv.fork(B, A, num_shared_tokens=8, num_tokens=9)

    kv.release(A)
    free_after_one = kv.num_free
    kv.release(B)

    assert (free_after_one, kv.num_free) == (1, 4)


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    kv = Allocator(num_blocks=4, block_size=4)
    kv.grow(A, 8)

    refused = [kv.fork(B, A, num_shared_tokens=6, num_tokens=8, spare=2), kv.fork(B, A, 6, 17)]

    assert refused == [None, None]
    assert kv.table(B) == ()
    assert kv.num_free == 2
    kv.check()


def test_a_fork_of_tokens_that_the_source_has_no_blocks_for_is_a_broken_invariant() -> None:
    kv = Allocator(num_blocks=4, block_size=4)
    kv.grow(A, 8)

    with pytest.raises(InvariantBroken, match="b with 10 tokens cannot share 9 with a, which has 2 blocks of 4"):
        kv.fork(B, A, num_shared_tokens=9, num_tokens=10)
    with pytest.raises(InvariantBroken, match="b with 4 tokens cannot share 5"):
        kv.fork(B, A, num_shared_tokens=5, num_tokens=4)


# -- reset --------------------------------------------------------------------------------------------------------


def test_after_a_reset_cached_blocks_are_plain_free_ones() -> None:
    kv = allocator_with_a_cached_chain()

    kv.reset()

    assert (kv.num_matched(CHAIN), kv.num_cached, kv.num_free) == (0, 0, 4)
    kv.check()


def test_blocks_that_are_held_lose_their_names_in_a_reset_and_stay_with_their_holder() -> None:
    kv = allocator_with_a_cached_chain()
    kv.start(B, 9, CHAIN[:2])

    kv.reset()

    assert kv.table(B) == (0, 1, 2)
    assert kv.num_matched(CHAIN) == 0
    kv.check()
    kv.release(B)
    assert (kv.num_free, kv.num_cached) == (4, 0)
    kv.check()


def test_what_a_sequence_from_before_a_reset_computes_is_never_hit() -> None:
    kv = Allocator(num_blocks=6, block_size=4)
    kv.grow(A, 8)
    kv.reset()
    kv.fork(B, A, num_shared_tokens=8, num_tokens=9)

    for request_id in (A, B):
        kv.publish(request_id, CHAIN[:2], 0, ROOT, TOKENS[:8])
    found_after_old_ones = kv.num_matched(CHAIN)
    kv.release(A)
    kv.start(A, 8, [])
    kv.publish(A, CHAIN[:2], 0, ROOT, TOKENS[:8])

    assert (found_after_old_ones, kv.num_matched(CHAIN)) == (0, 2)
    kv.check()


# -- events -------------------------------------------------------------------------------------------------------


def test_events_tell_the_life_of_cached_blocks_in_order() -> None:
    kv = Allocator(num_blocks=2, block_size=4)
    kv.records_events = True
    kv.grow(A, 8)

    kv.publish(A, CHAIN[:2], 0, ROOT, TOKENS[:8])
    kv.release(A)
    kv.grow(B, 8)
    kv.publish(B, [BlockHash(b"x1")], 0, ROOT, TOKENS[8:])
    kv.reset()

    assert kv.records_events
    assert kv.take_events() == (
        BlocksStored((b"h1", b"h2"), b"root", tuple(map(TokenId, (0, 1, 2, 3, 4, 5, 6, 7))), 4),
        BlocksRemoved((b"h2", b"h1")),
        BlocksStored((b"x1",), b"root", tuple(map(TokenId, (8, 9, 10, 11))), 4),
        BlocksCleared(),
    )
    assert kv.take_events() == ()


# -- the check ----------------------------------------------------------------------------------------------------


def test_check_finds_a_block_in_two_tables() -> None:
    kv = Allocator(num_blocks=4, block_size=4)
    kv.grow(A, 4)
    kv._tables[B] = [BlockId(0)]

    with pytest.raises(InvariantBroken, match="block 0 is in 2 tables and has 1 references"):
        kv.check()


def test_check_finds_a_block_that_is_used_and_in_no_table() -> None:
    kv = Allocator(num_blocks=4, block_size=4)
    kv.grow(A, 4)
    del kv._tables[A]

    with pytest.raises(InvariantBroken, match="1 blocks are used, but tables hold 0"):
        kv.check()


def test_check_finds_a_kept_block_without_a_name() -> None:
    kv = allocator_with_a_cached_chain()
    kv._cache.forget([BlockId(1)])

    with pytest.raises(InvariantBroken, match=r"the pool keeps 2 blocks, the prefix cache names 1; \[1\] differ"):
        kv.check()
