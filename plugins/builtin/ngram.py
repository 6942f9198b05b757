"""Ends repetition: no n-gram that the output already has is completed a second time.

What stops is what decoding without end repeats: see Paulus, Xiong and Socher, "A deep reinforced model for abstractive
summarization", ICLR 2018, section 2.5, where it is done in beam search with trigrams.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from plugins.builtin.arguments import whole_number
from plugins.builtin.history import NO_TOKEN, longest_output, output_history
from plugins.builtin.staged_rows import Chosen, StagedRows
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

MIN_SIZE, MAX_SIZE = 2, 16
DEFAULT_WINDOW, MAX_WINDOW = 512, 4096


class NgramRepetitionBreaker(LogitsProcessor):
    """Gives -inf to each token that would complete an n-gram of the last tokens of the output again.

    The prompt does not count, drafts do. A row in which nothing else could be chosen is left as it is.
    """

    name: ClassVar[str] = "ngram_repetition"
    extra_arg_names: ClassVar[Sequence[str] | None] = ("no_repeat_ngram_size", "no_repeat_window")
    parameter_schema: ClassVar[Mapping[str, Any] | None] = {
        "type": "object",
        "properties": {
            "no_repeat_ngram_size": {
                "type": "integer",
                "minimum": MIN_SIZE,
                "maximum": MAX_SIZE,
                "description": "no run of so many tokens comes twice in the output",
                "examples": [2, 4],
            },
            "no_repeat_window": {
                "type": "integer",
                "minimum": MIN_SIZE,
                "maximum": MAX_WINDOW,
                "default": DEFAULT_WINDOW,
                "description": "how many of the last tokens of the output are looked at",
                "examples": [6],
            },
        },
        "dependentRequired": {"no_repeat_window": ["no_repeat_ngram_size"]},
    }

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        self._states = req_states
        self._asked = StagedRows(req_states, {"size": MIN_SIZE, "window": DEFAULT_WINDOW})

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _read(sampling_params)

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        asked = _read(sampling_params)
        if asked is None:
            self._asked.decline(req_idx)
            return False
        self._asked.accept(req_idx, size=asked[0], window=asked[1])
        return True

    def apply_staged_writes(self) -> None:
        self._asked.flush()

    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        chosen = self._asked.choose(ctx)
        if chosen is None:
            return logits
        max_size = self._asked.largest("size", ctx)
        max_window = min(self._asked.largest("window", ctx), longest_output(self._states, ctx))
        size_K1 = self._asked.column("size", chosen)[:, None]
        window_K1 = self._asked.column("window", chosen)[:, None]
        # As many columns more than the window as an n-gram has neighbours, so that one may end in its first column.
        history = output_history(self._states, ctx, chosen, max_window + max_size - 1)
        ids_KL, is_repeated_KL = _completions(history, size_K1, window_K1, max_size)
        return _ruled_out(logits, ids_KL, is_repeated_KL, chosen)


def _read(sampling_params: SamplingParams) -> tuple[int, int] | None:
    """Return size and window; None if the request asks for nothing. Raises: ValueError."""
    args = sampling_params.extra_args
    window = whole_number(args, "no_repeat_window", DEFAULT_WINDOW, MIN_SIZE, MAX_WINDOW)
    if "no_repeat_ngram_size" not in args:
        if "no_repeat_window" in args:
            raise ValueError("no_repeat_window says nothing without no_repeat_ngram_size")
        return None
    return whole_number(args, "no_repeat_ngram_size", 0, MIN_SIZE, MAX_SIZE), window


def _completions(
    history_KW: "Tensor", size_K1: "Tensor", window_K1: "Tensor", max_size: int
) -> tuple["Tensor", "Tensor"]:
    """Return the last token of every n-gram that is there, [K, L], and whether it would complete it again now, [K, L].

    Shapes: K = rows, W = columns of history, L of which may end an n-gram: the last `size` columns of each run of
    `max_size`. A token is 0 where it completes nothing.
    """
    import torch

    width = history_KW.shape[1]
    steps_back = torch.arange(width, 0, -1, device=history_KW.device)
    history_KW = history_KW.masked_fill(steps_back > window_K1, NO_TOKEN)
    runs_KLM = history_KW.unfold(1, max_size, 1)
    tail_KM = history_KW[:, width - max_size + 1 :]  # what the next token would be the last one of
    place_M = torch.arange(max_size - 1, device=history_KW.device)
    is_outside_KM = place_M < max_size - size_K1
    is_equal_KLM = (runs_KLM[..., :-1] == tail_KM[:, None]) & (tail_KM[:, None] != NO_TOKEN)
    last_KL = runs_KLM[..., -1]
    is_repeated_KL = (is_equal_KLM | is_outside_KM[:, None]).all(dim=2) & (last_KL != NO_TOKEN)
    return torch.where(is_repeated_KL, last_KL, 0), is_repeated_KL


def _ruled_out(logits: "Tensor", ids_KL: "Tensor", is_repeated_KL: "Tensor", chosen: Chosen) -> "Tensor":
    """Give -inf to the repeated tokens of the chosen rows, in place, unless nothing else is left in a row.

    Touches few scores: a pass over the whole vocabulary of each row costs more than all the rest.
    """
    import torch

    infinity = float("inf")
    if chosen.is_wanted is not None:
        is_repeated_KL = is_repeated_KL & chosen.is_wanted[:, None]
    ids_RL = torch.zeros((len(logits), ids_KL.shape[1]), dtype=torch.int64, device=logits.device)
    ids_RL[chosen.rows] = ids_KL
    is_repeated_RL = torch.zeros_like(ids_RL, dtype=torch.bool)
    is_repeated_RL[chosen.rows] = is_repeated_KL
    before_RL = logits.gather(1, ids_RL)
    logits.scatter_reduce_(1, ids_RL, torch.where(is_repeated_RL, -infinity, infinity).to(logits.dtype), "amin")
    is_empty_R1 = logits.amax(dim=1, keepdim=True) == -infinity
    logits.scatter_reduce_(1, ids_RL, before_RL.masked_fill(~(is_repeated_RL & is_empty_R1), -infinity), "amax")
    return logits
