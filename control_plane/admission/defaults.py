"""What requests get that do not say otherwise: the model's own defaults, as the operator changed them.

Applied once to each model that is served, so that what GetModel tells is what a request gets.
"""

from dataclasses import replace
from typing import Any, Final

from plugins.errors import InvalidConfig
from plugins.sampling_ranges import RANGES
from plugins.types import ModelInfo, SamplingParams, WorkerInfo

_SWITCHES: Final = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
_WORDS: Final = {"true": True, "false": False}


class DefaultSampling:
    """The operator's word on defaults. Immutable."""

    def __init__(self, overrides: str, uses_model_defaults: bool) -> None:
        """`overrides` are such as `temperature=0.7,top_p=0.9`. Raises: InvalidConfig, as `parse_defaults` does."""
        self._overrides = parse_defaults(overrides)
        self._uses_model_defaults = uses_model_defaults

    def apply(self, worker: WorkerInfo) -> WorkerInfo:
        """Return what is known of a worker, with the defaults that its requests get."""
        own = worker.model.default_sampling if self._uses_model_defaults else SamplingParams()
        model: ModelInfo = replace(worker.model, default_sampling=replace(own, **self._overrides))
        return replace(worker, model=model)


def parse_defaults(text: str) -> dict[str, Any]:
    """Read defaults such as `temperature=0.7,top_p=0.9`.

    Raises: InvalidConfig: names the entry that is none, or whose value is out of its range.
    """
    values: dict[str, Any] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, value = map(str.strip, entry.partition("="))
        if name in values:
            raise InvalidConfig(f"admission.default_sampling names {name} twice")
        values[name] = _parse(entry, name, value)
    max_tokens = values.get("max_tokens")
    if max_tokens is not None and values.get("min_tokens", 0) > max_tokens:
        raise InvalidConfig(
            f"admission.default_sampling: min_tokens is {values['min_tokens']}; must be in [0, {max_tokens}], "
            "which is max_tokens"
        )
    return values


def _parse(entry: str, name: str, value: str) -> Any:
    if name in _SWITCHES:
        if value.lower() not in _WORDS:
            raise InvalidConfig(f"admission.default_sampling: {name} must be true or false, is {value!r}")
        return _WORDS[value.lower()]
    if name not in RANGES:
        known = ", ".join((*RANGES, *_SWITCHES))
        raise InvalidConfig(f"admission.default_sampling must be name=value with one of {known}; is {entry!r}")
    try:
        number = int(value) if RANGES[name].is_whole else float(value)
    except ValueError as error:
        kind = "a whole number" if RANGES[name].is_whole else "a number"
        raise InvalidConfig(f"admission.default_sampling: {name} must be {kind}, is {value!r}") from error
    fault = RANGES[name].fault(number)
    if fault is not None:
        raise InvalidConfig(f"admission.default_sampling: {name} {fault[1]}")
    return number
