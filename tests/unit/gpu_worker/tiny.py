"""A model small enough to run in a millisecond, whose weights come from a formula, and what it must say.

OUTPUTS and the log-probabilities are transformers' answers; `tests/golden/test_tiny.py` asks it again.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_worker.config import WorkerConfig
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.factory import LoadedModel, build_runner, load_model
from gpu_worker.loading.checkpoint import expected_tensors
from gpu_worker.runner.model_runner import ModelRunner
from plugins.model_loader import ModelConfig, ModelLoader
from plugins.types import (
    Admission,
    BlockId,
    Chunk,
    RequestId,
    Row,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenId,
    TokenizerBundle,
)

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    dtype="float32",
    eos_token_ids=(TokenId(2),),
)
BROKEN_TOKEN = 95  # its embedding is NaN in a TinyLoader(is_broken=True)
PROMPTS = (
    (5, 17, 9, 60, 33, 12, 8, 71, 44, 3, 29),
    (11, 80),
    (7, 7, 7, 90, 21, 54),
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17),
)
OUTPUTS = (
    (69, 77, 28, 50, 64, 68, 78, 31),
    (68, 69, 76, 76, 76, 40, 94, 36),
    (49, 12, 94, 94, 70, 94, 94, 94),
    (68, 28, 35, 69, 88, 30, 50, 75),
)
# Of PROMPTS[0]: the token at each place from 1 on and the two likeliest ones, their log-probabilities, their ranks.
PROMPT_LOGPROBS = (
    ((17, 94, 31), (-3.0261, -1.708, -2.441), (5, 1, 2)),
    ((9, 48, 46), (-5.9883, -1.3615, -2.8662), (61, 1, 2)),
    ((60, 88, 15), (-5.6278, -1.9414, -2.8569), (48, 1, 2)),
    ((33, 43, 88), (-5.5326, -2.3488, -2.6356), (53, 1, 2)),
    ((12, 2, 61), (-6.0615, -2.4809, -2.5955), (61, 1, 2)),
    ((8, 49, 0), (-7.6961, -1.7736, -2.2676), (79, 1, 2)),
    ((71, 41, 44), (-5.7009, -2.4056, -2.4909), (60, 1, 2)),
    ((44, 71, 88), (-6.1385, -1.6942, -2.5032), (56, 1, 2)),
    ((3, 88, 43), (-6.728, -1.5423, -2.6751), (71, 1, 2)),
    ((29, 28, 11), (-6.0706, -1.4933, -1.5088), (52, 1, 2)),
)
FIRST_TOKEN_LOGPROBS = ((69, 69, 15, 91), (-2.0833, -2.0833, -2.9658, -3.0945), (1, 1, 2, 3))  # and the three likeliest
CONFIG = WorkerConfig(
    dtype="float32", max_model_len=64, block_size=4, num_blocks=32, max_sequences=4, max_step_tokens=64
)


class TinyLoader(ModelLoader):
    """Weights from sines, large enough that attention decides what the model says."""

    def __init__(
        self, path: Path | None = None, options: Mapping[str, object] | None = None, is_broken: bool = False
    ) -> None:
        self._is_broken = is_broken

    def config(self) -> ModelConfig:
        return TINY

    def tokenizer(self) -> TokenizerBundle:
        raise NotImplementedError("the tiny model has no tokenizer")

    def num_tensors(self) -> int:
        return len(expected_tensors(TINY))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for index, (name, shape) in enumerate(expected_tensors(TINY).items(), start=1):
            count = torch.arange(math.prod(shape), dtype=torch.float64)
            wave = torch.sin(count * (12.9898 + index * 0.37)) * torch.cos(count * count * 0.0173 + index)
            weight = 1 + 0.1 * wave if len(shape) == 1 else wave * 3 / shape[1] ** 0.5
            weight = weight.float().view(shape)
            if self._is_broken and name == "model.embed_tokens.weight":
                weight[BROKEN_TOKEN] = torch.nan
            yield name, weight


@cache
def loaded_model(is_broken: bool = False, dtype: str = "float32") -> LoadedModel:
    loader = TinyLoader(is_broken=is_broken)
    return load_model(replace(CONFIG, dtype=dtype), loader, torch.device("cpu"), lambda phase, done, total: None)


def tiny_runner(is_broken: bool = False, eos_token_id: int = 2, **changes: Any) -> ModelRunner:
    """A runner of its own over the shared weights."""
    config = replace(CONFIG, **changes)
    loaded = loaded_model(is_broken, config.dtype)
    model_config = replace(loaded.config, eos_token_ids=(TokenId(eos_token_id),))
    memory = DeviceMemory(torch.device("cpu"))
    return build_runner(config, replace(loaded, config=model_config, memory=memory)).runner


def admission(
    row: int,
    token_ids: Sequence[int],
    *,
    num_prompt_tokens: int | None = None,
    num_cached_tokens: int = 0,
    blocks: Sequence[int] = (),
    **sampling: Any,
) -> Admission:
    """A greedy sequence whose end-of-sequence tokens are ignored, unless `sampling` says otherwise."""
    params = {"temperature": 0.0, "seed": 0, "ignore_eos": True, "max_tokens": 40} | sampling
    return Admission(
        row=Row(row),
        request_id=RequestId(f"request-{row}"),
        token_ids=tuple(TokenId(token_id) for token_id in token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=SamplingParams(**params),
        block_ids=tuple(BlockId(block) for block in blocks),
        num_cached_tokens=num_cached_tokens,
    )


def chunk(row: int, num_tokens: int, blocks: Sequence[int] = ()) -> Chunk:
    return Chunk(Row(row), num_tokens, tuple(BlockId(block) for block in blocks))


def plan(*chunks: Chunk, admitted: Sequence[Admission] = (), released: Sequence[int] = (), **rest: Any) -> StepPlan:
    """A plan whose seq nobody looks at."""
    rows = tuple(Row(row) for row in released)
    return StepPlan(seq=1, chunks=chunks, admitted=tuple(admitted), released_rows=rows, **rest)


def run(runner: ModelRunner, step: StepPlan) -> StepResult:
    return runner.launch(step).result()


def tokens_of(result: StepResult) -> dict[int, tuple[int, ...]]:
    """What each row produced."""
    tokens: dict[int, tuple[int, ...]] = {}
    start = 0
    for row, count in zip(result.rows, result.counts, strict=True):
        tokens[row] = result.token_ids[start : start + count]
        start += count
    return tokens


def decode(runner: ModelRunner, row: int, num_tokens: int) -> tuple[int, ...]:
    """Decode one row alone, one plan a token; its blocks are there already."""
    return tuple(run(runner, plan(chunk(row, 1))).token_ids[0] for _ in range(num_tokens))
