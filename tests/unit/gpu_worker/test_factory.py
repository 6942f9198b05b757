"""What a built worker tells of itself, and what stops it from being built."""

import hashlib
from dataclasses import replace

import pytest

from gpu_worker.config import WorkerConfig
from gpu_worker.factory import build_worker
from plugins.errors import InvalidConfig
from plugins.metrics import WORKER_KV_BYTES, WORKER_LOAD, Metric, NoMetrics
from plugins.types import ModelInfo

DUMMY = WorkerConfig(load_format="dummy", dtype="float32", threads=1, num_blocks=10, block_size=16, max_sequences=4)


class Gauges(NoMetrics):
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        self.values[metric.name] = value


def silent(phase: str, done: int, total: int) -> None:
    """No progress bar."""


async def test_a_worker_describes_its_model_and_its_room() -> None:
    gauges = Gauges()

    worker = build_worker(DUMMY, gauges, silent)

    info = await worker.describe()
    bundle = await worker.tokenizer()
    assert info.model == ModelInfo(
        name="dummy",
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=272,
        max_model_len=160,
        eos_token_ids=info.model.eos_token_ids,
        num_parameters=272 * 64 * 2 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3 + 64 * 2) + 64,
    )
    assert (info.num_blocks, info.block_size, info.max_sequences, info.max_step_tokens) == (10, 16, 4, 512)
    assert info.kv_cache_dtype == "float32"
    assert info.kv_bytes == 2 * 2 * 11 * (2 * 16 * 16) * 4
    assert info.tokenizer_sha256 == hashlib.sha256(bundle.tokenizer_json).hexdigest()
    assert gauges.values == {WORKER_LOAD.name: info.load_s, WORKER_KV_BYTES.name: info.kv_bytes}


def test_progress_is_told_of_every_tensor() -> None:
    calls: list[tuple[str, int, int]] = []

    build_worker(DUMMY, NoMetrics(), lambda phase, done, total: calls.append((phase, done, total)))

    assert calls == [("load", done, 21) for done in range(1, 22)]


async def test_the_cache_may_have_a_dtype_of_its_own() -> None:
    worker = build_worker(replace(DUMMY, kv_cache_dtype="BFloat16"), NoMetrics(), silent)

    assert (await worker.describe()).kv_cache_dtype == "bfloat16"


def test_an_unknown_cache_dtype_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidConfig, match="unknown kv_cache_dtype 'fp3'; known: bfloat16, float32"):
        build_worker(replace(DUMMY, kv_cache_dtype="fp3"), NoMetrics(), silent)
