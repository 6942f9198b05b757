"""A request's progress on its worker: what is known, what is planned, what is computed.

Counts tokens and plans; which sequences move next is the scheduler's decision.
"""

import enum
import sys

from control_plane.kv.hashing import BlockHash
from plugins.errors import InvariantBroken
from plugins.types import Chunk, Request, RequestId, Row, TokenId

NEVER = sys.maxsize


class State(enum.Enum):
    """Where a sequence is. Preempted is waiting with plans in flight or tokens of its own."""

    WAITING = enum.auto()
    RUNNING = enum.auto()  # holds a row and blocks
    FINISHED = enum.auto()


class Sequence:
    """The progress of one request. Owned by one scheduler; changed by it alone.

    A chunk that reaches the end of the known tokens samples one more, which is known to exist from then on and gets
    its value when the plan's result arrives: `len(token_ids)` lags behind `num_known` by what is in flight.
    Invariant: num_computed <= num_planned <= num_known <= max_known.
    """

    __slots__ = (
        "decode_chunk",
        "has_started",
        "hashes",
        "max_known",
        "num_computed",
        "num_known",
        "num_named",
        "num_planned",
        "num_plans",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "place",
        "publish_at",
        "request",
        "request_id",
        "root",
        "row",
        "state",
        "token_ids",
    )

    def __init__(self, request: Request, place: tuple[float, int], root: BlockHash, hashes: list[BlockHash]) -> None:
        if request.sampling.max_tokens is None:
            raise InvariantBroken(f"request {request.request_id!r} was admitted without max_tokens")
        self.request = request
        self.request_id: RequestId = request.request_id
        self.place = place  # among all sequences of its scheduler: smaller is served first
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids: list[TokenId] = [*request.prompt_token_ids, *request.output_token_ids]
        self.max_known = self.num_prompt_tokens + request.sampling.max_tokens  # it is complete when it has so many
        self.state = State.WAITING
        self.has_started = bool(request.output_token_ids)  # it was admitted before, here or elsewhere
        self.row: Row | None = None
        self.decode_chunk: Chunk | None = None  # one token, no new block: the same value in most steps of its row
        self.num_known = len(self.token_ids)  # tokens that exist, on the worker at least
        self.num_planned = 0  # tokens that need no further plan since the last admission, cached ones included
        self.num_computed = 0  # those of them whose plans have answered
        self.num_plans = 0  # plans in flight that name this sequence
        self.num_preemptions = 0
        self.num_slots = 0  # tokens that its blocks hold
        self.root = root  # the hash before the first block
        self.hashes = hashes  # of its full blocks as far as they were needed; the prompt's at least
        self.num_named = 0  # leading blocks that the prefix cache knows
        self.publish_at = NEVER  # num_computed at which another block is full

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that have arrived."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prompt_computed(self) -> bool:
        """True while it runs and its whole prompt is known to be in its blocks."""
        return self.row is not None and self.num_computed >= self.num_prompt_tokens

    def start(self, row: Row, num_cached_tokens: int, num_slots: int) -> None:
        """Enter a row, with so many leading tokens computed already."""
        self.state = State.RUNNING
        self.has_started = True
        self.row = row
        self.decode_chunk = Chunk(row, 1)
        self.num_known = len(self.token_ids)
        self.num_planned = self.num_computed = num_cached_tokens
        self.num_slots = num_slots

    def plan(self, num_tokens: int) -> None:
        """Note that a plan computes the next tokens; at the end of those that are known it samples one more."""
        self.num_plans += 1
        self.num_planned += num_tokens
        if self.num_planned == self.num_known:
            self.num_known += 1

    def stop(self, state: State) -> Row:
        """Leave the row, preempted (WAITING) or for good (FINISHED). Tokens in flight stay expected."""
        row = self.row
        if row is None:
            raise InvariantBroken(f"request {self.request_id!r} leaves a row, but has none")
        self.state = state
        self.row = self.decode_chunk = None
        self.num_planned = self.num_computed = self.num_slots = self.num_named = 0
        self.publish_at = NEVER
        return row
