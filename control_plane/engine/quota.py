"""How much may be at hand: requests and tokens that wait, and requests of one tenant.

Counts and refuses; who waits, and for what, is the engine core's business.
"""

from collections import Counter

from control_plane.admission.config import AdmissionConfig
from plugins.errors import QueueFull, TenantQuotaExceeded
from plugins.types import Request

RETRY_AFTER_S = 1.0  # what a refused caller is told: a queue that is full now has moved by then


class Quota:
    """The counts of one control plane. Owned by its engine core.

    Invariant: a request is counted from `enter` to `leave`, and as one that waits until `note_started`.
    """

    def __init__(self, limits: AdmissionConfig) -> None:
        self._limits = limits
        self._tenants: Counter[str] = Counter()  # requests at hand of each; none of those that have none
        self.num_waiting = 0  # requests that never had a row
        self.num_waiting_tokens = 0  # of their prompts

    @property
    def max_waiting(self) -> int:
        """Requests that may wait."""
        return self._limits.max_waiting

    def check(self, *requests: Request) -> None:
        """The outputs of one request come together. Where nobody waits they may be any number, of any length.

        Raises: QueueFull, TenantQuotaExceeded: they are too many.
        """
        limits = self._limits
        if self.num_waiting and self.num_waiting + len(requests) > limits.max_waiting:
            raise QueueFull(self.num_waiting, limits.max_waiting, RETRY_AFTER_S)
        num_tokens = self.num_waiting_tokens + sum(len(request.prompt_token_ids) for request in requests)
        if self.num_waiting and num_tokens > limits.max_waiting_tokens:
            raise QueueFull(self.num_waiting_tokens, limits.max_waiting_tokens, RETRY_AFTER_S, "prompt tokens")
        quota, tenant = limits.max_tenant_requests, requests[0].tenant
        if quota is not None and self._tenants[tenant] + len(requests) > quota:
            raise TenantQuotaExceeded(tenant, self._tenants[tenant], quota, RETRY_AFTER_S)

    def enter(self, request: Request) -> None:
        """A request came, and waits."""
        self._tenants[request.tenant] += 1
        self.num_waiting += 1
        self.num_waiting_tokens += len(request.prompt_token_ids)

    def note_started(self, request: Request) -> None:
        """It has its first row."""
        self.num_waiting -= 1
        self.num_waiting_tokens -= len(request.prompt_token_ids)

    def leave(self, request: Request, has_started: bool) -> None:
        """It has ended."""
        if not has_started:
            self.note_started(request)
        self._tenants[request.tenant] -= 1
        if not self._tenants[request.tenant]:
            del self._tenants[request.tenant]
