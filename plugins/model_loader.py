"""The model-loader hook: how a checkpoint becomes a configuration, named weights and a tokenizer.

A loader reads; where weights are kept and how they are packed is the business of `gpu_worker/ops.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plugins.registry import Registry
from plugins.types import SamplingParams, TokenId, TokenizerBundle

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of one decoder-only model, named as Hugging Face's config.json names them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint: bfloat16, float16, float32
    eos_token_ids: tuple[TokenId, ...]


class ModelLoader(ABC):
    """One checkpoint, opened. Lives in the worker, used by its main thread while it starts.

    Every method may raise ModelFileBroken, whose message names the file, the tensor and the numbers.
    """

    @abstractmethod
    def __init__(self, path: Path | None, options: Mapping[str, object]) -> None:
        """`path` is None only for loaders that need no file. Raises InvalidConfig for an unknown option."""

    @abstractmethod
    def config(self) -> ModelConfig:
        """Return the model's numbers. Reads the header, not the weights."""

    @abstractmethod
    def tokenizer(self) -> TokenizerBundle:
        """Return what the control plane needs to turn text into tokens and back."""

    def default_sampling(self) -> SamplingParams:
        """Return how the checkpoint wants its tokens chosen, every number within its range; as ever if it says nothing.

        What a checkpoint says beyond these parameters, or out of their ranges, is left out.
        """
        return SamplingParams()

    @abstractmethod
    def num_tensors(self) -> int:
        """Return how many tensors `weights` will yield, for a progress bar."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, "Tensor"]]:
        """Yield every tensor once, named and laid out as in the Hugging Face checkpoint of the architecture.

        Linear weights are [out, in]; query and key rows are in the order of half-split rotary embeddings.
        The consumer copies what it keeps: a tensor may be a view of a mapped file.
        """


MODEL_LOADERS: Registry[ModelLoader] = Registry("load_format", ModelLoader)  # type: ignore[type-abstract]  # a registry's base may be abstract
register_model_loader = MODEL_LOADERS.register
