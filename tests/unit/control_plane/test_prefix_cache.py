"""The prefix cache: which block a name leads to, and what is told about it."""

import pytest

from control_plane.kv.hashing import BlockHash
from control_plane.kv.prefix_cache import PrefixCache
from plugins.errors import InvariantBroken
from plugins.kv_events import BlocksCleared, BlocksRemoved, BlocksStored
from plugins.types import BlockId, TokenId

B0, B1, B2, B3 = BlockId(0), BlockId(1), BlockId(2), BlockId(3)
ROOT, H1, H2, H3, H4 = (BlockHash(name.encode()) for name in ("root", "h1", "h2", "h3", "h4"))
TOKENS = tuple(map(TokenId, (11, 12, 21, 22, 31, 32)))


def listened_cache() -> PrefixCache:
    cache = PrefixCache(block_size=2)
    cache.records_events = True
    return cache


def test_a_chain_is_found_up_to_its_first_missing_block() -> None:
    cache = PrefixCache(block_size=2)
    cache.name([B0, B1], [H1, H2], ROOT, TOKENS[:4])

    assert cache.match([H1, H2, H3]) == [0, 1]
    assert cache.match([H3, H1]) == []
    assert cache.match([]) == []


def test_two_blocks_with_equal_content_get_one_name() -> None:
    cache = listened_cache()
    cache.name([B0], [H1], ROOT, TOKENS[:2])
    cache.take_events()

    named = cache.name([B1], [H1], ROOT, TOKENS[:2])

    assert named == []
    assert cache.match([H1]) == [0]
    assert len(cache) == 1
    assert cache.take_events() == ()


def test_a_block_that_gets_its_name_again_keeps_it_and_another_name_is_a_broken_invariant() -> None:
    cache = PrefixCache(block_size=2)
    cache.name([B0], [H1], ROOT, TOKENS[:2])

    assert cache.name([B0], [H1], ROOT, TOKENS[:2]) == []
    with pytest.raises(InvariantBroken, match="block 0 is 6831 and should be named 6832"):
        cache.name([B0], [H2], ROOT, TOKENS[:2])


def test_a_forgotten_block_ends_the_chain_and_its_name_may_go_to_another() -> None:
    cache = PrefixCache(block_size=2)
    cache.name([B0, B1], [H1, H2], ROOT, TOKENS[:4])

    cache.forget([B0])

    assert cache.match([H1, H2]) == []
    assert cache.name([B3], [H1], ROOT, TOKENS[:2]) == [3]
    assert cache.match([H1, H2]) == [3, 1]
    assert cache.named() == {1, 3}


def test_events_tell_what_was_stored_with_its_parent_what_was_removed_and_that_all_is_cleared_in_order() -> None:
    cache = listened_cache()

    cache.name([B0, B1], [H1, H2], ROOT, TOKENS[:4])
    cache.name([B2], [H3], H2, TOKENS[4:])
    cache.forget([B2, B1])
    cache.clear()

    assert cache.take_events() == (
        BlocksStored((b"h1", b"h2"), b"root", (TokenId(11), TokenId(12), TokenId(21), TokenId(22)), 2),
        BlocksStored((b"h3",), b"h2", (TokenId(31), TokenId(32)), 2),
        BlocksRemoved((b"h3", b"h2")),
        BlocksCleared(),
    )
    assert cache.take_events() == ()


def test_an_event_leaves_out_blocks_that_were_stored_already_and_names_the_right_parent() -> None:
    cache = listened_cache()
    cache.name([B1], [H2], H1, TOKENS[2:4])
    cache.take_events()

    named = cache.name([B0, B2, B3], [H1, H2, H3], ROOT, TOKENS)

    assert named == [0, 3]
    assert cache.take_events() == (
        BlocksStored((b"h1",), b"root", (TokenId(11), TokenId(12)), 2),
        BlocksStored((b"h3",), b"h2", (TokenId(31), TokenId(32)), 2),
    )


def test_nothing_is_recorded_while_nobody_listens_and_nothing_is_left_when_he_goes() -> None:
    cache = PrefixCache(block_size=2)
    cache.name([B0], [H1], ROOT, TOKENS[:2])
    cache.records_events = True
    cache.forget([B0])

    cache.records_events = False
    cache.clear()

    assert cache.take_events() == ()


def test_check_finds_a_name_whose_block_has_another() -> None:
    cache = PrefixCache(block_size=2)
    cache.name([B0], [H1], ROOT, TOKENS[:2])
    cache._blocks[H4] = B0

    with pytest.raises(InvariantBroken, match="2 names have blocks and 1 blocks have names; 1 differ"):
        cache.check()
