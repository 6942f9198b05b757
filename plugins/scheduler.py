"""The scheduler hooks: which tokens of which sequences the next step computes, and in which order requests come.

Schedulers and policies are pure: no clock, no I/O, no randomness; the same calls give the same plans.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from plugins.kv_events import KvEvent
from plugins.types import Finished, Request, RequestId, StepPlan, StepResult, WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLoad:
    """How busy a scheduler is. Counts of events are since it was built."""

    num_running: int = 0  # requests that hold a row
    num_waiting: int = 0  # requests that wait for one
    num_waiting_tokens: int = 0  # known tokens of those that wait
    num_uncomputed_tokens: int = 0  # known tokens of those that run, which no plan has computed yet
    num_blocks: int = 0
    num_free_blocks: int = 0  # cached ones that nobody uses included
    num_cached_blocks: int = 0  # that a prefix could hit
    num_preemptions: int = 0
    num_prefix_tokens: int = 0  # prompt tokens that were looked up in the prefix cache, once per request
    num_prefix_hits: int = 0  # those of them that were found


class Scheduler(ABC):
    """Decides for one worker. Called from the engine task alone; owns the progress of every request it was given.

    Built as `cls(config, worker, policy)`: the scheduler's configuration, what the worker is, and a SchedulingPolicy.
    """

    max_plans_in_flight: int = 1  # plans it can make ahead of the last result; more than 1 is run-ahead

    def __init__(self, config: object, worker: WorkerInfo, policy: "SchedulingPolicy") -> None:
        """Keep what a scheduler is built with. `config` is a control_plane.scheduling.config.SchedulerConfig."""
        self.config = config
        self.worker = worker
        self.policy = policy

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Take a request; it waits until a plan admits it. Its id is not in use.

        One that has output already is continued: the tokens it has are known, and are never delivered again.
        One with `prompt_logprobs` is admitted without cached tokens: something is told of each.
        """

    @abstractmethod
    def cancel_request(self, request_id: RequestId) -> None:
        """Drop a request and let go of all it holds; the next plan releases its row. Unknown ids are ignored."""

    @abstractmethod
    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        """Plan one step; the plan may be empty.

        `throttle_prefills` asks to leave prompts for a later step, because decodes suffer. It is advice: a scheduler
        ignores it when its last admissions stopped for want of room, or when no decode can fill the step.
        """

    @abstractmethod
    def update(self, result: StepResult) -> tuple[Finished, ...]:
        """Take the result of the oldest plan in flight; return the requests that it ended.

        Rows of requests that have ended may have tokens all the same: nobody reads them. A row that waits, as
        StepResult has it, has one token less than was planned, and its last known one is to be computed again.
        """

    @abstractmethod
    def has_work(self) -> bool:
        """True if `schedule` could have something to do, now or after results that are still to come."""

    def load(self) -> SchedulerLoad:
        """Tell how busy it is: routers send requests where little waits, and people read it in `dihedral status`."""
        return SchedulerLoad()

    def num_cached_tokens(self, request: Request) -> int:
        """How many leading tokens of this prompt would need no computing here. For routing: changes nothing."""
        return 0

    def reset_prefix_cache(self) -> None:  # noqa: B027  # a scheduler without a cache has nothing to forget
        """Forget all cached blocks: nothing that was computed before this call is hit after it."""

    def record_kv_events(self, is_on: bool) -> None:  # noqa: B027  # as above
        """Begin or cease to note what happens to cached blocks; at first nothing is noted, because nobody listens."""

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """Return what was noted since the last call, in order."""
        return ()


class SchedulingPolicy(ABC):
    """The order in which requests are served. Narrower than a scheduler: blocks, rows and tokens are not its business.

    Owned by one scheduler. Ties are served in the order of arrival.
    """

    @abstractmethod
    def order(self, request: Request) -> float:
        """The request's place among all others, waiting or running: lower is served first. Asked once, at arrival."""

    def admit(self, request: Request, running: Sequence[Request]) -> bool:
        """May the first of those that wait start now? False: nobody is admitted in this step. `running` is in order.

        Asked only when there is room. It must be True when nobody runs, or nothing would ever move.
        """
        return True

    def victim(self, running: Sequence[Request]) -> int:
        """Who gives its blocks back, so that another can go on: an index into `running`, which is in order."""
        return len(running) - 1

    def displaces(self, waiting: Request, running: Request) -> bool:
        """May the first of those that wait take the place of the last of those that run, if no row is free?"""
        return False

    def note_admitted(self, request: Request) -> None:  # noqa: B027  # most policies keep no accounts
        """A request starts; again, if it was preempted meanwhile."""

    def note_ended(self, request: Request, num_output_tokens: int) -> None:  # noqa: B027  # as above
        """A request ended with so many output tokens, for whatever reason."""
