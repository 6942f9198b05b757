"""A worker's whole sampling, without a model: requests that ask for random mixes of everything, and their answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_worker.attention.groups import AttentionShape
from gpu_worker.runner.inputs import build_inputs
from gpu_worker.runner.row_table import RowTable
from gpu_worker.sampling.builtin import builtin_processors
from gpu_worker.sampling.grammar_reader import GrammarReader
from gpu_worker.sampling.grammars import GrammarStage
from gpu_worker.sampling.pipeline import SamplingPipeline
from gpu_worker.sampling.processors import ProcessorChain, build_instances
from plugins.logits import ProcessorConfig
from plugins.logits_loading import load_processors
from plugins.types import (
    Admission,
    BlockId,
    Chunk,
    LogprobsMode,
    RequestId,
    Row,
    SamplingLimits,
    SamplingParams,
    TokenId,
    TokenLogprobs,
)
from tests.unit.control_plane.text.byte_level import bundle
from tests.unit.gpu_worker.sampling.test_against_reference import draw_parameters
from tests.unit.gpu_worker.tiny import TINY

VOCAB_SIZE = 2000  # more than the tokens that are ranked at first
MAX_LEN = 96
BLOCK_SIZE = 16
EOS = TokenId(2)
GRAMMARS = ("start: /[a-z]+/", 'start: "hello" | "good" /[a-z ]{3,9}/')


@dataclass(frozen=True)
class Asking:
    """A request with some output, and the scores of its next token."""

    sampling: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    scores_V: torch.Tensor


@dataclass(frozen=True)
class Answer:
    token_id: int
    logprobs: TokenLogprobs | None
    failure: str | None


def draw_crowd(seed: int, num_requests: int) -> list[Asking]:
    rng = np.random.default_rng(seed)
    return [_draw(rng) for _ in range(num_requests)]


def _draw(rng: np.random.Generator) -> Asking:
    prompt = tuple(rng.integers(3, VOCAB_SIZE, size=int(rng.integers(1, 40))).tolist())
    output = tuple(rng.integers(3, 80, size=int(rng.integers(0, 40))).tolist())
    mix = draw_parameters(rng, VOCAB_SIZE, list(output))
    if rng.random() < 0.2:
        output = ()
        mix = {**mix, "grammar": str(rng.choice(GRAMMARS)), "ignore_eos": False}
        mix.pop("allowed_token_ids", None)
    if rng.random() < 0.7:
        mix |= {"logprobs": int(rng.integers(0, 6)), "logprobs_mode": list(LogprobsMode)[rng.integers(2)]}
        if rng.random() < 0.3:
            mix["logprob_token_ids"] = tuple(rng.integers(0, VOCAB_SIZE, size=4).tolist())
    extra: dict[str, Any] = {}
    if rng.random() < 0.2:
        extra["no_repeat_ngram_size"] = int(rng.integers(2, 5))
    if rng.random() < 0.2:
        extra["watermark"] = True
    scores_V = torch.from_numpy(rng.normal(size=VOCAB_SIZE) * rng.choice([0.3, 3.0])).float()
    scores_V[torch.from_numpy(rng.integers(0, VOCAB_SIZE, size=40))] = float(scores_V.max())  # some are equal
    return Asking(SamplingParams(**{"seed": 1} | mix, extra_args=extra), prompt, output, scores_V)


class Sampling:
    """One worker's stages over one table, on a device."""

    def __init__(self, num_rows: int, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._table = RowTable(
            max_sequences=num_rows,
            max_model_len=MAX_LEN,
            vocab_size=VOCAB_SIZE,
            num_blocks=num_rows * MAX_LEN // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            eos_token_ids=(EOS,),
            device=self._device,
        )
        config = ProcessorConfig(
            model="none",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_LEN,
            max_num_reqs=num_rows,
            eos_token_ids=(EOS,),
            device=device,
        )
        custom = load_processors(["ngram_repetition", "watermark"], {"watermark": {"key": "a key of these tests"}})
        chain = ProcessorChain(
            builtin_processors(config, self._table, SamplingLimits()),
            build_instances(custom, config, self._table),
            num_rows,
        )
        self._grammars = GrammarStage(
            self._table, lambda: GrammarReader(bundle().tokenizer_json, [EOS]), num_threads=1, max_wait_s=10.0
        )
        self._pipeline = SamplingPipeline(chain, self._grammars)

    def close(self) -> None:
        self._pipeline.close()

    @torch.inference_mode()
    def answer(self, asking: dict[int, Asking]) -> list[Answer]:
        """Give each row to a request, choose one token for each, and release them again."""
        admissions = [_admission(row, each) for row, each in asking.items()]
        self._table.admit(admissions)
        assert self._pipeline.admit(admissions) == []
        assert self._pipeline.apply_staged_writes() == []
        chunks = [Chunk(each.row, 1) for each in admissions]
        shape = AttentionShape.of(TINY, BLOCK_SIZE)
        inputs = build_inputs(chunks, self._table, shape, torch.float32, self._device)
        scores_RV = torch.stack([asking[row].scores_V for row in inputs.sampled_rows.tolist()])
        self._pipeline.begin(inputs)
        sampled = self._pipeline.sample(scores_RV.clone().to(self._device), inputs)
        told = {} if sampled.logprobs is None else sampled.logprobs.read()
        by_row = {}
        for place, (row, token_id) in enumerate(
            zip(inputs.sampled_rows.tolist(), sampled.tokens.tolist(), strict=True)
        ):
            failure = sampled.failures.get(Row(row))
            by_row[row] = Answer(token_id, told.get(place), None if failure is None else failure.reason)
        rows = [each.row for each in admissions]
        self._table.release(rows)
        self._pipeline.release(rows)
        assert not sampled.is_waiting.any()
        return [by_row[row] for row in asking]


def _admission(row: int, asking: Asking) -> Admission:
    token_ids: Sequence[int] = (*asking.prompt, *asking.output)
    num_blocks = MAX_LEN // BLOCK_SIZE
    return Admission(
        row=Row(row),
        request_id=RequestId(str(row)),
        token_ids=tuple(TokenId(token_id) for token_id in token_ids),
        num_prompt_tokens=len(asking.prompt),
        sampling=asking.sampling,
        block_ids=tuple(BlockId(block) for block in range(row * num_blocks, (row + 1) * num_blocks)),
        num_cached_tokens=len(token_ids) - 1,
    )
