"""First come, first served: the order of arrival and nothing else."""

from plugins.scheduler import SchedulingPolicy
from plugins.types import Request


class FirstComePolicy(SchedulingPolicy):
    """The oldest first. Nobody waits for ever: nothing that comes later is served before."""

    def order(self, request: Request) -> float:
        return request.arrival
