"""A model whose matrices have more rows than its tokenizer has tokens: those rows are never sampled nor told."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu_worker.factory import LoadedModel, load_model
from plugins.model_loader import ModelConfig
from plugins.types import LogprobsMode
from tests.unit.gpu_worker.runner.assembled import assemble
from tests.unit.gpu_worker.tiny import (
    CONFIG,
    OUTPUTS,
    PROMPTS,
    TINY,
    TinyLoader,
    admission,
    chunk,
    plan,
    run,
    tokens_of,
)

NUM_PADDED = 64


class PaddedLoader(TinyLoader):
    """The tiny model with rows of large norm behind those of its vocabulary."""

    def config(self) -> ModelConfig:
        return replace(TINY, vocab_size=TINY.vocab_size + NUM_PADDED)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(3)
        for name, weight in super().weights():
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                padding = torch.randn((NUM_PADDED, weight.shape[1]), generator=generator) * 100
                yield name, torch.cat((weight, padding))
            else:
                yield name, weight


@pytest.fixture(scope="module")
def padded() -> LoadedModel:
    return load_model(CONFIG, PaddedLoader(), torch.device("cpu"), lambda phase, done, total: None)


def test_greedy_tokens_are_those_of_the_model_without_padding(padded: LoadedModel) -> None:
    """B102, greedy."""
    runner = assemble(loaded=padded)
    admitted = [admission(row, prompt) for row, prompt in enumerate(PROMPTS)]
    chunks = [chunk(row, len(prompt), range(row * 8, row * 8 + 7)) for row, prompt in enumerate(PROMPTS)]

    first = run(runner, plan(*chunks, admitted=admitted))
    rest = run(runner, plan(*(chunk(row, 1) for row in range(4)), decode_steps=7))

    assert [tokens_of(first)[row] + tokens_of(rest)[row] for row in range(4)] == list(OUTPUTS)


@pytest.mark.parametrize("top_p", [1.0, 0.99])
def test_no_token_beyond_the_vocabulary_is_drawn_or_told(padded: LoadedModel, top_p: float) -> None:
    """B102, temperature 2: the rows behind the vocabulary would win nearly every draw."""
    runner = assemble(loaded=padded)
    admitted = [
        admission(
            row,
            (5 + row,),
            temperature=2.0,
            seed=row,
            top_p=top_p,
            logprobs=5,
            prompt_logprobs=5,
            logprobs_mode=LogprobsMode.PROCESSED if row % 2 else LogprobsMode.RAW,
        )
        for row in range(4)
    ]

    first = run(runner, plan(*(chunk(row, 1, range(row * 8, row * 8 + 8)) for row in range(4)), admitted=admitted))
    rest = [run(runner, plan(*(chunk(row, 1) for row in range(4)), decode_steps=15)) for _ in range(2)]

    tokens = sum((result.token_ids for result in rest), first.token_ids)
    assert len(tokens) == 4 * 31
    assert max(tokens) < 96
    told = [entry for result in (first, *rest) for entry in result.logprobs if entry is not None]
    assert len(told) == 4 * 31
    assert max(token_id for entry in told for token_id in entry.token_ids) < 96


def test_prompt_places_are_ranked_among_the_vocabulary_alone(padded: LoadedModel) -> None:
    runner = assemble(loaded=padded)

    result = run(runner, plan(chunk(0, 11, range(5)), admitted=[admission(0, PROMPTS[0], prompt_logprobs=2)]))

    assert [place.token_ids for place in result.prompt_logprobs[0].places[:2]] == [(17, 94, 31), (9, 48, 46)]
