"""A request's progress on its worker: what is known, what is planned, what is computed.

Counts tokens and plans; which sequences move next is the scheduler's decision.
"""

import enum
from array import array
from collections.abc import MutableSequence
from typing import cast

from control_plane.kv.hashing import BlockHash
from plugins.errors import InvariantBroken
from plugins.types import Chunk, Request, RequestId, Row, TokenId


class State(enum.Enum):
    """Where a sequence is. Preempted is waiting with plans in flight or tokens of its own."""

    WAITING = enum.auto()
    RUNNING = enum.auto()  # holds a row and blocks
    FINISHED = enum.auto()


class Sequence:
    """The progress of one request. Owned by one scheduler; changed by it alone.

    A chunk that reaches the end of the known tokens samples one more, which is known to exist from then on and gets
    its value when the plan's result arrives: `len(token_ids)` lags behind `num_known` by what is in flight.

    What a step changes are distances, which count down: the room that is left, and how far the next event is. They
    stay small, and a step of 2,000 sequences then touches half the memory that growing totals would. The totals are
    properties.
    Invariant: num_computed <= num_planned <= num_known <= max_known.
    """

    __slots__ = (
        "can_publish",
        "decode_chunk",
        "has_started",
        "hashes",
        "last_row",
        "max_known",
        "next_boundary",
        "num_left",
        "num_named",
        "num_plans",
        "num_preemptions",
        "num_prompt_tokens",
        "num_spare_slots",
        "num_unplanned",
        "num_until_full",
        "place",
        "request",
        "request_id",
        "root",
        "row",
        "state",
        "tells_prompt",
        "token_ids",
    )

    def __init__(self, request: Request, place: tuple[float, int], root: BlockHash, hashes: list[BlockHash]) -> None:
        if request.sampling.max_tokens is None:
            raise InvariantBroken(f"request {request.request_id!r} was admitted without max_tokens")
        self.request = request
        self.request_id: RequestId = request.request_id
        self.place = place  # among all sequences of its scheduler: smaller is served first
        self.num_prompt_tokens = len(request.prompt_token_ids)
        # Prompt and output as far as it has come. An array keeps 4 bytes for each, a list would keep 40.
        tokens = array("i", (*request.prompt_token_ids, *request.output_token_ids))
        self.token_ids = cast("MutableSequence[TokenId]", tokens)
        self.max_known = self.num_prompt_tokens + request.sampling.max_tokens  # it is complete when it has so many
        # Something is told of each token of its prompt, so that all of them have to be computed.
        self.tells_prompt = request.sampling.prompt_logprobs is not None
        self.state = State.WAITING
        self.has_started = bool(request.output_token_ids)  # it was admitted before, here or elsewhere
        self.row: Row | None = None
        self.last_row = Row(-1)  # the row that it has or had last
        self.decode_chunk: Chunk | None = None  # one token, no new block: the same value in most steps of its row
        self.num_left = self.max_known - len(self.token_ids)  # tokens that it may still sample
        self.num_unplanned = len(self.token_ids)  # known tokens that no plan since the last admission computes
        self.num_spare_slots = 0  # slots of its blocks behind the last known token; below 0: it needs another block
        self.num_plans = 0  # plans in flight that name this sequence
        self.num_preemptions = 0  # for want of blocks
        self.root = root  # the hash before the first block
        self.hashes = hashes  # of its full blocks as far as they were needed; the prompt's at least
        self.num_named = 0  # leading blocks that were shown to the prefix cache
        self.can_publish = True  # its blocks may be hit by others
        self.next_boundary = 0  # the number of computed tokens at which another block is full
        self.num_until_full = 0  # from those that are computed to there

    @property
    def num_known(self) -> int:
        """Tokens that exist, on the worker at least."""
        return self.max_known - self.num_left

    @property
    def num_planned(self) -> int:
        """Tokens that need no further plan since the last admission, cached ones included."""
        return self.num_known - self.num_unplanned

    @property
    def num_computed(self) -> int:
        """Those of the planned tokens whose plans have answered."""
        return self.next_boundary - self.num_until_full

    @property
    def num_slots(self) -> int:
        """Tokens that its blocks hold."""
        return self.num_known + self.num_spare_slots

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that have arrived."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prompt_computed(self) -> bool:
        """True while it runs and its whole prompt is known to be in its blocks."""
        return self.row is not None and self.num_computed >= self.num_prompt_tokens

    def start(self, row: Row, num_cached_tokens: int, num_slots: int, block_size: int) -> None:
        """Enter a row, with so many leading tokens computed already. Nothing is in flight."""
        self.state = State.RUNNING
        self.has_started = True
        self.row = self.last_row = row
        self.decode_chunk = Chunk(row, 1)
        self.num_left = self.max_known - len(self.token_ids)
        self.num_unplanned = len(self.token_ids) - num_cached_tokens
        self.num_spare_slots = num_slots - len(self.token_ids)
        self.num_named = num_cached_tokens // block_size
        self.can_publish = True
        self.next_boundary = (self.num_named + 1) * block_size
        self.num_until_full = self.next_boundary - num_cached_tokens

    def plan(self, num_tokens: int) -> None:
        """Note that a plan computes the next tokens; at the end of those that are known it samples one more."""
        self.num_plans += 1
        self.num_unplanned -= num_tokens
        if self.num_unplanned == 0:
            self.num_unplanned = 1
            self.num_left -= 1
            self.num_spare_slots -= 1

    def wait(self) -> None:
        """The token that a plan was to sample could not be chosen yet: the last known one is computed again.

        A plan in flight that counted on it does that; with none, the next one that names the row.
        """
        self.num_left += 1
        self.num_spare_slots += 1
        self.num_until_full += 1

    def pass_boundary(self, block_size: int) -> int:
        """Enough is computed to fill blocks. Returns how many are full by now."""
        num_computed = self.num_computed
        num_full = num_computed // block_size
        self.next_boundary = (num_full + 1) * block_size
        self.num_until_full = self.next_boundary - num_computed
        return num_full

    def drop_in_flight(self) -> int:
        """No plan names it any more: tokens that were on their way and did not come do not exist. Returns how many.

        A worker that has launched the plan which released a row may have nothing to say of the row any more.
        """
        num_dropped = self.num_known - len(self.token_ids)
        self.num_left += num_dropped
        self.num_unplanned = len(self.token_ids)
        self.num_spare_slots = -len(self.token_ids)
        return num_dropped

    def stop(self, state: State) -> Row:
        """Leave the row, preempted (WAITING) or for good (FINISHED). Tokens in flight stay expected."""
        row = self.row
        if row is None:
            raise InvariantBroken(f"request {self.request_id!r} leaves a row, but has none")
        self.state = state
        self.row = self.decode_chunk = None
        self.num_unplanned = self.num_known
        self.num_spare_slots = -self.num_known
        self.num_named = self.next_boundary = self.num_until_full = 0
        return row
