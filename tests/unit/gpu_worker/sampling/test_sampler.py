"""The choice of tokens, against a plain float64 reference and at every edge."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.sampling.philox import uniforms
from gpu_worker.sampling.sampler import NO_TOKEN, SamplingInputs, sample


def make_inputs(
    num_rows: int,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    seeds: int | list[int] = 1,
    positions: int | list[int] = 10,
) -> SamplingInputs:
    return SamplingInputs(
        temperature=torch.tensor(temperature).expand(num_rows),
        top_k=torch.tensor(top_k).expand(num_rows),
        top_p=torch.tensor(top_p).expand(num_rows),
        min_p=torch.tensor(min_p).expand(num_rows),
        seeds=np.broadcast_to(np.array(seeds, dtype=np.uint64), num_rows),
        positions=np.broadcast_to(np.array(positions, dtype=np.int64), num_rows),
    )


def one_row(inputs: SamplingInputs, row: int) -> SamplingInputs:
    only = slice(row, row + 1)
    return SamplingInputs(
        temperature=inputs.temperature[only],
        top_k=inputs.top_k[only],
        top_p=inputs.top_p[only],
        min_p=inputs.min_p[only],
        seeds=inputs.seeds[only],
        positions=inputs.positions[only],
    )


def mixed_inputs(num_rows: int, seed: int) -> SamplingInputs:
    """Every kind of row that a batch may hold, in random order."""
    rng = np.random.default_rng(seed)
    return make_inputs(
        num_rows,
        temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 2.5], num_rows).tolist(),
        top_k=rng.choice([0, 0, 1, 5, 40, 300, 5000], num_rows).tolist(),
        top_p=rng.choice([1.0, 1.0, 0.999, 0.9, 0.5], num_rows).tolist(),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.2], num_rows).tolist(),
        seeds=rng.integers(0, 2**64, num_rows, dtype=np.uint64).tolist(),
        positions=rng.integers(0, 8192, num_rows).tolist(),
    )


def reference_token(logits: np.ndarray, inputs: SamplingInputs, row: int) -> int:
    """One row in float64, with a full sort and nothing clever."""
    temperature, top_k = float(inputs.temperature[row]), int(inputs.top_k[row])
    top_p, min_p = float(inputs.top_p[row]), float(inputs.min_p[row])
    ranked = np.argsort(-logits, kind="stable")
    if temperature == 0:
        return int(ranked[0])
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs[probs < min_p] = 0
    is_ranked = top_p < 1 or 0 < top_k < len(logits)
    order = ranked if is_ranked else np.arange(len(logits))
    probs = probs[order]
    if 0 < top_k < len(logits):
        probs[top_k:] = 0
    if top_p < 1:
        num_kept = 1
        while probs[:num_kept].sum() < top_p * probs.sum():
            num_kept += 1
        probs[num_kept:] = 0
    noise = uniforms(inputs.seeds[row : row + 1], inputs.positions[row : row + 1], 0)[0]
    return int(order[np.flatnonzero(np.cumsum(probs) > float(noise) * probs.sum())[0]])


def random_logits(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("vocab_size", [7, 100, 2000])
def test_mixed_batches_choose_what_a_float64_reference_chooses(vocab_size: int, seed: int) -> None:
    logits = random_logits(64, vocab_size, seed)
    inputs = mixed_inputs(64, seed)

    tokens = sample(logits, inputs)

    assert tokens.tolist() == [reference_token(logits[row].numpy(), inputs, row) for row in range(64)]


def test_a_flat_distribution_whose_mass_needs_more_than_the_ranked_tokens_is_cut_at_top_p() -> None:
    logits = random_logits(32, 5000, seed=3) * 0.01
    inputs = make_inputs(32, top_p=0.9, seeds=list(range(32)))

    tokens = sample(logits, inputs)

    assert tokens.tolist() == [reference_token(logits[row].numpy(), inputs, row) for row in range(32)]


@pytest.mark.parametrize("vocab_size", [100, 5003, 49_152])
def test_a_row_alone_gets_the_token_it_gets_in_a_batch(vocab_size: int) -> None:
    """B074: neighbours, seeded or not, change nothing."""
    logits = random_logits(48, vocab_size, seed=11).bfloat16().float()
    inputs = mixed_inputs(48, seed=12)

    together = sample(logits, inputs).tolist()

    assert [sample(logits[row : row + 1], one_row(inputs, row)).item() for row in range(48)] == together


def test_the_number_of_threads_changes_no_token(two_threads: None) -> None:
    logits = random_logits(8, 49_152, seed=21)
    inputs = mixed_inputs(8, seed=22)
    with_two = sample(logits, inputs).tolist()

    torch.set_num_threads(1)
    with_one = [sample(logits[row : row + 1], one_row(inputs, row)).item() for row in range(8)]

    assert with_one == with_two


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(16, 300, seed=31)
    before = logits.clone()

    sample(logits, mixed_inputs(16, seed=32))

    assert torch.equal(logits, before)


def test_greedy_takes_the_best_token_and_the_lower_id_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0], [4.0, 0.0, 4.0]])

    tokens = sample(logits, make_inputs(2, temperature=0.0, top_k=2, top_p=0.1, min_p=0.5))

    assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 100.0, 1e6])
def test_top_k_1_is_greedy_even_among_equals_and_at_any_temperature(temperature: float) -> None:
    """Case B005."""
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [2.0, 2.0000002, 1.0, 2.0], [-0.0, 0.0, 0.0, -0.0]])

    tokens = sample(logits, make_inputs(3, temperature=temperature, top_k=1, seeds=[5, 6, 7]))

    assert tokens.tolist() == [1, 1, 0]


def test_equal_tokens_at_the_edge_of_top_k_are_kept_by_the_lower_id() -> None:
    logits = torch.zeros(500, 6)

    tokens = sample(logits, make_inputs(500, top_k=2, seeds=list(range(500))))

    assert set(tokens.tolist()) == {0, 1}


def test_a_tiny_top_p_keeps_the_best_token_alone() -> None:
    logits = random_logits(200, 50, seed=41)

    tokens = sample(logits, make_inputs(200, temperature=2.0, top_p=1e-9, seeds=list(range(200))))

    assert torch.equal(tokens, logits.argmax(-1))


def test_top_p_keeps_the_token_that_reaches_the_mass() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(500, 3)

    tokens = sample(logits, make_inputs(500, top_p=0.6, seeds=list(range(500))))

    assert set(tokens.tolist()) == {0, 1}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(500, 4)

    tokens = sample(logits, make_inputs(500, top_k=2, top_p=0.55, seeds=list(range(500))))

    assert set(tokens.tolist()) == {0}  # 0.4 / (0.4 + 0.3) = 0.57 holds 0.55; of all four it would not


def test_min_p_1_keeps_only_the_best_token() -> None:
    logits = random_logits(200, 50, seed=42)

    tokens = sample(logits, make_inputs(200, temperature=3.0, min_p=1.0, seeds=list(range(200))))

    assert torch.equal(tokens, logits.argmax(-1))


def test_min_p_drops_tokens_below_its_share_of_the_best() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(500, 3)

    tokens = sample(logits, make_inputs(500, min_p=0.5, seeds=list(range(500))))

    assert set(tokens.tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 1e-45])
@pytest.mark.parametrize("scale", [1.0, 1e30])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_very_small_temperature_is_greedy_without_overflow(temperature: float, scale: float, top_p: float) -> None:
    """Case B004: a very small positive temperature overflows."""
    logits = torch.tensor([[1.0, 9.0, -5.0, 8.5]]) * scale

    tokens = sample(logits, make_inputs(1, temperature=temperature, top_p=top_p))

    assert tokens.tolist() == [1]


@pytest.mark.parametrize("top_k", [0, 50, 51, 2**62])
def test_a_top_k_of_the_whole_vocabulary_is_off(top_k: int) -> None:
    """Case B005: 0, none and the whole vocabulary mean the same."""
    logits = random_logits(32, 50, seed=43)
    off = make_inputs(32, temperature=0.8, seeds=list(range(32)))

    tokens = sample(logits, make_inputs(32, temperature=0.8, top_k=top_k, seeds=list(range(32))))

    assert tokens.tolist() == [reference_token(logits[row].numpy(), off, row) for row in range(32)]


@pytest.mark.parametrize("features", [{}, {"top_k": 300}, {"top_k": 3}, {"top_p": 0.999999}, {"min_p": 0.01}])
def test_masked_tokens_are_never_drawn(features: dict[str, float]) -> None:
    logits = torch.full((2000, 400), -torch.inf)
    logits[:, [7, 399]] = 0.0

    tokens = sample(logits, make_inputs(2000, seeds=list(range(2000)), **features))  # type: ignore[arg-type]  # keyword values of mixed type

    assert set(tokens.tolist()) == {7, 399}


def test_noise_next_to_1_stays_among_the_tokens_that_have_a_probability() -> None:
    position = 1_651_333  # where the noise of seed 3 is the greatest of 2,000,000
    noise = uniforms(np.array([3], dtype=np.uint64), np.array([position]), 0)
    logits = torch.zeros(1, 60_000)
    logits[:, -10_000:] = -torch.inf

    tokens = sample(logits, make_inputs(1, seeds=3, positions=position))

    assert noise[0] > 0.999999
    assert 49_900 < tokens.item() < 50_000


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize(
    "broken",
    [[torch.nan, 1.0, 2.0], [torch.inf, 1.0, 2.0], [-torch.inf] * 3, [torch.nan] * 3],
)
def test_a_row_without_a_choice_gets_no_token_and_its_neighbours_do(
    broken: list[float], top_p: float, temperature: float
) -> None:
    logits = torch.tensor([[0.0, 90.0, 0.0], broken, [0.0, 0.0, 90.0]])

    tokens = sample(logits, make_inputs(3, temperature=temperature, top_p=top_p))

    assert NO_TOKEN == -1
    assert tokens.tolist() == [1, -1, 2]


def test_the_draws_of_one_request_are_all_different_and_belong_to_their_positions() -> None:
    """Case B077: 64 tokens from position 10 on; a request that comes back at position 40 goes on with the same."""
    noise = uniforms(np.full(64, 9, dtype=np.uint64), np.arange(10, 74), 0)
    again = uniforms(np.full(34, 9, dtype=np.uint64), np.arange(40, 74), 0)

    assert len(set(noise.tolist())) == 64
    assert again.tolist() == noise[30:].tolist()


def test_requests_with_different_seeds_say_different_things() -> None:
    """Case B079: what admission draws for those without a seed makes them differ."""
    logits = torch.zeros(20, 1000)

    tokens = sample(logits, make_inputs(20, seeds=[2**63 + 7 * seed for seed in range(20)]))

    assert len(set(tokens.tolist())) >= 15
