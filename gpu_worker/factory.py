"""Chooses the classes that make up a worker, and builds one.

The composition root of the plane: every class is chosen here, nothing is computed here.
"""

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from gpu_worker.attention.groups import AttentionShape
from gpu_worker.config import WorkerConfig
from gpu_worker.device.dtypes import torch_dtype
from gpu_worker.device.machine import available_bytes
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.kv import dtypes as _built_in_kv_cache_dtypes  # noqa: F401  they register themselves
from gpu_worker.kv.cache import KVCache
from gpu_worker.kv.capacity import Capacity, plan_capacity
from gpu_worker.loading.open import find_model, open_found, read_weights, reading, version_of
from gpu_worker.loading.vocabulary import served_vocab_size
from gpu_worker.models.registry import Model, build_model
from gpu_worker.ops import Ops
from gpu_worker.plugin_list import worker_plugins
from gpu_worker.runner.model_runner import ModelRunner
from gpu_worker.runner.row_table import RowTable
from gpu_worker.sampling.builtin import builtin_processors
from gpu_worker.sampling.grammar_reader import GrammarReader
from gpu_worker.sampling.grammars import GrammarStage
from gpu_worker.sampling.pipeline import SamplingPipeline
from gpu_worker.sampling.processors import ProcessorChain, build_instances
from gpu_worker.worker import Worker
from plugins.kv_cache_dtype import KV_CACHE_DTYPES
from plugins.logits import ProcessorConfig
from plugins.logits_loading import LoadedProcessor
from plugins.metrics import WORKER_KV_BYTES, WORKER_LOAD, Metrics
from plugins.model_loader import ModelConfig, ModelLoader
from plugins.types import ModelInfo, SamplingLimits, TokenizerBundle, WorkerInfo

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # phase, done, total


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights in place."""

    model: Model
    config: ModelConfig
    dtype: torch.dtype
    memory: DeviceMemory
    num_parameters: int
    packed_bytes: int  # of weights that are held a second time, in the layout that multiplies fastest


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner, and what it has room for."""

    runner: ModelRunner
    capacity: Capacity
    kv_cache_dtype: str
    kv_bytes: int
    has_grammars: bool


def build_worker(
    config: WorkerConfig, metrics: Metrics, progress: Progress, processors: Sequence[LoadedProcessor] = ()
) -> Worker:
    """Load the model and return its worker; blocks for seconds. `progress` is told of each tensor.

    `processors` change the scores, in this order.
    Raises: InvalidConfig, ModelNotFound, ModelFileBroken: what is wrong with the configuration or the checkpoint.
    """
    started_s = time.monotonic()
    found = find_model(config)
    loader = open_found(found)
    with reading():
        bundle = loader.tokenizer()  # before the weights, which take longer: what is wrong is told at once
    loaded = load_model(config, loader, torch.device("cpu"), progress)
    vocab_size = served_vocab_size(loaded.config.vocab_size, bundle)
    built = build_runner(config, loaded, found.name, processors, vocab_size, bundle)
    info = WorkerInfo(
        model=ModelInfo(
            name=found.name,
            architecture=loaded.config.architecture,
            dtype=config.dtype,
            vocab_size=vocab_size,
            max_model_len=built.capacity.max_model_len,
            eos_token_ids=loaded.config.eos_token_ids,
            num_parameters=loaded.num_parameters,
            default_sampling=loader.default_sampling(),
        ),
        incarnation=secrets.token_hex(8),
        num_blocks=built.capacity.num_blocks,
        block_size=config.block_size,
        max_sequences=config.max_sequences,
        max_step_tokens=config.max_step_tokens,
        kv_cache_dtype=built.kv_cache_dtype,
        kv_bytes=built.kv_bytes,
        tokenizer_sha256=hashlib.sha256(bundle.tokenizer_json).hexdigest(),
        load_s=time.monotonic() - started_s,
        weights_version=version_of(found),
        plugins=worker_plugins(),
        logits_processors=tuple(each.info.place for each in processors),
        has_grammars=built.has_grammars,
    )
    metrics.set(WORKER_LOAD, info.load_s)
    metrics.set(WORKER_KV_BYTES, info.kv_bytes)
    trained_len = loaded.config.max_position_embeddings
    if config.max_model_len is None and info.model.max_model_len < trained_len:
        logger.warning(
            "model_len_reduced",
            extra={
                "trained_len": trained_len,
                "max_model_len": info.model.max_model_len,
                "limited_by": "worker.kv_cache_gib" if config.num_blocks is None else "worker.num_blocks",
            },
        )
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) - 1)  # of the cores that this process may use
    logger.info(
        "model_loaded",
        extra={
            "model": found.name,
            "architecture": info.model.architecture,
            "dtype": info.model.dtype,
            "num_parameters": info.model.num_parameters,
            "weight_bytes": loaded.memory.num_bytes("weights"),
            "packed_bytes": loaded.packed_bytes,
            "kv_bytes": info.kv_bytes,
            "num_blocks": info.num_blocks,
            "max_model_len": info.model.max_model_len,
            "threads": threads,
            "load_s": round(info.load_s, 2),
        },
    )
    return Worker(built.runner, info, bundle, threads, metrics)


