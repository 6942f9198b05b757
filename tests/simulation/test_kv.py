"""The allocator and its prefix cache as a state machine, against a model of what every block holds."""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from control_plane.kv.allocator import Allocator
from control_plane.kv.hashing import BlockHash, BlockHasher, CacheScope
from plugins.kv_events import BlocksRemoved, BlocksStored
from plugins.types import BlockId, RequestId, TokenId

NUM_BLOCKS, BLOCK_SIZE = 8, 2

few_tokens = st.lists(st.integers(0, 1).map(TokenId), min_size=1, max_size=7)  # two words: prompts often begin alike
salts = st.sampled_from(["", "s"])
spares = st.integers(0, 3)


@dataclass(frozen=True, slots=True)
class Cell:
    """What a worker keeps for one token: computed from it, under its salt, with weights of some reset's time."""

    token_id: TokenId
    salt: str
    num_resets: int


@dataclass(slots=True)
class Model:
    """A sequence: what its blocks must hold, and how many of them it has published."""

    cells: list[Cell]
    salt: str
    num_resets: int
    num_published: int = 0

    @property
    def token_ids(self) -> list[TokenId]:
        return [cell.token_id for cell in self.cells]


class KVMachine(RuleBasedStateMachine):
    """Sequences start, fork, grow, publish and end in a pool that is often full; the cache is reset in between."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = Allocator(NUM_BLOCKS, BLOCK_SIZE)
        self.kv.records_events = True
        self.hasher = BlockHasher(b"key", BLOCK_SIZE)
        self.sequences: dict[RequestId, Model] = {}
        self.memory: dict[BlockId, list[Cell]] = {}
        self.told: set[bytes] = set()  # what a listener to the events believes to be cached
        self.num_resets = 0
        self.num_sequences = 0
        self.prompts: list[tuple[list[TokenId], str]] = [([], "")]  # seen before, and worth beginning with again

    def next_id(self) -> RequestId:
        self.num_sequences += 1
        return RequestId(f"r{self.num_sequences}")

    def hashes(self, token_ids: list[TokenId], salt: str) -> tuple[BlockHash, list[BlockHash]]:
        root = self.hasher.root(CacheScope(cache_salt=salt))
        return root, self.hasher.chain(root, token_ids)

    def write(self, request_id: RequestId, first: int) -> None:
        """Compute a sequence's tokens from `first` on."""
        table, cells = self.kv.table(request_id), self.sequences[request_id].cells
        for position in range(first, len(cells)):
            block = self.memory.setdefault(table[position // BLOCK_SIZE], [])
            del block[position % BLOCK_SIZE :]
            block.append(cells[position])

    @rule(data=st.data(), more=few_tokens, salt=salts, spare=spares)
    def start(self, data: st.DataObject, more: list[TokenId], salt: str, spare: int) -> None:
        seen, its_salt = data.draw(st.sampled_from(self.prompts))
        token_ids, salt = [*seen, *more], its_salt if seen else salt
        request_id, free_before = self.next_id(), self.kv.num_free
        _, hashes = self.hashes(token_ids, salt)
        usable = hashes[: (len(token_ids) - 1) // BLOCK_SIZE]
        num_told = next((i for i, block_hash in enumerate(usable) if block_hash not in self.told), len(usable))
        held = {block_id for each in self.sequences for block_id in self.kv.table(each)}

        start = self.kv.start(request_id, len(token_ids), usable, spare)

        num_blocks = -(-len(token_ids) // BLOCK_SIZE)
        if start is None:
            assert free_before - num_blocks < spare
            assert self.kv.num_free == free_before
            return
        assert self.kv.num_free == free_before - len({*start.cached, *start.new} - held) >= spare
        assert len(start.cached) == num_told
        assert len(start.cached) + len(start.new) == num_blocks
        assert not held & set(start.new)
        cells = [Cell(token_id, salt, self.num_resets) for token_id in token_ids]
        self.sequences[request_id] = Model(cells, salt, self.num_resets)
        self.write(request_id, len(start.cached) * BLOCK_SIZE)

    @rule(data=st.data(), more=few_tokens, spare=spares)
    @precondition(lambda self: self.sequences)
    def fork(self, data: st.DataObject, more: list[TokenId], spare: int) -> None:
        source_id = data.draw(st.sampled_from(sorted(self.sequences)))
        source = self.sequences[source_id]
        num_shared = data.draw(st.integers(1, len(source.cells)))
        cells = source.cells[:num_shared] + [Cell(token_id, source.salt, source.num_resets) for token_id in more]
        request_id, free_before = self.next_id(), self.kv.num_free

        fork = self.kv.fork(request_id, source_id, num_shared, len(cells), spare)

        num_added = -(-len(cells) // BLOCK_SIZE) - num_shared // BLOCK_SIZE
        if fork is None:
            assert free_before - num_added < spare
            assert self.kv.num_free == free_before
            return
        assert self.kv.num_free == free_before - num_added >= spare
        assert (fork.copy is not None) == (num_shared % BLOCK_SIZE > 0)
        if fork.copy is not None:
            self.memory[fork.copy.destination] = list(self.memory[fork.copy.source])
        self.sequences[request_id] = Model(cells, source.salt, source.num_resets)
        self.write(request_id, num_shared)

    @rule(data=st.data(), more=few_tokens)
    @precondition(lambda self: self.sequences)
    def grow(self, data: st.DataObject, more: list[TokenId]) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.sequences)))
        model, table, free_before = self.sequences[request_id], self.kv.table(request_id), self.kv.num_free
        num_tokens = len(model.cells) + len(more)

        added = self.kv.grow(request_id, num_tokens)

        num_added = -(-num_tokens // BLOCK_SIZE) - len(table)
        if added is None:
            assert num_added > free_before == self.kv.num_free
            assert self.kv.table(request_id) == table
            return
        assert self.kv.num_free == free_before - num_added
        assert self.kv.table(request_id) == table + added
        first = len(model.cells)
        model.cells += [Cell(token_id, model.salt, model.num_resets) for token_id in more]
        self.write(request_id, first)

    @rule(data=st.data())
    @precondition(lambda self: self.sequences)
    def publish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.sequences)))
        model = self.sequences[request_id]
        root, hashes = self.hashes(model.token_ids, model.salt)
        first = data.draw(st.integers(0, model.num_published))
        parent = hashes[first - 1] if first else root
        token_ids = model.token_ids[first * BLOCK_SIZE : len(hashes) * BLOCK_SIZE]
        cached_before = self.kv.num_cached
        # Of two equal blocks one has the name, and takes it along when it is evicted.
        is_chained = self.kv.num_matched(hashes[:first]) == first

        self.kv.publish(request_id, hashes[first:], first, parent, token_ids)

        model.num_published = len(hashes)
        self.prompts.append((model.token_ids, model.salt))
        if model.num_resets < self.num_resets:
            assert self.kv.num_cached == cached_before
        elif is_chained:
            assert self.kv.num_matched(hashes) == len(hashes)

    @rule(data=st.data())
    @precondition(lambda self: self.sequences)
    def release(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.sequences)))
        cached_before = self.kv.num_cached

        self.kv.release(request_id)

        del self.sequences[request_id]
        assert self.kv.table(request_id) == ()
        assert self.kv.num_cached == cached_before

    @rule()
    def reset(self) -> None:
        self.kv.reset()
        self.num_resets += 1
        assert self.kv.num_cached == 0

    @invariant()
    def blocks_add_up(self) -> None:
        self.kv.check()
        held = {block_id for each in self.sequences for block_id in self.kv.table(each)}
        assert self.kv.num_free + len(held) == NUM_BLOCKS

    @invariant()
    def every_sequence_finds_in_its_blocks_what_it_would_have_computed(self) -> None:
        for request_id, model in self.sequences.items():
            found = [cell for block_id in self.kv.table(request_id) for cell in self.memory[block_id]]
            assert found[: len(model.cells)] == model.cells

    @invariant()
    def a_listener_knows_what_is_cached(self) -> None:
        for event in self.kv.take_events():
            if isinstance(event, BlocksStored):
                parent = BlockHash(event.parent_hash)
                assert self.hasher.chain(parent, event.token_ids) == list(event.block_hashes)
                assert not self.told & set(event.block_hashes)
                self.told.update(event.block_hashes)
            elif isinstance(event, BlocksRemoved):
                assert self.told >= set(event.block_hashes)
                self.told.difference_update(event.block_hashes)
            else:
                self.told.clear()
        assert len(self.told) == self.kv.num_cached


TestKVMachine = KVMachine.TestCase
