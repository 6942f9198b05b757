"""The scheduler hook: which tokens of which sequences the next step computes.

A scheduler is pure: no clock, no I/O, no randomness; the same calls give the same plans.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from plugins.types import Finished, Request, RequestId, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLoad:
    """How busy a scheduler is."""

    num_running: int  # requests that hold a row
    num_waiting: int  # requests that wait for one
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int  # since the scheduler was built


class Scheduler(ABC):
    """Decides for one worker. Called from the engine task alone; owns the progress of every request it was given."""

    max_plans_in_flight: int = 1  # plans it can make ahead of the last result; more than 1 is run-ahead

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Take a request; it waits until a plan admits it. Its id is not in use."""

    @abstractmethod
    def cancel_request(self, request_id: RequestId) -> None:
        """Drop a request and let go of all it holds; the next plan releases its row. Unknown ids are ignored."""

    @abstractmethod
    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        """Plan one step; the plan may be empty. `throttle_prefills` asks to go easy on prompts, if decodes suffer."""

    @abstractmethod
    def update(self, result: StepResult) -> tuple[Finished, ...]:
        """Take the result of the oldest plan in flight; return the requests that it ended."""

    @abstractmethod
    def has_work(self) -> bool:
        """True if `schedule` could have something to do, now or after results that are still to come."""

    @abstractmethod
    def load(self) -> SchedulerLoad:
        """Tell how busy it is."""
