"""2,000 mixes of all parameters, over random scores and histories: the token is the one that plain numpy finds."""

from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import torch

from gpu_worker.sampling.philox import uniforms
from gpu_worker.sampling.sampler import SamplingInputs, sample
from plugins.types import SamplingParams
from tests.unit.gpu_worker.sampling.reference import reference_scores, reference_token
from tests.unit.gpu_worker.sampling.tables import EOS, Tables, apply, take

NUM_BATCHES, BATCH = 40, 50
OFF_SHARE = 0.4  # how often a parameter is off its default


def draw_parameters(rng: np.random.Generator, vocab_size: int, output: list[int]) -> dict[str, Any]:
    """Some parameters off their defaults; the others are absent."""

    def tokens(most: int) -> list[int]:
        return [int(token) for token in rng.choice(vocab_size, size=int(rng.integers(1, most)), replace=False)]

    def bad_word() -> tuple[int, ...]:
        """One token, or a run that the output ends with and a token behind it, or a run that it seldom ends with."""
        kind = rng.integers(3)
        if kind == 1:
            start = int(rng.integers(0, len(output) + 1))
            return (*output[start:], int(rng.integers(vocab_size)))
        return tuple(rng.integers(0, vocab_size, size=1 if kind == 0 else 3).tolist())

    drawn: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.3, 0.7, 1.5, 4.0])),
        "top_k": int(rng.choice([1, 3, 10, 40, 1000])),
        "top_p": float(rng.choice([0.2, 0.5, 0.9, 0.99])),
        "min_p": float(rng.choice([0.01, 0.05, 0.3])),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "min_tokens": int(rng.integers(1, 20)),
        "stop_token_ids": tuple(tokens(8)),
        "ignore_eos": True,
        "bad_word_ids": tuple(bad_word() for _ in range(rng.integers(1, 5))),
        "logit_bias": {token: float(rng.uniform(-10, 10)) for token in tokens(20)},
        "allowed_token_ids": tuple(tokens(30)),
        "seed": int(rng.integers(1, 2**63)),
    }
    return {name: value for name, value in drawn.items() if rng.random() < OFF_SHARE}


def sampling_inputs(params: list[SamplingParams], positions: list[int]) -> SamplingInputs:
    return SamplingInputs(
        temperature=torch.tensor([each.temperature for each in params]),
        top_k=torch.tensor([each.top_k for each in params]),
        top_p=torch.tensor([each.top_p for each in params]),
        min_p=torch.tensor([each.min_p for each in params]),
        seeds=np.array([each.seed or 0 for each in params], dtype=np.uint64),
        positions=np.array(positions),
    )


def check_batch(rng: np.random.Generator, has_drafts: bool) -> list[dict[str, Any]]:
    """Choose the tokens of one batch, all rows at once, and compare; return the parameters that were drawn."""
    vocab_size = int(rng.integers(64, 300))
    tables = Tables(vocab_size, max_num_reqs=BATCH)
    stages = tables.stages()
    mixes, rows, expected = [], rng.permutation(BATCH).tolist(), []
    prompts, outputs, drafts = {}, {}, {}
    for row in rows:
        prompts[row] = rng.integers(0, vocab_size, size=int(rng.integers(1, 40))).tolist()
        outputs[row] = rng.integers(0, min(vocab_size, 80), size=int(rng.integers(0, 40))).tolist()
        drafts[row] = rng.integers(0, vocab_size, size=int(rng.integers(0, 3))).tolist() if has_drafts else []
        mixes.append(draw_parameters(rng, vocab_size, outputs[row] + drafts[row]))
        tables.put(row, prompts[row], outputs[row])
        take(stages, row, **mixes[-1])
    ctx = tables.context_of_drafts(*drafts.items()) if has_drafts else tables.context(*rows)
    params = {row: SamplingParams(**mix) for row, mix in zip(rows, mixes, strict=True)}
    logits = torch.from_numpy(rng.normal(size=(len(ctx.pos), vocab_size)) * 3).float()
    places = list(zip(ctx.expanded_idx_mapping.tolist(), ctx.expanded_local_pos.tolist(), strict=True))
    before = logits.numpy().astype(np.float64)
    inputs = sampling_inputs([params[row] for row, _ in places], (ctx.pos + 1).tolist())

    tokens = sample(apply(stages, logits, ctx), inputs).tolist()

    noises = uniforms(inputs.seeds, inputs.positions, 0)
    for (row, local), scores, noise in zip(places, before, noises, strict=True):
        output = outputs[row] + drafts[row][:local]
        scores = reference_scores(scores, prompts[row], output, params[row], [EOS])
        expected.append(reference_token(scores, params[row], float(noise)) if scores.max() > -np.inf else -1)
    assert tokens == expected
    return mixes


def test_every_mix_of_parameters_chooses_what_a_plain_reference_chooses() -> None:
    rng = np.random.default_rng(20)

    mixes = [mix for batch in range(NUM_BATCHES) for mix in check_batch(rng, has_drafts=batch % 2 == 1)]

    singles = Counter(name for mix in mixes for name in mix)
    pairs = Counter(pair for mix in mixes for pair in combinations(sorted(mix), 2))
    assert len(mixes) == 2000
    assert len(singles) == 14
    assert min(singles.values()) >= 300
    assert len(pairs) == 14 * 13 // 2
    assert min(pairs.values()) >= 200
