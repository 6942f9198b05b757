"""The named points at which a simulated world may go wrong, and which of them do in one seed.

Says when; what then happens is the business of the worker, the clients and the operators of the simulation.
"""

import enum
import random
from collections import Counter

ACTIVE_RATIO = 0.25  # of the points, in each seed
FIRE_RATIO = (0.05, 0.25)  # how often an active point fires when it is passed
MILD_RATIO = 0.2  # of the seeds
RARE = 0.1  # of that, where hundreds pass in a seed: else nothing would ever get done
STATES = ("queued", "prefilling", "decoding", "preempted", "homeless", "suspect")
EVENTS = ("abort", "preempt", "deadline", "crash")


class Point(enum.Enum):
    """Where a fault may be. The value is what a table calls it."""

    # results on their way from a worker
    RESULT_DELAYED = "result delayed"
    RESULT_LOST = "result lost, the stream breaks"
    RESULT_SILENT = "result lost, the stream stays"
    RESULT_DUPLICATED = "result twice"
    RESULT_LATE = "result after the loss of its worker"
    RESULT_FOREIGN_ROW = "result of a foreign row"
    RESULT_WRONG_SEQ = "result of another plan"
    RESULT_GARBAGE = "result with columns that do not add up"
    RESULT_TOKEN_MISSING = "result without a row that samples"
    ROW_FAILS = "row fails"
    ROW_WAITS = "row waits"
    # workers and their addresses
    CRASH_BEFORE = "worker crashes before it computes"
    CRASH_AFTER = "worker crashes after it computed"
    CRASH_IDLE = "worker crashes at any time"
    QUERY_OF_DEATH = "request that kills its worker"
    FREEZE = "worker freezes"
    LEAVE = "worker leaves and comes back"
    UPGRADE = "worker of a new generation"
    ADDRESS_ADDED = "address added"
    ADDRESS_REMOVED = "address removed"
    CONNECT_FAILS = "connecting fails"
    OWNED = "another control plane has the worker"
    TAKEN = "a namesake of the control plane takes the worker"
    # the control plane's own
    POOL_TIGHT = "KV cache hardly larger than one request"
    SCHEDULER_RAISES = "scheduler raises"
    TEXT_BREAKS = "tokens without a text"
    STALL = "control plane stands still"
    PAUSE = "pause and resume of the server"
    PAUSE_WORKER = "pause and resume of a worker"
    DRAIN_WORKER = "drain of a worker"
    CACHE_RESET = "prefix cache reset"
    SERVER_DRAIN = "server drains with requests at hand"
    # what clients do
    CANCEL_EARLY = "cancel before and right after submit"
    CANCEL_QUEUED = "cancel while queued"
    CANCEL_ADMITTED = "cancel when just admitted"
    CANCEL_PREFILL = "cancel in a prefill"
    CANCEL_DECODE = "cancel in a decode"
    CANCEL_FINISHING = "cancel when the last step is under way"
    CANCEL_ENDED = "cancel after the end"
    CANCEL_ANYTIME = "cancel at any time"
    DEADLINE_QUEUED = "deadline while queued"
    DEADLINE_ADMITTED = "deadline when just admitted"
    DEADLINE_PREFILL = "deadline in a prefill"
    DEADLINE_DECODE = "deadline in a decode"
    DEADLINE_FINISHING = "deadline when the last step is under way"
    DEADLINE_ANYTIME = "deadline at any time"
    QUEUED_TOO_LONG = "queued longer than the server allows"
    READER_SLOW = "slow reader"
    READER_STOPS = "reader that stops"
    DUPLICATE_ID = "request id in use"
    ID_REUSED = "request id used again"
    QUEUE_FULL = "queue full"
    QUEUE_FULL_TOKENS = "queue full by tokens"
    TENANT_QUOTA = "tenant over its quota"
    INVALID = "request that can never fit"


_OFTEN_PASSED = frozenset(
    {
        Point.RESULT_DELAYED,
        Point.RESULT_LOST,
        Point.RESULT_SILENT,
        Point.RESULT_DUPLICATED,
        Point.RESULT_FOREIGN_ROW,
        Point.RESULT_WRONG_SEQ,
        Point.RESULT_GARBAGE,
        Point.RESULT_TOKEN_MISSING,
        Point.ROW_FAILS,
        Point.CRASH_BEFORE,
        Point.CRASH_AFTER,
        Point.SCHEDULER_RAISES,
        Point.CONNECT_FAILS,
    }
)


# What may cost a worker its stream while it computes, besides a request that kills it.
LETHAL = frozenset(
    {
        Point.RESULT_LOST,
        Point.RESULT_SILENT,
        Point.RESULT_DUPLICATED,
        Point.RESULT_FOREIGN_ROW,
        Point.RESULT_WRONG_SEQ,
        Point.RESULT_GARBAGE,
        Point.RESULT_TOKEN_MISSING,
        Point.CRASH_BEFORE,
        Point.CRASH_AFTER,
        Point.CRASH_IDLE,
        Point.FREEZE,
        Point.CONNECT_FAILS,
        Point.STALL,
    }
    | {point for point in Point if point.name.startswith("DEADLINE")}  # a deadline is met by standing still
)


class FaultPlan:
    """The faults of one seed. Deterministic: asked in the same order, it gives the same answers.

    `fired` counts what fired, `fired_live` what fired while some request was at hand.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"faults of {seed}")
        # In some seeds no worker dies by chance: only there it is known who killed one.
        spared = LETHAL if self._random.random() < MILD_RATIO else frozenset()
        self._ratios = {
            point: self._random.uniform(*FIRE_RATIO) * (RARE if point in _OFTEN_PASSED else 1.0)
            for point in Point
            if self._random.random() < ACTIVE_RATIO and point not in spared
        }
        self.is_over = False  # once set, nothing fires any more
        self.fired: Counter[Point] = Counter()
        self.fired_live: Counter[Point] = Counter()
        self.pairs: Counter[tuple[str, str]] = Counter()  # (state of a request, what happened to it then)

    def is_active(self, point: Point) -> bool:
        """Tell whether the point may fire in this seed at all."""
        return point in self._ratios

    def draws(self, point: Point) -> bool:
        """Decide whether the point fires now. Who acts on it calls `note`."""
        ratio = self._ratios.get(point)
        return ratio is not None and not self.is_over and self._random.random() < ratio

    def chooses(self, point: Point) -> bool:
        """Decide about a point that is passed once in a seed."""
        return self.is_active(point) and not self.is_over and self._random.random() < 0.5

    def note(self, point: Point, num_live: int) -> None:
        """The fault happened, with so many requests at hand."""
        self.fired[point] += 1
        if num_live > 0:
            self.fired_live[point] += 1

    def note_pair(self, state: str, event: str) -> None:
        """Something happened to a request in this state."""
        self.pairs[state, event] += 1
