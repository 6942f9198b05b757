"""The requests at hand, from the moment they are taken to the moment their end is told.

Knows names, counts and what is to be delivered; where a request runs is the business of `control_plane/engine/core.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.live import Live
from control_plane.engine.outputs import Delivery
from control_plane.engine.quota import Quota
from control_plane.engine.row_book import PlanInFlight
from control_plane.engine.stopping import StopWatcher
from plugins.errors import DuplicateRequest, ServingError, StepFailed
from plugins.types import FinishReason, GenerationId, Request, RequestId, StepResult


class Ledger:
    """Requests that were taken and have not ended, and what was not told of them yet. Owned by the engine core.

    Invariant: every request that `enter` took gets exactly one delivery with `finish`, and none after it. Its name is
    taken until then, and that of the first output of a request until it was told of the last one.
    """

    def __init__(self, limits: AdmissionConfig) -> None:
        self.quota = Quota(limits)
        self.live: dict[RequestId, Live] = {}  # taken and not ended
        self._ending: set[RequestId] = set()  # ended, and the next step delivers it: the name is not free yet
        self._groups: dict[RequestId, list[Live]] = {}  # outputs of one request that live, if it has several, by first
        self._num_arrivals = 0
        self._deliveries: list[Delivery] = []

    # -- coming -------------------------------------------------------------------------------------------------

    def check(self, requests: Sequence[Request]) -> None:
        """Raises: DuplicateRequest, QueueFull, TenantQuotaExceeded: they cannot all be taken."""
        names: set[RequestId] = set()
        for request in requests:
            request_id = request.request_id
            if any(request_id in taken for taken in (self.live, self._ending, self._groups, names)):
                raise DuplicateRequest(request_id)
            names.add(request_id)
        self.quota.check(*requests)

    def enter(
        self,
        requests: Sequence[Request],
        generation: GenerationId,
        now_s: float,
        watchers: Sequence[StopWatcher | None],
    ) -> list[Live]:
        """Take the outputs of one request, which `check` has let pass. The first one leads."""
        entered: list[Live] = []
        for request, watcher in zip(requests, watchers, strict=True):
            self._num_arrivals += 1
            live = Live(replace(request, arrival=self._num_arrivals, arrival_s=now_s), generation, watcher)
            self.live[request.request_id] = live
            self.quota.enter(request)
            entered.append(live)
        if len(entered) > 1:
            self._groups[requests[0].request_id] = list(entered)
        return entered

    def outputs_of(self, request_id: RequestId) -> list[Live]:
        """Those that live of what a caller names: the first output stands for all that were taken together with it."""
        if request_id in self._groups:
            return list(self._groups[request_id])
        live = self.live.get(request_id)
        return [] if live is None else [live]

    def note_started(self, live: Live, num_cached_tokens: int) -> None:
        """A request has a row, perhaps not for the first time."""
        if not live.has_started:
            live.has_started = True
            live.num_cached_tokens = num_cached_tokens
            self.quota.note_started(live.request)
        if not live.had_turn:
            live.had_turn = True
            for other in self._groups.get(live.request.sibling_of or live.request.request_id, ()):
                other.had_turn = True

    # -- telling ------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """True if there is something to deliver."""
        return bool(self._deliveries)

    def take_deliveries(self) -> tuple[Delivery, ...]:
        """Return what was not told yet, in order; the names of those that ended are free from now on."""
        deliveries, self._deliveries = tuple(self._deliveries), []
        self._ending.clear()
        return deliveries

    def read(self, plan: PlanInFlight, result: StepResult, finished: dict[RequestId, FinishReason]) -> None:
        """Deliver what a result tells of its plan's owners, of whom the scheduler says that these have finished."""
        if result.prompt_logprobs:
            self._read_prompts(plan, result)
        token_ids, logprobs, start = result.token_ids, result.logprobs, 0
        for row, count, finish in zip(result.rows, result.counts, result.finishes, strict=True):
            end = start + count
            if count or finish:
                owner = plan.owners[row]
                request_id = owner.request.request_id
                if self.live.get(request_id) is owner:  # else it ended while this plan was on its way
                    tokens = token_ids[start:end]
                    reason = finished.pop(request_id, None) if finished else None
                    if reason is not None:
                        self._forget(owner)
                    elif not tokens:
                        continue
                    owner.token_ids += tokens
                    owner.num_tokens_here += count
                    if owner.is_suspect and owner.is_settled:
                        owner.clear()
                    told = logprobs[start:end] if logprobs and owner.tells_logprobs else ()
                    self._deliveries.append(Delivery(request_id, tokens, reason, None, owner.num_cached_tokens, told))
            start = end
        for failure in result.failures:
            owner = plan.owners[failure.row]
            if self.live.get(owner.request.request_id) is owner:
                finished.pop(owner.request.request_id, None)
                self.end(owner, FinishReason.FAILED, StepFailed(failure.reason, failure.message))

    def _read_prompts(self, plan: PlanInFlight, result: StepResult) -> None:
        for part in result.prompt_logprobs:
            owner = plan.owners[part.row]
            request_id = owner.request.request_id
            places = part.places[owner.num_prompt_logprobs + 1 - part.start :]  # the others were told before
            if places and owner.tells_prompt and self.live.get(request_id) is owner:
                owner.num_prompt_logprobs += len(places)
                self._deliveries.append(
                    Delivery(request_id, num_cached_tokens=owner.num_cached_tokens, prompt_logprobs=places)
                )

    # -- ending -------------------------------------------------------------------------------------------------

    def end(self, live: Live, reason: FinishReason, error: ServingError | None = None) -> None:
        """End a request, if it has not ended."""
        if self.live.get(live.request.request_id) is live:
            self._forget(live)
            self._deliveries.append(Delivery(live.request.request_id, (), reason, error, live.num_cached_tokens))

    def _forget(self, live: Live) -> None:
        request_id = live.request.request_id
        del self.live[request_id]
        self._ending.add(request_id)
        self.quota.leave(live.request, live.has_started)
        if live.lane is not None:
            live.lane.forget(live)
        if self._groups:
            self._leave_group(live)

    def _leave_group(self, live: Live) -> None:
        for first in filter(None, (live.request.request_id, live.request.sibling_of)):
            group = self._groups.get(first, [])
            if live in group:
                group.remove(live)
                if not group:
                    del self._groups[first]
                    self._ending.add(first)
