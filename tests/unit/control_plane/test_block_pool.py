"""The block pool: examples, and a state machine that checks its invariant after each move."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from control_plane.kv.block_pool import BlockPool
from plugins.errors import InvariantBroken
from plugins.types import BlockId

B0, B1, B2, B3 = BlockId(0), BlockId(1), BlockId(2), BlockId(3)


def filled_pool(num_blocks: int) -> BlockPool:
    """A pool whose blocks are all held once, and kept."""
    pool = BlockPool(num_blocks)
    for block_id in pool.allocate(num_blocks) or ():
        pool.keep(block_id)
    return pool


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


def test_a_kept_block_waits_with_its_content_and_comes_back_when_it_is_shared() -> None:
    pool = filled_pool(2)
    pool.release([B0])
    waiting = (pool.num_waiting, pool.num_free, pool.num_waiting_among([B0, B1]))

    pool.share([B0])

    assert waiting == (1, 1, 1)
    assert (pool.num_waiting, pool.num_free, pool.reference_count(B0)) == (0, 0, 1)
    assert pool.kept() == {0, 1}
    pool.check()


def test_empty_blocks_go_first_then_those_that_have_waited_longest() -> None:
    evicted: list[tuple[BlockId, ...]] = []
    pool = BlockPool(num_blocks=4, on_evict=lambda block_ids: evicted.append(tuple(block_ids)))
    pool.allocate(4)
    for block_id in (B0, B1, B3):
        pool.keep(block_id)
    pool.release([B3, B0, B1, B2])

    first = pool.allocate(2)
    second = pool.allocate(1)

    assert first == (2, 3)
    assert second == (0,)
    assert evicted == [(3,), (0,)]
    assert pool.kept() == {1}


def test_a_hit_makes_a_block_the_last_to_be_given_up() -> None:
    pool = filled_pool(3)
    pool.release([B0, B1, B2])

    pool.share([B0])
    pool.release([B0])

    assert pool.allocate(3) == (1, 2, 0)


def test_blocks_that_are_held_are_never_given_up() -> None:
    pool = filled_pool(3)
    pool.release([B0, B2])

    assert pool.allocate(3) is None
    assert pool.allocate(2) == (0, 2)
    assert pool.reference_count(B1) == 1


def test_when_none_are_kept_those_that_wait_are_empty_and_those_that_are_held_end_empty() -> None:
    evicted: list[BlockId] = []
    pool = BlockPool(num_blocks=2, on_evict=evicted.extend)
    pool.allocate(2)
    pool.keep(B0)
    pool.keep(B1)
    pool.release([B0])

    pool.keep_none()
    pool.release([B1])

    assert (pool.num_free, pool.num_waiting) == (2, 0)
    assert pool.allocate(2) == (1, 0)
    assert evicted == []


def test_releasing_sharing_or_keeping_a_block_that_nobody_holds_is_a_broken_invariant() -> None:
    pool = BlockPool(num_blocks=1)

    with pytest.raises(InvariantBroken, match="block 0 is released while nobody holds it"):
        pool.release([B0])
    with pytest.raises(InvariantBroken, match="block 0 is shared while it is empty"):
        pool.share([B0])
    with pytest.raises(InvariantBroken, match="block 0 is to be kept while nobody holds it"):
        pool.keep(B0)


def test_check_finds_a_block_that_is_empty_and_referenced() -> None:
    pool = BlockPool(num_blocks=2)
    pool.allocate(1)
    pool._empty.append(B0)

    with pytest.raises(InvariantBroken, match="2 empty and 0 waiting blocks, 2 of them distinct, 1 of 2 without"):
        pool.check()


def test_check_finds_a_block_that_is_empty_twice() -> None:
    pool = BlockPool(num_blocks=2)
    pool._empty[0] = B0

    with pytest.raises(InvariantBroken, match="2 empty blocks, 1 of them distinct"):
        pool.check()


def test_check_finds_a_block_that_nobody_has() -> None:
    pool = BlockPool(num_blocks=2)
    pool._empty.pop()

    with pytest.raises(InvariantBroken, match="1 empty and 0 waiting blocks, 1 of them distinct, 2 of 2 without"):
        pool.check()


def test_check_finds_a_block_that_waits_and_is_not_kept() -> None:
    pool = filled_pool(1)
    pool.release([B0])
    pool._kept.clear()

    with pytest.raises(InvariantBroken, match="1 waiting blocks are not kept, 0 empty ones are"):
        pool.check()


class BlockPoolMachine(RuleBasedStateMachine):
    """Random holders against a plain model: who holds what, which blocks are kept, and which wait, oldest first."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=8, on_evict=self.note_evicted)
        self.holders: list[tuple[BlockId, ...]] = []
        self.kept: set[BlockId] = set()
        self.waiting: list[BlockId] = []
        self.evicted: list[BlockId] = []

    def note_evicted(self, block_ids: Sequence[BlockId]) -> None:
        self.evicted.extend(block_ids)

    def is_held(self, block_id: BlockId) -> bool:
        return any(block_id in holder for holder in self.holders)

    @rule(target=held, num_blocks=st.integers(0, 10))
    def allocate(self, num_blocks: int) -> tuple[BlockId, ...]:
        free_before = 8 - len({block for holder in self.holders for block in holder})
        num_evicted = max(0, num_blocks - (free_before - len(self.waiting))) if num_blocks <= free_before else 0
        blocks = self.pool.allocate(num_blocks)
        if num_blocks > free_before:
            assert blocks is None
            blocks = ()
        assert blocks is not None
        assert len(set(blocks)) == (num_blocks if num_blocks <= free_before else 0)
        assert not any(self.is_held(block_id) for block_id in blocks)
        assert self.evicted == self.waiting[:num_evicted] == list(blocks[len(blocks) - num_evicted :])
        self.kept.difference_update(self.evicted)
        del self.waiting[:num_evicted]
        self.evicted.clear()
        self.holders.append(blocks)
        return blocks

    @rule(target=held, blocks=held)
    def share(self, blocks: tuple[BlockId, ...]) -> tuple[BlockId, ...]:
        self.pool.share(blocks)
        self.holders.append(blocks)
        return blocks

    @rule(target=held, data=st.data())
    def revive(self, data: st.DataObject) -> tuple[BlockId, ...]:
        blocks = tuple(data.draw(st.lists(st.sampled_from(self.waiting), unique=True))) if self.waiting else ()
        self.pool.share(blocks)
        self.waiting = [block_id for block_id in self.waiting if block_id not in blocks]
        self.holders.append(blocks)
        return blocks

    @rule(blocks=held)
    def keep(self, blocks: tuple[BlockId, ...]) -> None:
        for block_id in blocks:
            self.pool.keep(block_id)
        self.kept.update(blocks)

    @rule()
    def keep_none(self) -> None:
        self.pool.keep_none()
        self.kept.clear()
        self.waiting.clear()

    @rule(blocks=consumes(held))
    def release(self, blocks: tuple[BlockId, ...]) -> None:
        self.pool.release(blocks)
        self.holders.remove(blocks)
        self.waiting += [block_id for block_id in blocks if block_id in self.kept and not self.is_held(block_id)]

    @invariant()
    def every_block_is_empty_waiting_or_used(self) -> None:
        self.pool.check()
        referenced = [block for holder in self.holders for block in holder]
        assert self.pool.num_used == len(set(referenced))
        assert self.pool.num_free + self.pool.num_used == 8
        assert self.pool.num_waiting == len(self.waiting)
        assert self.pool.kept() == self.kept
        for block in set(referenced):
            assert self.pool.reference_count(block) == referenced.count(block)


TestBlockPoolMachine = BlockPoolMachine.TestCase