def load_model(config: WorkerConfig, loader: ModelLoader, device: torch.device, progress: Progress) -> LoadedModel:
    """Build the model that the checkpoint describes, for the context that is served, and fill it."""
    with reading():
        model_config, num_tensors = loader.config(), loader.num_tensors()
    dtype = torch_dtype(config.dtype)
    served = replace(model_config, max_position_embeddings=_fit(config, model_config).max_model_len)
    memory = DeviceMemory(device)
    ops = Ops(memory, dtype)
    model = build_model(served, ops, AttentionShape.of(model_config, config.block_size))
    for num_done, (name, tensor) in enumerate(read_weights(loader), start=1):
        ops.load(name, tensor)
        progress("load", num_done, num_tensors)
    ops.finish_loading()
    return LoadedModel(model, model_config, dtype, memory, ops.num_parameters, ops.packed_bytes)


def build_runner(
    config: WorkerConfig,
    loaded: LoadedModel,
    name: str = "",
    processors: Sequence[LoadedProcessor] = (),
    vocab_size: int | None = None,
    bundle: TokenizerBundle | None = None,
) -> BuiltRunner:
    """Give a loaded model a cache and rows, and processors of its scores. No token from `vocab_size` on is sampled.

    With a tokenizer, outputs can be held to grammars.

    Raises: InvalidConfig: a processor cannot be built.
    """
    model, kv_name, capacity = loaded.config, _kv_name(config), _fit(config, loaded.config)
    cache = KVCache(
        loaded.memory,
        KV_CACHE_DTYPES.get(kv_name)(),
        num_layers=model.num_hidden_layers,
        num_blocks=capacity.num_blocks,
        block_size=config.block_size,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
    )
    table = RowTable(
        max_sequences=config.max_sequences,
        max_model_len=capacity.max_model_len,
        vocab_size=vocab_size or model.vocab_size,
        num_blocks=capacity.num_blocks,
        block_size=config.block_size,
        eos_token_ids=model.eos_token_ids,
        device=loaded.memory.device,
    )
    grammars = _grammars(config, model, table, bundle)
    runner = ModelRunner(
        loaded.model,
        cache,
        table,
        SamplingPipeline(_chain(config, model, name, capacity.max_model_len, table, processors), grammars),
        AttentionShape.of(model, config.block_size),
        loaded.dtype,
        config.max_step_tokens,
    )
    return BuiltRunner(runner, capacity, kv_name, cache.num_bytes, grammars is not None)


def _grammars(
    config: WorkerConfig, model: ModelConfig, table: RowTable, bundle: TokenizerBundle | None
) -> GrammarStage | None:
    if bundle is None or not model.eos_token_ids or find_spec("llguidance") is None:
        return None
    return GrammarStage(
        table,
        lambda: GrammarReader(bundle.tokenizer_json, model.eos_token_ids),
        config.grammar_threads,
    )


def _chain(
    config: WorkerConfig,
    model: ModelConfig,
    name: str,
    max_model_len: int,
    table: RowTable,
    processors: Sequence[LoadedProcessor],
) -> ProcessorChain:
    shared = ProcessorConfig(
        model=name,
        dtype=config.dtype,
        vocab_size=table.vocab_size,
        max_model_len=max_model_len,
        max_num_reqs=config.max_sequences,
        eos_token_ids=model.eos_token_ids,
        device=str(table.device),
    )
    builtin = builtin_processors(shared, table, SamplingLimits())
    custom = build_instances(processors, shared, table)
    return ProcessorChain(builtin, custom, config.max_sequences, config.check_processors)


def _kv_name(config: WorkerConfig) -> str:
    """Return the name of the cache's dtype; registered names are lower-case."""
    name = config.kv_cache_dtype.lower()
    return config.dtype if name == "auto" else name


def _fit(config: WorkerConfig, model: ModelConfig) -> Capacity:
    kv_dtype = KV_CACHE_DTYPES.get(_kv_name(config))()
    page_bytes = kv_dtype.page_bytes(config.block_size, model.num_key_value_heads, model.head_dim)
    return plan_capacity(
        kv_cache_gib=config.kv_cache_gib,
        block_bytes=2 * model.num_hidden_layers * page_bytes,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        max_sequences=config.max_sequences,
        trained_len=model.max_position_embeddings,
        available_bytes=available_bytes(),
    )
