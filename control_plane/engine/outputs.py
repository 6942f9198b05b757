"""What a step of the engine comes to: plans for workers, deliveries for readers, and what became of workers."""

from dataclasses import dataclass
from typing import NamedTuple

from plugins.errors import ServingError
from plugins.kv_events import KvEvent
from plugins.types import FinishReason, RequestId, StepPlan, TokenId, TokenLogprobs, WorkerId


class Delivery(NamedTuple):
    """What happened to one request in this step. The one with `finish` is the last of its request.

    One is made for each token: a frozen dataclass of seven fields takes more than twice as long to make.
    """

    request_id: RequestId
    token_ids: tuple[TokenId, ...] = ()
    finish: FinishReason | None = None
    error: ServingError | None = None  # set when the end is not STOP or LENGTH
    num_cached_tokens: int = 0  # prompt tokens that needed no computing, once known
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # one per token; empty: nobody asked
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # the next places of the prompt, from place 1 on


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step asks of its driver: hand the plans out in order, bring the deliveries to their readers."""

    plans: tuple[tuple[WorkerId, StepPlan], ...]
    deliveries: tuple[Delivery, ...]
    lost: tuple[tuple[WorkerId, ServingError], ...] = ()  # workers that are detached by now: close their handles
    kv_events: tuple[tuple[WorkerId, KvEvent], ...] = ()
