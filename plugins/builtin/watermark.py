"""Marks text so that who has the key can tell it from other text; `watermark_detector.py` tells.

The soft watermark of Kirchenbauer, Geiping, Wen, Katz, Miers and Goldstein, "A watermark for large language models",
ICML 2023, arXiv 2301.10226, algorithm 2, with one token of context. A token is green if its hash is small, so that a
row's green tokens are a share `watermark_gamma` of the vocabulary on average, not exactly.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from plugins.builtin.arguments import number, truth
from plugins.builtin.green_list import green_tokens, key_of, threshold_of
from plugins.builtin.staged_rows import StagedRows, write_back
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import Row, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_GAMMA, MIN_GAMMA, MAX_GAMMA = 0.25, 0.1, 0.9
DEFAULT_DELTA, MAX_DELTA = 2.0, 10.0


class Watermark(LogitsProcessor):
    """Adds `watermark_delta` to the scores of the tokens that are green after the row's last token.

    The key is the configuration's, {"key": "a secret"}; requests neither give nor see it.
    """

    name: ClassVar[str] = "watermark"
    extra_arg_names: ClassVar[Sequence[str] | None] = ("watermark", "watermark_delta", "watermark_gamma")
    parameter_schema: ClassVar[Mapping[str, Any] | None] = {
        "type": "object",
        "properties": {
            "watermark": {"type": "boolean", "description": "mark this output", "examples": [True]},
            "watermark_delta": {
                "type": "number",
                "minimum": 0,
                "maximum": MAX_DELTA,
                "default": DEFAULT_DELTA,
                "description": "what is added to the scores of green tokens",
                "examples": [1.5],
            },
            "watermark_gamma": {
                "type": "number",
                "minimum": MIN_GAMMA,
                "maximum": MAX_GAMMA,
                "default": DEFAULT_GAMMA,
                "description": "the share of the vocabulary that is green",
                "examples": [0.5],
            },
        },
        "dependentRequired": {"watermark_delta": ["watermark"], "watermark_gamma": ["watermark"]},
    }

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        """Raises: ValueError: the section has no key, or one that is no text or empty; the message does not show it."""
        unknown = sorted(config.section.keys() - {"key"})
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is no key of {self.name}'s section; key is")
        secret = config.section.get("key")
        if not (isinstance(secret, str) and secret):
            raise ValueError(
                "it must have a key to mark with, a text that is not empty: set "
                f'{{"{self.name}": {{"key": "a secret"}}}} in plugins.logits_processor_config'
            )
        self._key = key_of(secret)
        self._vocab_size = req_states.vocab_size
        self._asked = StagedRows(req_states, {"delta": 0.0, "threshold": 0})

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _read(sampling_params)

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self._asked.decline(req_idx)
        asked = _read(sampling_params)
        if asked is None:
            return False
        gamma, delta = asked
        self._asked.accept(req_idx, threshold=threshold_of(gamma), delta=delta)
        return True

    def apply_staged_writes(self) -> None:
        self._asked.flush()

    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        chosen = self._asked.choose(ctx)
        if chosen is None:
            return logits
        previous_K = ctx.input_ids[chosen.rows]
        is_green_KV = green_tokens(self._key, previous_K, self._asked.column("threshold", chosen), self._vocab_size)
        bonus_KV = is_green_KV * self._asked.column("delta", chosen)[:, None]
        return write_back(logits, logits[chosen.rows].add_(bonus_KV), chosen)


def _read(sampling_params: SamplingParams) -> tuple[float, float] | None:
    """Return gamma and delta; None if the request asks for no mark. Raises: ValueError."""
    args = sampling_params.extra_args
    gamma = number(args, "watermark_gamma", DEFAULT_GAMMA, MIN_GAMMA, MAX_GAMMA)
    delta = number(args, "watermark_delta", DEFAULT_DELTA, 0.0, MAX_DELTA)
    if "watermark" not in args and not args.keys().isdisjoint(("watermark_gamma", "watermark_delta")):
        raise ValueError("watermark_gamma and watermark_delta say nothing without watermark")
    return (gamma, delta) if truth(args, "watermark") and delta > 0 else None
