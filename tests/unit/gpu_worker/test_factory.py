"""What a built worker tells of itself, and what stops it from being built."""

import errno
import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.config import WorkerConfig
from gpu_worker.factory import build_worker, load_model
from gpu_worker.loading.dummy_loader import DummyLoader
from gpu_worker.loading.open import open_model
from gpu_worker.ops import Rotary
from plugins.errors import InvalidConfig, ModelFileBroken
from plugins.metrics import WORKER_KV_BYTES, WORKER_LOAD, Metric, NoMetrics
from plugins.types import ModelInfo
from tests.unit.gpu_worker.loading.tiny_files import write_folder, write_gguf

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
    assert (len(info.weights_version), info.plugins) == (16, ())
    assert gauges.values == {WORKER_LOAD.name: info.load_s, WORKER_KV_BYTES.name: info.kv_bytes}


async def test_a_worker_serves_the_tokens_that_its_tokenizer_knows(tmp_path: Path) -> None:
    """B102: the model has 64 rows more, which fill its matrices up."""
    folder = write_folder(tmp_path, config={"vocab_size": 336})
    (folder / "tokenizer.json").unlink()

    worker = build_worker(replace(DUMMY, model=str(folder)), NoMetrics(), silent)

    assert (await worker.describe()).model.vocab_size == 272


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


def test_what_is_wrong_beside_the_weights_is_told_before_they_are_read(tmp_path: Path) -> None:
    calls: list[int] = []
    (write_folder(tmp_path) / "tokenizer.json").write_text("{")

    with pytest.raises(ModelFileBroken, match=r"tokenizer\.json: not a tokenizer"):
        build_worker(WorkerConfig(model=str(tmp_path)), NoMetrics(), lambda phase, done, total: calls.append(done))
    with pytest.raises(
        InvalidConfig, match="worker.num_blocks is 1000000000000, which takes 8192000000008192 bytes of KV"
    ):
        build_worker(replace(DUMMY, num_blocks=10**12), NoMetrics(), lambda phase, done, total: calls.append(done))
    with pytest.raises(InvalidConfig, match="10 KV blocks of 16 tokens hold 160"):
        build_worker(replace(DUMMY, max_model_len=161), NoMetrics(), lambda phase, done, total: calls.append(done))

    assert calls == []


@pytest.mark.parametrize("method", ["tokenizer", "config", "weights"])
def test_a_file_that_may_not_be_read_after_all_is_told_by_its_name(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: DummyLoader) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/models/a.json")

    monkeypatch.setattr(DummyLoader, method, refused)

    with pytest.raises(ModelFileBroken, match=r"^/models/a\.json: cannot be read: Permission denied; check its owner"):
        build_worker(DUMMY, NoMetrics(), silent)


def test_a_file_that_vanishes_before_its_weights_are_read_is_told_by_its_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    config = WorkerConfig(model=str(path), num_blocks=10)
    loader, _ = open_model(config)
    path.unlink()

    with pytest.raises(ModelFileBroken, match=r"tiny\.gguf: cannot be read: No such file or directory"):
        load_model(config, loader, torch.device("cpu"), silent)


def test_an_error_of_the_progress_is_not_taken_for_one_of_the_model() -> None:
    def unheard(phase: str, done: int, total: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        build_worker(DUMMY, NoMetrics(), unheard)


def test_rotary_tables_have_a_row_for_each_position_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dummy is trained for 2,048 tokens; its cache holds 160."""
    asked: list[int] = []

    class Noted(Rotary):
        def __init__(
            self, theta: float, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
        ) -> None:
            asked.append(max_positions)
            super().__init__(theta, head_dim, max_positions, dtype, device)

    monkeypatch.setattr("gpu_worker.ops.Rotary", Noted)

    build_worker(DUMMY, NoMetrics(), silent)

    assert asked == [160]


def test_what_is_loaded_tells_the_weights_and_their_packed_copies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    build_worker(DUMMY, NoMetrics(), silent)

    loaded = next(record for record in caplog.records if record.getMessage() == "model_loaded")
    num_linear = 272 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3)
    assert loaded.__dict__["weight_bytes"] == (num_linear + 272 * 64 + 2 * 64 * 2 + 64) * 4
    assert (loaded.__dict__["packed_bytes"] >= num_linear * 4) == has_onednn


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, {"trained_len": 2048, "max_model_len": 160, "limited_by": "worker.num_blocks"}),
        (
            {"num_blocks": None, "kv_cache_gib": 1 / 1024},
            {"trained_len": 2048, "max_model_len": 2032, "limited_by": "worker.kv_cache_gib"},
        ),
        ({"max_model_len": 160}, None),
        ({"num_blocks": 128}, None),
    ],
)
def test_a_context_that_the_cache_cuts_short_is_told_with_the_key_that_does(
    changes: dict[str, Any], told: dict[str, object] | None, caplog: pytest.LogCaptureFixture
) -> None:
    build_worker(replace(DUMMY, **changes), NoMetrics(), silent)

    reduced = [record.__dict__ for record in caplog.records if record.getMessage() == "model_len_reduced"]
    assert [{key: fields[key] for key in told or {}} for fields in reduced] == ([] if told is None else [told])


@pytest.mark.parametrize(("cores", "wanted", "threads"), [({5}, None, 1), ({0, 1, 6, 7}, None, 3), ({0, 1}, 4, 4)])
def test_of_the_cores_that_the_process_may_use_one_is_left_free(
    cores: set[int],
    wanted: int | None,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process_id: cores)

    build_worker(replace(DUMMY, threads=wanted), NoMetrics(), silent)

    loaded = next(record for record in caplog.records if record.getMessage() == "model_loaded")
    assert loaded.__dict__["threads"] == threads
