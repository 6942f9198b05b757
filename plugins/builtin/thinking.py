"""Bounds how long a model thinks: after so many tokens the section is closed for it.

Forcing the end of thinking is the budget forcing of Muennighoff et al., "s1: Simple test-time scaling",
arXiv 2501.19393, section 3.1.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from plugins.builtin.arguments import token_ids, truth, whole_number
from plugins.builtin.history import NO_TOKEN, longest_output, output_history
from plugins.builtin.staged_rows import Number, StagedRows, write_back
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

MAX_MARK = 16  # tokens that open or close a section
MAX_BUDGET = 2**31 - 1
NO_COLUMN = -2  # where nothing was found; -1 is just before the first column
_MARK: Mapping[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
    "maxItems": MAX_MARK,
}


class ThinkingBudget(LogitsProcessor):
    """Forces the tokens that close a section once it has had `thinking_budget` tokens; nothing else can be chosen then.

    What has begun to close is closed, and what closes itself is left alone. Each section has a budget of its own. A
    token that other stages have ruled out is not forced: the row is left as it is until it can be. All follows from
    the output so far. The configuration's section says what opens and closes, {"start": [ids], "end": [ids]}; a request
    may say otherwise.
    """

    name: ClassVar[str] = "thinking_budget"
    extra_arg_names: ClassVar[Sequence[str] | None] = (
        "thinking_budget",
        "thinking_end",
        "thinking_open",
        "thinking_start",
    )
    parameter_schema: ClassVar[Mapping[str, Any] | None] = {
        "type": "object",
        "properties": {
            "thinking_budget": {
                "type": "integer",
                "minimum": 0,
                "maximum": MAX_BUDGET,
                "description": "tokens that a section may have",
                "examples": [3, 0],
            },
            "thinking_end": {**_MARK, "description": "the tokens that close a section", "examples": [[7, 8]]},
            "thinking_open": {
                "type": "boolean",
                "default": False,
                "description": "the prompt has opened a section",
                "examples": [True],
            },
            "thinking_start": {**_MARK, "description": "the tokens that open a section", "examples": [[5, 6]]},
        },
        "dependentRequired": {
            name: ["thinking_budget"] for name in ("thinking_end", "thinking_open", "thinking_start")
        },
    }

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        """Raises: ValueError: the section does not say what opens and what closes, or not in this vocabulary."""
        section = config.section
        unknown = sorted(section.keys() - {"start", "end"})
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is no key of {self.name}'s section; start and end are")
        start, end = token_ids(section, "start", MAX_MARK), token_ids(section, "end", MAX_MARK)
        if start is None or end is None:
            raise ValueError(
                "it must know the tokens that open and close a section: set "
                f'{{"{self.name}": {{"start": [ids], "end": [ids]}}}} in plugins.logits_processor_config'
            )
        if max(*start, *end) >= config.vocab_size:
            raise ValueError(
                f"its section has token {max(*start, *end)}, and this model has ids below {config.vocab_size}"
            )
        _require_apart("end", end, "start", start)
        self._start, self._end = start, end
        self._states = req_states
        no_mark = [NO_TOKEN] * MAX_MARK
        columns: dict[str, Number | Sequence[Number]] = {
            "budget": 0,
            "is_open": 0,
            "num_start": 0,
            "num_end": 1,
            "start": no_mark,
            "end": no_mark,
        }
        self._asked = StagedRows(req_states, columns)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        args = sampling_params.extra_args
        start, end = token_ids(args, "thinking_start", MAX_MARK), token_ids(args, "thinking_end", MAX_MARK)
        truth(args, "thinking_open")
        if "thinking_budget" in args:
            whole_number(args, "thinking_budget", 0, 0, MAX_BUDGET)
            _require_apart("thinking_end", end, "thinking_start", start)
        elif cls.extra_arg_names is not None and not args.keys().isdisjoint(cls.extra_arg_names):
            raise ValueError("what opens and closes a section says nothing without thinking_budget")

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        """Declines marks that this model has no tokens for: such a section is never there, or never ends."""
        args = sampling_params.extra_args
        self._asked.decline(req_idx)
        if "thinking_budget" not in args:
            return False
        start = token_ids(args, "thinking_start", MAX_MARK) or self._start
        end = token_ids(args, "thinking_end", MAX_MARK) or self._end
        if max(*start, *end) >= self._states.vocab_size:
            return False
        self._asked.accept(
            req_idx,
            budget=whole_number(args, "thinking_budget", 0, 0, MAX_BUDGET),
            is_open=int(truth(args, "thinking_open")),
            num_start=len(start),
            num_end=len(end),
            start=(*[NO_TOKEN] * (MAX_MARK - len(start)), *start),  # at the right, as it is compared
            end=(*[NO_TOKEN] * (MAX_MARK - len(end)), *end),
        )
        return True

    def apply_staged_writes(self) -> None:
        self._asked.flush()

    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        import torch

        chosen = self._asked.choose(ctx)
        if chosen is None:
            return logits
        asked = {name: self._asked.column(name, chosen) for name in ("budget", "is_open", "num_start", "num_end")}
        start_KM, end_KM = self._asked.column("start", chosen), self._asked.column("end", chosen)
        max_mark = max(self._asked.largest("num_start", ctx), self._asked.largest("num_end", ctx))
        width = longest_output(self._states, ctx) + max_mark - 1
        history_KW = output_history(self._states, ctx, chosen, width)
        opened_K = _opened_at(history_KW, start_KM[:, -max_mark:], end_KM[:, -max_mark:], asked)
        num_used_K = width - 1 - opened_K
        num_closing_K = _num_closing(history_KW, end_KM[:, -max_mark:], asked["num_end"], num_used_K)
        forced_K = end_KM.gather(1, (MAX_MARK - asked["num_end"] + num_closing_K)[:, None]).clamp(min=0).squeeze(1)

        is_over_K = (opened_K != NO_COLUMN) & (num_used_K >= asked["budget"])
        is_forced_K = is_over_K & (logits[chosen.rows, forced_K] > float("-inf"))

        forced_R1 = torch.zeros((len(logits), 1), dtype=torch.int64, device=logits.device)
        forced_R1[chosen.rows] = forced_K[:, None]
        chosen = chosen.only(is_forced_K)
        forced_K1 = forced_R1[chosen.rows]
        scores_KV = logits[chosen.rows]
        closed_KV = torch.full_like(scores_KV, float("-inf")).scatter_(1, forced_K1, scores_KV.gather(1, forced_K1))
        return write_back(logits, closed_KV, chosen)


def _require_apart(end_name: str, end: Sequence[int] | None, start_name: str, start: Sequence[int] | None) -> None:
    """Raises: ValueError: what opens a section closes it."""
    if start and end and any(start[at : at + len(end)] == end for at in range(len(start))):
        raise ValueError(f"{start_name} has {end_name} in it: a section would be closed when it opens")


def _opened_at(history_KW: "Tensor", start_KM: "Tensor", end_KM: "Tensor", asked: Mapping[str, "Tensor"]) -> "Tensor":
    """Return the last column of what opened the section that is open now: [K], or NO_COLUMN.

    That is the first start after the last end; the output's beginning counts as one where the prompt opened it. An
    end may share its first tokens with the start's last ones, as in <think>, newline, </think>.
    """
    import torch

    width = history_KW.shape[1]
    columns_W = torch.arange(width, device=history_KW.device)
    ends_KW = _occurrences(history_KW, end_KM, asked["num_end"])
    last_end_K = torch.where(ends_KW, columns_W, NO_COLUMN).amax(dim=1)
    starts_KW = _occurrences(history_KW, start_KM, asked["num_start"])
    starts_KW &= columns_W - asked["num_start"][:, None] >= last_end_K[:, None]
    first_start_K = torch.where(starts_KW, columns_W, width).amin(dim=1)
    before_output_K = width - 1 - (history_KW != NO_TOKEN).sum(dim=1)
    is_still_open_K = (asked["is_open"] == 1) & (last_end_K == NO_COLUMN)
    opened_K = torch.where(is_still_open_K, before_output_K, first_start_K)
    return opened_K.masked_fill(opened_K == width, NO_COLUMN)


def _occurrences(history_KW: "Tensor", mark_KM: "Tensor", length_K: "Tensor") -> "Tensor":
    """Say in which columns a mark ends: [K, W] bool.

    Marks stand at the right of their M columns; an empty one is nowhere. Before the first column stands nothing.
    """
    import torch

    num_places = mark_KM.shape[1]
    padded = torch.nn.functional.pad(history_KW, (num_places - 1, 0), value=NO_TOKEN)
    place_M = torch.arange(num_places, device=history_KW.device)
    is_outside_KM = place_M < num_places - length_K[:, None]
    is_equal_KWM = padded.unfold(1, num_places, 1) == mark_KM[:, None]
    return (is_equal_KWM | is_outside_KM[:, None]).all(dim=2) & (length_K > 0)[:, None]


def _num_closing(history_KW: "Tensor", end_KM: "Tensor", num_end_K: "Tensor", num_used_K: "Tensor") -> "Tensor":
    """Return how many tokens of its end a section has said already: [K], fewer than the end has."""
    import torch

    num_places = end_KM.shape[1]
    closing_K = torch.zeros_like(num_end_K)
    place_M = torch.arange(num_places, device=history_KW.device)
    for num_said in range(1, num_places):
        # The end's first `num_said` tokens, for each row where its own end begins.
        first = (num_places - num_end_K[:, None] + place_M[:num_said]).clamp(max=num_places - 1)
        is_said_K = (history_KW[:, -num_said:] == end_KM.gather(1, first)).all(dim=1)
        is_said_K &= (num_said < num_end_K) & (num_said <= num_used_K)
        closing_K = torch.where(is_said_K, num_said, closing_K)
    return closing_K
