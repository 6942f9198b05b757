"""The model families that the worker computes, by the architecture that a checkpoint names."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from gpu_worker.attention.groups import AttentionShape
from gpu_worker.kv.cache import KVCache
from gpu_worker.models.llama import Llama
from gpu_worker.ops import Ops
from gpu_worker.runner.inputs import StepInputs
from plugins.errors import InvalidConfig
from plugins.model_loader import ModelConfig


class Model(Protocol):
    """A decoder made of ops."""

    def forward(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Compute one step. Returns what the head reads of each token: [T, E] float32."""

    def head(self, x_RE: Tensor) -> Tensor:
        """Return the scores of the next token behind some rows of `forward`: [R, V] float32, the caller's own."""


MODELS: Mapping[str, Callable[[ModelConfig, Ops, AttentionShape], Model]] = {
    "LlamaForCausalLM": Llama,
}


def build_model(config: ModelConfig, ops: Ops, shape: AttentionShape) -> Model:
    """Build a model of the architecture that the checkpoint names; its weights are loaded into `ops` afterwards.

    Raises: InvalidConfig: the architecture is unknown; the message lists the known ones.
    """
    if config.architecture not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise InvalidConfig(f"architecture {config.architecture!r} cannot be computed here; known: {known}")
    return MODELS[config.architecture](config, ops, shape)
