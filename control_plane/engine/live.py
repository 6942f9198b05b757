"""One request from submission to its end: where it is, what it has delivered, what it is suspected of."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from control_plane.engine.stopping import StopWatcher
from plugins.types import GenerationId, Request, TokenId

if TYPE_CHECKING:
    from control_plane.engine.lane import Lane

SETTLED_TOKENS: Final = 2  # one that a prompt leads to, and one of a decode: a worker that computed both lives with it


@dataclass(slots=True, eq=False)
class Live:
    """A request that was submitted and has not ended. Owned by the engine core.

    Compared by identity: a name may be used again while plans that name its last use are on their way.
    """

    request: Request
    generation: GenerationId
    watcher: StopWatcher | None = None  # says where the text ends; None: nothing in it does
    lane: "Lane | None" = None  # None: it has no worker
    token_ids: list[TokenId] = field(default_factory=list)  # output as far as it was delivered
    num_tokens_here: int = 0  # those of them that came from the worker that it is on
    num_prompt_logprobs: int = 0  # places of the prompt that were told, from place 1 on
    num_cached_tokens: int = 0  # prompt tokens that needed no computing when it first got a row
    has_started: bool = False  # it had a row
    had_turn: bool = False  # it, or another output of its request, had a row
    is_recovered: bool = False  # its last worker was lost with a plan that named it
    is_suspect: bool = False  # a worker died while it computed this one, perhaps because of it
    blame: float = 0.0  # for deaths of workers since it last settled; one that nobody else can be to blame for counts 1

    @property
    def tells_logprobs(self) -> bool:
        """True if it asked for the log-probabilities of its output."""
        return self.request.sampling.logprobs is not None

    @property
    def tells_prompt(self) -> bool:
        """True if it asked for those of its prompt."""
        return self.request.sampling.prompt_logprobs is not None

    @property
    def is_settled(self) -> bool:
        """True if its worker has computed enough of it to say that it does no harm."""
        return self.num_tokens_here >= SETTLED_TOKENS

    def clear(self) -> None:
        """Its worker has computed enough of it, and lives: it is no suspect any more."""
        self.is_suspect = False
        self.blame = 0.0
        if self.lane is not None and self.lane.probe is self:
            self.lane.probe = None

    @property
    def continued(self) -> Request:
        """The request with the output it has, for another scheduler."""
        request = self.request
        return Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            tenant=request.tenant,
            priority=request.priority,
            cache_salt=request.cache_salt,
            sibling_of=request.sibling_of,
            arrival=request.arrival,
            arrival_s=request.arrival_s,
            output_token_ids=tuple(self.token_ids),
        )
