"""What a caller is told of its prompt: the prompt itself with `echo`, and the log-probabilities of its tokens.

Cuts both into pieces that a message can hold; when they are sent is the business of `responses.py`.
"""

from collections.abc import Sequence
from typing import Final

from control_plane.admission.submission import Admitted
from plugins.types import TokenLogprobs
from protos.inference.v1 import inference_pb2
from protos.inference.v1.inference_pb2 import PromptPart

MAX_PLACES: Final = 256  # of a sequence whose log-probabilities are told in one message
MAX_ENTRIES: Final = 65_536  # of all these places; 0.7 MiB, far from the limit of any client
MAX_ECHO_TOKENS: Final = 65_536  # of one message
MAX_ECHO_CHARACTERS: Final = 65_536


class PromptParts:
    """The parts of one prompt, in order. Owned by the task that serves the request."""

    def __init__(self, echo: Sequence[PromptPart]) -> None:
        self._echo = echo  # empty if it was not asked for
        self._next_place = 1  # the first one whose log-probabilities were not told yet

    def take(self, places: Sequence[TokenLogprobs]) -> list[PromptPart]:
        """Return what there is to send now: the echo if it was not sent, and the next places."""
        parts, self._echo = list(self._echo), ()
        for piece in cut_places(places):
            parts.append(PromptPart(start=self._next_place, logprobs=map(encode_place, piece)))
            self._next_place += len(piece)
        return parts


def echo_parts(admitted: Admitted) -> list[PromptPart]:
    """Make parts of a prompt and its text, if that is told; joined, they are the whole of it. May take long."""
    token_ids, sampling = admitted.requests[0].prompt_token_ids, admitted.requests[0].sampling
    text = admitted.model.text.decode(token_ids, sampling.skip_special_tokens) if sampling.detokenize else ""
    num_parts = max(-(-len(token_ids) // MAX_ECHO_TOKENS), -(-len(text) // MAX_ECHO_CHARACTERS))
    return [
        PromptPart(
            token_ids=token_ids[index * MAX_ECHO_TOKENS : (index + 1) * MAX_ECHO_TOKENS],
            text=text[index * MAX_ECHO_CHARACTERS : (index + 1) * MAX_ECHO_CHARACTERS],
        )
        for index in range(num_parts)
    ]


def cut_places(places: Sequence[TokenLogprobs]) -> list[Sequence[TokenLogprobs]]:
    """Cut what is told of some places into what one message may hold; all places have about as many entries."""
    if not places:
        return []
    size = max(1, min(MAX_PLACES, MAX_ENTRIES // len(places[0].token_ids)))
    return [places[start : start + size] for start in range(0, len(places), size)]


def encode_place(place: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    """Write what is told of one place."""
    return inference_pb2.TokenLogprobs(token_ids=place.token_ids, logprobs=place.logprobs, ranks=place.ranks)
