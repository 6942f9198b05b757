"""A runner of the tiny model whose stages the test brings along."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gpu_worker.attention.groups import AttentionShape
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.factory import LoadedModel
from gpu_worker.kv.cache import KVCache
from gpu_worker.kv.dtypes import Float32
from gpu_worker.runner.model_runner import ModelRunner
from gpu_worker.runner.row_table import RowTable
from gpu_worker.sampling.builtin import builtin_processors
from gpu_worker.sampling.pipeline import Grammars, SamplingPipeline
from gpu_worker.sampling.processors import ProcessorChain
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig
from plugins.types import Row, SamplingLimits, SamplingParams, TokenId
from tests.unit.gpu_worker.tiny import CONFIG, TINY, loaded_model

NUM_BLOCKS, NUM_ROWS, MAX_LEN = 64, 8, 64


class Change(LogitsProcessor):
    """Does to the scores what the test says, for every row."""

    def __init__(self, change: Callable[[torch.Tensor, LogitsContext], None]) -> None:
        self._change = change

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        return True

    def apply_staged_writes(self) -> None:
        return None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        self._change(logits, ctx)
        return logits


def assemble(
    *stages: LogitsProcessor,
    grammars: Grammars | None = None,
    loaded: LoadedModel | None = None,
    vocab_size: int = TINY.vocab_size,
    eos_token_ids: Sequence[int] = (2,),
) -> ModelRunner:
    """A runner with these stages first, then all that are built in."""
    loaded = replace(loaded or loaded_model(), memory=DeviceMemory(torch.device("cpu")))
    eos = tuple(TokenId(token_id) for token_id in eos_token_ids)
    cache = KVCache(
        loaded.memory,
        Float32(),
        num_layers=TINY.num_hidden_layers,
        num_blocks=NUM_BLOCKS,
        block_size=CONFIG.block_size,
        num_kv_heads=TINY.num_key_value_heads,
        head_dim=TINY.head_dim,
    )
    table = RowTable(
        max_sequences=NUM_ROWS,
        max_model_len=MAX_LEN,
        vocab_size=vocab_size,
        num_blocks=NUM_BLOCKS,
        block_size=CONFIG.block_size,
        eos_token_ids=eos,
        device=torch.device("cpu"),
    )
    config = ProcessorConfig(
        model="tiny",
        dtype="float32",
        vocab_size=vocab_size,
        max_model_len=MAX_LEN,
        max_num_reqs=NUM_ROWS,
        eos_token_ids=eos,
        device="cpu",
    )
    builtin = (*stages, *builtin_processors(config, table, SamplingLimits()))
    pipeline = SamplingPipeline(ProcessorChain(builtin, (), NUM_ROWS), grammars)
    shape = AttentionShape.of(TINY, CONFIG.block_size)
    return ModelRunner(loaded.model, cache, table, pipeline, shape, torch.float32, CONFIG.max_step_tokens)
