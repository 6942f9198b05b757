"""The block pool: examples, and a state machine that checks its invariant after each move."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from control_plane.kv.block_pool import BlockPool
from plugins.errors import InvariantBroken
from plugins.types import BlockId


def test_blocks_come_lowest_first_and_all_or_none() -> None:
    pool = BlockPool(num_blocks=3)

    first = pool.allocate(2)
    too_many = pool.allocate(2)
    last = pool.allocate(1)

    assert (first, too_many, last) == ((0, 1), None, (2,))
    assert (pool.num_free, pool.num_used) == (0, 3)


def test_no_blocks_are_an_answer_even_from_an_empty_pool() -> None:
    pool = BlockPool(num_blocks=0)

    assert pool.allocate(0) == ()
    assert pool.allocate(1) is None


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(num_blocks=1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.share(blocks)

    pool.release(blocks)
    free_after_one = pool.num_free
    pool.release(blocks)

    assert (free_after_one, pool.num_free) == (0, 1)


def test_releasing_or_sharing_a_free_block_is_a_broken_invariant() -> None:
    pool = BlockPool(num_blocks=1)

    with pytest.raises(InvariantBroken, match="block 0 is released while it is free"):
        pool.release([BlockId(0)])
    with pytest.raises(InvariantBroken, match="block 0 is shared while it is free"):
        pool.share([BlockId(0)])


def test_check_finds_a_block_that_is_free_and_referenced() -> None:
    pool = BlockPool(num_blocks=2)
    pool.allocate(1)
    pool._free.append(BlockId(0))

    with pytest.raises(InvariantBroken, match="2 blocks on the free list"):
        pool.check()


class BlockPoolMachine(RuleBasedStateMachine):
    """Random holders against a plain model: a list of who holds what."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=8)
        self.holders: list[tuple[BlockId, ...]] = []

    @rule(target=held, num_blocks=st.integers(0, 10))
    def allocate(self, num_blocks: int) -> tuple[BlockId, ...]:
        free_before = self.pool.num_free
        blocks = self.pool.allocate(num_blocks)
        if num_blocks > free_before:
            assert blocks is None
            blocks = ()
        assert blocks is not None
        assert len(set(blocks)) == (num_blocks if num_blocks <= free_before else 0)
        assert not {block for holder in self.holders for block in holder} & set(blocks)
        self.holders.append(blocks)
        return blocks

    @rule(target=held, blocks=held)
    def share(self, blocks: tuple[BlockId, ...]) -> tuple[BlockId, ...]:
        self.pool.share(blocks)
        self.holders.append(blocks)
        return blocks

    @rule(blocks=consumes(held))
    def release(self, blocks: tuple[BlockId, ...]) -> None:
        self.pool.release(blocks)
        self.holders.remove(blocks)

    @invariant()
    def every_block_is_free_or_referenced(self) -> None:
        self.pool.check()
        referenced = [block for holder in self.holders for block in holder]
        assert self.pool.num_used == len(set(referenced))
        assert self.pool.num_free + self.pool.num_used == 8
        for block in set(referenced):
            assert self.pool.reference_count(block) == referenced.count(block)


TestBlockPoolMachine = BlockPoolMachine.TestCase
