"""Priorities that age: urgent requests go first, and nobody waits for ever.

A request's place is the time it came plus its priority in seconds, so that places never change while it waits.
"""

from plugins.scheduler import SchedulingPolicy
from plugins.types import Request


class PriorityPolicy(SchedulingPolicy):
    """A lower priority number goes first; `ageing_s` seconds of waiting outweigh one level.

    A request of priority p is overtaken by one of priority q < p only if that one comes within (p - q) * ageing_s
    seconds: after this time nothing of priority q passes it any more. So no request starves.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def order(self, request: Request) -> float:
        return request.arrival_s + request.priority * self._ageing_s

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Only a strictly better priority displaces, and only one that would have been served first anyway.

        Equals never displace each other, however old, and nobody is displaced by what may not overtake it.
        """
        return waiting.priority < running.priority and self.order(waiting) < self.order(running)
