"""Block tables: how they grow, and what is given back."""

import pytest

from control_plane.kv.allocator import Allocator
from plugins.errors import InvariantBroken
from plugins.types import BlockId, RequestId

A, B = RequestId("a"), RequestId("b")


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


def test_check_finds_a_block_in_two_tables() -> None:
    kv = Allocator(num_blocks=4, block_size=4)
    kv.grow(A, 4)
    kv._tables[B] = [BlockId(0)]

    with pytest.raises(InvariantBroken, match="block 0 is in 2 tables and has 1 references"):
        kv.check()
