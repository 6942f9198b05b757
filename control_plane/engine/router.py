"""Chooses the worker that gets a request, among those that could take it.

Pure but for the chance that is injected. What a worker holds is told by its scheduler; who could take a request is
decided in `control_plane/engine/core.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from plugins.errors import InvalidConfig
from plugins.scheduler import SchedulerLoad
from plugins.types import Request

# A request that decodes slows its neighbours by about as much as this many prompt tokens would, over its life.
TOKENS_PER_RUNNING: Final = 64


class Candidate(Protocol):
    """What routers may ask of a worker."""

    def load(self) -> SchedulerLoad:
        """How busy it is."""

    def num_cached_tokens(self, request: Request) -> int:
        """How many leading tokens of the prompt need no computing there."""


class Router(Protocol):
    """Chooses. Called from the engine task alone."""

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> int:
        """Return an index into `candidates`, of which there is at least one."""


def work(load: SchedulerLoad) -> int:
    """How much a new request would wait for, in tokens."""
    return load.num_waiting_tokens + load.num_uncomputed_tokens + TOKENS_PER_RUNNING * load.num_running


class RoundRobin:
    """One after the other: even in numbers, blind to size and cache."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> int:
        self._next += 1
        return (self._next - 1) % len(candidates)


class PowerOfTwo:
    """The less busy of two that chance names (Mitzenmacher 2001): nearly as good as asking all, and never a herd."""

    def __init__(self, draw_below: Callable[[int], int]) -> None:
        self._draw_below = draw_below  # a number in [0, n)

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> int:
        if len(candidates) == 1:
            return 0
        first = self._draw_below(len(candidates))
        second = (first + 1 + self._draw_below(len(candidates) - 1)) % len(candidates)
        return min(first, second, key=lambda index: work(candidates[index].load()))


class LeastLoad:
    """The one with the least work before it; among equals one after the other."""

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> int:
        return _least([work(each.load()) for each in candidates], self._turn.choose(request, candidates))


class PrefixAffinity:
    """The one where the prompt's first token would come soonest: work before it, and what is not cached.

    So a prompt follows its prefix until the queue there is longer than computing the prefix anew elsewhere.
    """

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def choose(self, request: Request, candidates: Sequence[Candidate]) -> int:
        costs = [work(each.load()) - each.num_cached_tokens(request) for each in candidates]
        return _least(costs, self._turn.choose(request, candidates))


def make_router(name: str, draw_below: Callable[[int], int]) -> Router:
    """Make a router by its name in the configuration. Raises: InvalidConfig: there is none of this name."""
    routers: Mapping[str, Callable[[], Router]] = {
        "prefix_affinity": PrefixAffinity,
        "least_load": LeastLoad,
        "power_of_two": lambda: PowerOfTwo(draw_below),
        "round_robin": RoundRobin,
    }
    if name not in routers:
        raise InvalidConfig(f"workers.router must be one of {', '.join(sorted(routers))}, is {name!r}")
    return routers[name]()


def _least(costs: Sequence[int], start: int) -> int:
    """The index of the smallest, the first one from `start` on among equals."""
    order: list[int] = [*range(start, len(costs)), *range(start)]
    return min(order, key=lambda index: costs[index])
