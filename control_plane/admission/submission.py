"""What a caller asks for, before anything about it has been checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from plugins.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as it was given. Exactly one of text, token_ids and messages is to be set."""

    request_id: str = ""  # "": admission draws one
    model: str = ""  # "": the only one
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[tuple[str, str]] | None = None  # (role, content)
    sampling: SamplingParams = SamplingParams()  # unset fields have their defaults
    priority: int = 0  # lower goes first
    cache_salt: str = ""  # "": computed prompts are shared with all others that give none
    tenant: str = ""  # on whose account it runs; "" is everybody who gave no name
