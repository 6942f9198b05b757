"""The logits-processor hook: change the scores of the next token, once for the whole batch of a step.

Gives the interface and the values it is called with; order and isolation are the business of
`gpu_worker/sampling/processors.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from plugins.types import Row, SamplingParams, TokenId

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, device


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorConfig:
    """What a processor may know of the worker that it serves."""

    model: str
    dtype: str  # of weights and activations; logits are float32 whatever it says
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    max_num_reqs: int  # rows: req_idx is in [0, max_num_reqs)
    eos_token_ids: Sequence[TokenId]
    device: str
    section: Mapping[str, Any] = field(default_factory=dict)  # its own part of plugins.logits_processor_config


class RequestStates(Protocol):
    """The worker's tables, read-only for processors. N = max_num_reqs; columns are indexed by req_idx.

    Between `add_request` and `apply_staged_writes` a new row is not yet written; afterwards it is.
    """

    @property
    def device(self) -> "device": ...

    @property
    def max_num_reqs(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def all_token_ids(self) -> "Tensor":
        """[N, max_model_len] int32: prompt, then output; valid up to total_len."""

    @property
    def prompt_len(self) -> "Tensor":
        """[N] int32."""

    @property
    def prefill_len(self) -> "Tensor":
        """[N] int32: tokens known when the row was admitted; above prompt_len after a preemption."""

    @property
    def total_len(self) -> "Tensor":
        """[N] int32: tokens known now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsContext:
    """Which row of the logits belongs to whom. R = rows of logits in this step, S = sequences that sample.

    Rows are in a new order every step: find yours through `expanded_idx_mapping`. The rows of one request lie side by
    side, in the order of its drafts: the first stands behind the committed tokens, each further one behind one more
    draft, which is its `input_ids`.
    """

    expanded_idx_mapping: "Tensor"  # [R] int64: req_idx of each row of logits
    expanded_local_pos: "Tensor"  # [R] int64: the row's place among the rows of its request; 0 without drafts
    idx_mapping: "Tensor"  # [S] int64: req_idx of each sequence that samples
    idx_mapping_np: "np.ndarray"  # the same on the host, for decisions that must not wait for the device
    input_ids: "Tensor"  # [R] int64: the token fed at each row
    pos: "Tensor"  # [R] int64: its position in the sequence
    seq_lens_upper_bound_np: "np.ndarray"  # [S] int64, on the host: at least the length of each sequence


def own_copy(sampling_params: SamplingParams) -> SamplingParams:
    """Return what one processor is shown of a request: whatever it writes there, nobody else sees."""
    if not (sampling_params.extra_args or sampling_params.logit_bias):
        return sampling_params  # all else cannot be written to
    return replace(
        sampling_params,
        extra_args=_copied(sampling_params.extra_args),
        logit_bias=dict(sampling_params.logit_bias),
    )


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


class LogitsProcessor(ABC):
    """One way to change logits. One instance per worker; its device thread alone calls the instance.

    The class attributes are declarations; all may be left as they are. What a class declares is published, and checked
    at admission: a request whose arguments break the schema, or which no processor claims, is refused there.

    A row's life: `add_request` takes it, `apply` sees it each step in which it samples, and the next
    `add_request` with the same req_idx ends it. Nothing tells that a row was released: overwrite all that
    the previous occupant left. After a preemption the same request comes back by `add_request`, with its
    output so far in `req_states`: rebuild from there what you count.

    What is raised fails the rows concerned and no others: from `add_request` the row that was offered, from the other
    two every row that was accepted, of this step or of all. Of what goes wrong in `apply` nothing remains: the scores
    are as they were before, and processors behind this one go on with them.

    The module must be importable without torch, because admission calls `validate_params` in a process
    that has none: import torch inside the methods that need it.
    """

    name: ClassVar[str] = ""  # what its configuration and its errors call it; empty: as it was named, or its place
    extra_arg_names: ClassVar[Sequence[str] | None] = None  # all that it reads of extra_args; None: maybe anything
    parameter_schema: ClassVar[Mapping[str, Any] | None] = None  # JSON schema of an object with those; None: of none

    @abstractmethod
    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        """Allocate what the rows need. `req_states` stays valid and up to date. What is raised stops the start."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check one request at admission, after its schema, in a process without torch. Any thread may call it.

        Every request comes here, also one that gives no arguments. Whatever else is raised fails that request alone.
        Raises: ValueError: the request is refused, and the message goes to its caller.
        """
        return None

    @abstractmethod
    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        """Take a row. Return True if this request's logits will be changed; False declines the row."""

    @abstractmethod
    def apply_staged_writes(self) -> None:
        """Bring state to the device. Called every step, after `req_states` is written, before the forward.

        Called once more for each further token of a step that repeats itself, and also when no row is accepted.
        """

    @abstractmethod
    def apply(self, logits: "Tensor", ctx: LogitsContext) -> "Tensor":
        """Change logits [R, vocab_size] float32, in place or into a new tensor of that shape; return the result.

        Called once a step if any row of the batch was accepted; rows that you declined are in it: leave them. A score
        of -inf is of a token that may not be chosen: leave it so. Keep no reference to what was given or returned.
        """
