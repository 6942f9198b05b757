"""A request's progress on its worker: what is known, what is planned, what is in flight.

Counts tokens and plans; which sequences move next is the scheduler's decision.
"""

import enum

from plugins.errors import InvariantBroken
from plugins.types import Request, RequestId, Row, TokenId


class State(enum.Enum):
    """Where a sequence is. Preempted is waiting with plans in flight or tokens of its own."""

    WAITING = enum.auto()
    RUNNING = enum.auto()  # holds a row and blocks
    FINISHED = enum.auto()


class Sequence:
    """The progress of one request. Owned by one scheduler; changed by it alone.

    A chunk that reaches the end of the known tokens samples one more, which is known to exist from then on
    (a placeholder, `num_sampling`) and gets its value when the plan's result arrives.
    Invariant: 0 <= num_planned <= num_known.
    """

    __slots__ = (
        "arrival",
        "max_tokens",
        "num_planned",
        "num_plans",
        "num_prompt_tokens",
        "num_sampling",
        "request",
        "row",
        "state",
        "token_ids",
    )

    def __init__(self, request: Request, arrival: int) -> None:
        if request.sampling.max_tokens is None:
            raise InvariantBroken(f"request {request.request_id!r} was admitted without max_tokens")
        self.request = request
        self.arrival = arrival  # a number that grows with each request; the order of first come, first served
        self.max_tokens = request.sampling.max_tokens
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids: list[TokenId] = list(request.prompt_token_ids)  # prompt and output as far as it has arrived
        self.state = State.WAITING
        self.row: Row | None = None
        self.num_planned = 0  # tokens whose computing has been planned since the last admission
        self.num_sampling = 0  # sampled tokens that are still in flight
        self.num_plans = 0  # plans in flight that name this sequence

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def num_known(self) -> int:
        """Tokens that exist, on the worker at least."""
        return len(self.token_ids) + self.num_sampling

    @property
    def num_unplanned(self) -> int:
        """Tokens that exist and whose computing has not been planned."""
        return self.num_known - self.num_planned

    @property
    def is_prefilling(self) -> bool:
        """True while tokens known at admission wait to be computed: more than the one of a decode."""
        return self.num_planned < len(self.token_ids) - 1 or self.num_planned == 0

    @property
    def is_complete(self) -> bool:
        """True if the last token it may have is sampled, in flight perhaps; nothing is left to plan."""
        return self.num_known - self.num_prompt_tokens >= self.max_tokens

    def plan(self, num_tokens: int) -> bool:
        """Note that a plan computes the next tokens. Returns True if the chunk samples a new one."""
        self.num_planned += num_tokens
        self.num_plans += 1
        samples = self.num_planned == self.num_known
        if samples:
            self.num_sampling += 1
        return samples

    def start(self, row: Row) -> None:
        """Enter a row, with nothing computed."""
        self.state = State.RUNNING
        self.row = row
        self.num_planned = 0

    def stop(self, state: State) -> Row:
        """Leave the row, preempted (WAITING) or for good (FINISHED). Tokens in flight stay expected."""
        row = self.row
        if row is None:
            raise InvariantBroken(f"request {self.request_id!r} leaves a row, but has none")
        self.state = state
        self.row = None
        return row
