"""Fair share: tenants get tokens in proportion to their weights, however many requests each of them sends.

Start-time fair queueing: P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queuing: A Scheduling Algorithm for
Integrated Services Packet Switching Networks", SIGCOMM 1996. A request is their packet, its tokens are the length.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from plugins.errors import InvariantBroken
from plugins.scheduler import SchedulingPolicy
from plugins.types import Request, RequestId

MAX_IDLE_TENANTS = 4096  # accounts that are kept though nothing of theirs is at hand


@dataclass(slots=True)
class _Account:
    """What one tenant owes, as a point on the virtual clock."""

    finish: float = 0.0  # where its next request may start
    run: int = 0  # grows whenever it is found without debts; charges of one run follow each other
    num_requests: int = 0  # at hand


@dataclass(slots=True)
class _Charge:
    """What one request at hand was charged."""

    account: _Account
    run: int  # of the account, when it was charged
    start: float  # its start tag
    cost: float  # tokens divided by weight, part of account.finish
    was_admitted: bool = False


class FairSharePolicy(SchedulingPolicy):
    """Serves the smallest start tag first: max(virtual time, where the tenant's last request was to finish).

    A request is charged prompt + max_tokens, divided by the tenant's weight (1 if none is given), when it comes; what
    it did not use is given back when it ends, for the tenant's later requests. Virtual time is the largest start tag
    that was admitted, so who was away comes back neither with debts that others have caught up with, nor with
    credit. Output that a request brings along was paid for elsewhere.

    Nobody starves: tags of a tenant that keeps sending grow past any tag that waits.
    Invariant: an account's finish is where its run began plus the charges of that run. What is left of an earlier
    run is settled: virtual time has passed it, so nothing is given back for it.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._virtual_time = 0.0
        self._charges: dict[RequestId, _Charge] = {}
        self._busy: dict[str, _Account] = {}
        self._idle: OrderedDict[str, _Account] = OrderedDict()  # with debts; the longest idle first

    @property
    def num_accounts(self) -> int:
        """Tenants that it remembers."""
        return len(self._busy) + len(self._idle)

    def order(self, request: Request) -> float:
        if request.request_id in self._charges:
            raise InvariantBroken(f"request {request.request_id!r} is charged twice")
        account = self._account(request.tenant)
        num_tokens = len(request.prompt_token_ids) + self._num_unused(request, len(request.output_token_ids))
        cost = num_tokens / self._weight(request)
        charge = _Charge(account, account.run, account.finish, cost)
        account.finish += cost
        account.num_requests += 1
        self._charges[request.request_id] = charge
        return charge.start

    def note_admitted(self, request: Request) -> None:
        charge = self._charges[request.request_id]
        charge.was_admitted = True
        self._virtual_time = max(self._virtual_time, charge.start)

    def note_ended(self, request: Request, num_output_tokens: int) -> None:
        charge = self._charges.pop(request.request_id)
        account = charge.account
        if charge.run == account.run:
            unused = self._num_unused(request, num_output_tokens) / self._weight(request)
            account.finish -= unused if charge.was_admitted else charge.cost
        account.num_requests -= 1
        if account.num_requests == 0:
            self._retire(request.tenant, self._busy.pop(request.tenant))

    def _account(self, tenant: str) -> _Account:
        """Find the tenant's account and bring it up to virtual time."""
        account = self._busy.get(tenant) or self._idle.pop(tenant, None) or _Account()
        self._busy[tenant] = account
        if account.finish <= self._virtual_time:
            account.run += 1
            account.finish = self._virtual_time
        return account

    def _retire(self, tenant: str, account: _Account) -> None:
        """Keep the account of a tenant with nothing at hand only while it changes where the next request starts."""
        if not self._busy:  # nobody is there to be treated unfairly: all begin anew
            self._idle.clear()
        elif account.finish > self._virtual_time:
            self._idle[tenant] = account
            if len(self._idle) > MAX_IDLE_TENANTS:
                # Time moves on to where the forgotten one would have started, so that ever new tenants, who all
                # start at virtual time, cannot hold it still and pass those that wait for ever.
                _, forgotten = self._idle.popitem(last=False)
                self._virtual_time = max(self._virtual_time, forgotten.finish)

    def _weight(self, request: Request) -> float:
        return self._weights.get(request.tenant, 1.0)

    @staticmethod
    def _num_unused(request: Request, num_output_tokens: int) -> int:
        """Output tokens that it may still have after so many."""
        return (request.sampling.max_tokens or num_output_tokens) - num_output_tokens
