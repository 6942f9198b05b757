"""Chooses the next token of each row: temperature, min_p, top-k, top-p, then one draw.

Takes scores that all processors have seen; the noise is the business of `gpu_worker/sampling/philox.py`.

A row's token depends on its own logits, parameters, seed and position alone, bit for bit: every operation here
works row by row, sums are `cumsum` (one order, whatever the batch and the threads), and ties go to the lower id.
Rows are grouped by what they ask for, so a greedy batch pays for `argmax` and nothing else, and no row pays for
a sort of the vocabulary unless its mass lies beyond `NUM_RANKED` tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gpu_worker.sampling.philox import DRAW_SAMPLE, uniforms

NO_TOKEN = -1  # stands in for the token of a row that has none to choose
BLOCK_SCORES = 400_000  # that stay in a core's caches while they are read several times
NUM_RANKED = 256  # tokens put in order for top-k and top-p before anything dearer is tried


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How to choose, for each row of logits. R = rows; tensors may be on the host or on the logits' device."""

    temperature: Tensor  # [R] float32; 0 is greedy
    top_k: Tensor  # [R] int64; 0 is off, and so is V or more
    top_p: Tensor  # [R] float32, in (0, 1]
    min_p: Tensor  # [R] float32, in [0, 1]
    seeds: np.ndarray  # [R] uint64
    positions: np.ndarray  # [R] int64: absolute position of the token being sampled


Choose = Callable[[Tensor, SamplingInputs], Tensor]  # one token per row of the logits


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Choose one token per row.

    Among equal logits the lower id is the likelier token: greedy takes it, and top-k and top-p keep it first. A row
    that holds NaN or +inf, or nothing but -inf, gets NO_TOKEN; its neighbours are not touched.

    Shapes: logits [R, V] float32, left as they are; returns [R] int64.
    """
    is_greedy = inputs.temperature.cpu().numpy() == 0
    if is_greedy.all():
        return _argmax(logits, inputs)
    top_k = inputs.top_k.cpu().numpy()
    has_top_k = (top_k > 0) & (top_k < logits.shape[1])
    is_truncated = (has_top_k | (inputs.top_p.cpu().numpy() < 1)) & ~is_greedy
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for group, choose in (
        (is_greedy, _argmax),
        (is_truncated, _sample_ranked),
        (~(is_greedy | is_truncated), _sample_whole),
    ):
        if group.all():
            return choose(logits, inputs)
        if group.any():
            rows = torch.from_numpy(np.flatnonzero(group))
            tokens[rows] = choose(logits[rows], select(inputs, rows))
    return tokens


def kept_logprobs(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Return the logarithm of the chance that `sample` gives each token: -inf for what min_p, top-k or top-p cut.

    A greedy row is told as it is, without temperature and uncut. Shapes: logits [R, V] float32, left as they are;
    returns [R, V].
    """
    device, vocab_size = logits.device, logits.shape[1]
    is_greedy = inputs.temperature == 0
    drawn = replace(
        inputs,
        temperature=inputs.temperature.masked_fill(is_greedy, 1.0),
        min_p=inputs.min_p.masked_fill(is_greedy, 0.0),
    )
    top_k_R = inputs.top_k.masked_fill(is_greedy | (inputs.top_k >= vocab_size), 0)
    top_p_R = inputs.top_p.masked_fill(is_greedy, 1.0)
    is_truncated_R = (top_k_R > 0) | (top_p_R < 1)
    distances_RV = _distances(logits)
    ranked_RV = _rank(distances_RV, vocab_size) if is_truncated_R.any() else None
    probs_RV = _probabilities(distances_RV, drawn)
    scaled_RV = distances_RV  # what was made of it: logits over temperature, the best of each row 0
    is_cut_RV = (probs_RV == 0) & (drawn.min_p > 0).to(device).unsqueeze(1)
    if ranked_RV is not None:
        cdf_RV = probs_RV.gather(1, ranked_RV).cumsum(-1)
        last_R1 = _last_kept(cdf_RV, probs_RV, top_k_R.to(device), top_p_R.to(device))
        is_beyond_RV = (torch.arange(vocab_size, device=device) > last_R1) & is_truncated_R.to(device).unsqueeze(1)
        is_cut_RV |= torch.zeros_like(is_cut_RV).scatter_(1, ranked_RV, is_beyond_RV)
    return scaled_RV.masked_fill_(is_cut_RV, -torch.inf).log_softmax(-1)


def select(inputs: SamplingInputs, rows: Tensor) -> SamplingInputs:
    """Return the inputs of some rows, which are named on the host."""
    on_host = rows.numpy()
    return SamplingInputs(
        temperature=inputs.temperature[rows],
        top_k=inputs.top_k[rows],
        top_p=inputs.top_p[rows],
        min_p=inputs.min_p[rows],
        seeds=inputs.seeds[on_host],
        positions=inputs.positions[on_host],
    )


def rows_at_a_time(logits_RV: Tensor) -> int:
    """Return how many rows to look at together: on a CPU so few that they stay in its caches.

    What reads 32 rows of 49,152 a few times takes half as long by eights.
    """
    num_rows, vocab_size = logits_RV.shape
    return max(1, BLOCK_SCORES // vocab_size) if logits_RV.device.type == "cpu" else max(1, num_rows)


def _by_blocks(choose: Choose) -> Choose:
    def choose_by_blocks(logits_RV: Tensor, inputs: SamplingInputs) -> Tensor:
        num_rows = rows_at_a_time(logits_RV)
        if len(logits_RV) <= num_rows:
            return choose(logits_RV, inputs)
        rows_R = torch.arange(len(logits_RV))
        blocks = [slice(start, start + num_rows) for start in range(0, len(logits_RV), num_rows)]
        return torch.cat([choose(logits_RV[block], select(inputs, rows_R[block])) for block in blocks])

    return choose_by_blocks


def _argmax(logits_RV: Tensor, inputs: SamplingInputs) -> Tensor:
    if logits_RV.device.type == "cpu":  # the same; numpy takes 5 us for a row of 49,152, torch 60
        tokens_R = torch.from_numpy(logits_RV.numpy().argmax(-1))
    else:
        tokens_R = logits_RV.argmax(-1)
    best_R = logits_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
    return tokens_R.masked_fill_(~best_R.isfinite(), NO_TOKEN)


@_by_blocks
def _sample_whole(logits_RV: Tensor, inputs: SamplingInputs) -> Tensor:
    """Sample from all tokens, in the order of their ids."""
    probs_RV = _probabilities(_distances(logits_RV), inputs)
    tokens_R = _invert(probs_RV.cumsum(-1), _noise(inputs, logits_RV.device))
    return _without_broken_rows(tokens_R, logits_RV)


@_by_blocks
def _sample_ranked(logits_RV: Tensor, inputs: SamplingInputs) -> Tensor:
    """Sample from the likeliest tokens, in the order of their rank, within top_k and top_p.

    Every row gets as many candidates as it needs and no more: how many its neighbours need changes no token,
    because the candidates are the beginning of the same order.
    """
    vocab_size = logits_RV.shape[1]
    num_ranked = min(NUM_RANKED, vocab_size)
    distances_RV = _distances(logits_RV)
    ranked_RK = _rank(distances_RV, num_ranked)
    probs_RV = _probabilities(distances_RV, inputs)
    top_k_R = inputs.top_k.to(logits_RV.device)
    top_k_R = top_k_R.masked_fill(top_k_R >= vocab_size, 0)
    top_p_R = inputs.top_p.to(logits_RV.device)
    noise_R = _noise(inputs, logits_RV.device)

    tokens_R, is_enough_R = _draw_ranked(probs_RV, ranked_RK, top_k_R.clamp(max=num_ranked), top_p_R, noise_R)
    is_enough_R &= top_k_R <= num_ranked
    for row in (~is_enough_R).nonzero().flatten().tolist():
        one = slice(row, row + 1)
        ranked_RK = _rank(_distances(logits_RV[one]), int(top_k_R[row]) or vocab_size)
        tokens_R[one], _ = _draw_ranked(probs_RV[one], ranked_RK, top_k_R[one], top_p_R[one], noise_R[one])
    return _without_broken_rows(tokens_R, logits_RV)


def _distances(logits_RV: Tensor) -> Tensor:
    """How far each logit is below the row's best: the best exactly +0 (0 - -0 would be -0), +inf where masked."""
    return (logits_RV.amax(-1, keepdim=True) - logits_RV).abs_()


def _probabilities(distances_RV: Tensor, inputs: SamplingInputs) -> Tensor:
    """Apply temperature and min_p. Overwrites the distances; rows need not sum to 1 afterwards.

    The distance is divided, not the logit: the best stays 0, so that no temperature, however small, overflows.
    """
    temperature_R = inputs.temperature.to(distances_RV.device).clamp(min=torch.finfo(torch.float32).tiny)
    probs_RV = torch.softmax(distances_RV.div_(-temperature_R.unsqueeze(1)), dim=-1)
    if (inputs.min_p > 0).any():
        min_p_R = inputs.min_p.to(distances_RV.device)
        limit_R1 = (probs_RV.amax(-1) * min_p_R).unsqueeze(1)
        probs_RV = probs_RV.masked_fill_(probs_RV < limit_R1, 0.0)
    return probs_RV


def _rank(distances_RV: Tensor, num_ranked: int) -> Tensor:
    """Return the ids of the likeliest tokens in order, ties by id: [R, num_ranked].

    A distance is never negative, so its bits order as an integer does; with the id below them, no two keys are
    equal, and the order is the same however many are asked for.
    """
    ids_V = torch.arange(distances_RV.shape[1], device=distances_RV.device)
    keys_RV = distances_RV.view(torch.int32).to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids_V)
    if num_ranked == distances_RV.shape[1]:
        return sort(keys_RV) & 0xFFFFFFFF
    return keys_RV.topk(num_ranked, largest=False).values & 0xFFFFFFFF


def sort(keys_RV: Tensor) -> Tensor:
    """Sort each row. On a CPU numpy takes 0.15 ms for 49,152 keys (one core with AVX-512), torch 2.3 ms."""
    if keys_RV.device.type == "cpu":
        return torch.from_numpy(np.sort(keys_RV.numpy(), axis=-1))
    return keys_RV.sort(-1).values


def _draw_ranked(
    probs_RV: Tensor, ranked_RK: Tensor, top_k_R: Tensor, top_p_R: Tensor, noise_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw within top_k, then within the top_p share of what top_k left.

    Returns the tokens, and which rows had candidates enough: a row whose K candidates do not hold its mass had not.
    """
    cdf_RK = probs_RV.gather(1, ranked_RK).cumsum(-1)
    last_R1 = _last_kept(cdf_RK, probs_RV, top_k_R, top_p_R)
    is_enough_R = (last_R1 < ranked_RK.shape[1]).squeeze(1)
    end_R1 = cdf_RK.gather(1, last_R1.clamp(max=ranked_RK.shape[1] - 1))
    places_R = _invert(cdf_RK.minimum(end_R1), noise_R)
    return ranked_RK.gather(1, places_R.unsqueeze(1)).squeeze(1), is_enough_R


def _last_kept(cdf_RK: Tensor, probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Return the first place of each row that holds its mass, [R, 1]: K or more if the candidates do not hold it."""
    has_top_k_R1 = (top_k_R > 0).unsqueeze(1)
    mass_R1 = cdf_RK.gather(1, (top_k_R - 1).clamp(min=0).unsqueeze(1))
    if not has_top_k_R1.all():
        mass_R1 = torch.where(has_top_k_R1, mass_R1, probs_RV.cumsum(-1)[:, -1:])
    return torch.searchsorted(cdf_RK, mass_R1 * top_p_R.unsqueeze(1))


def _noise(inputs: SamplingInputs, device: torch.device) -> Tensor:
    return torch.from_numpy(uniforms(inputs.seeds, inputs.positions, DRAW_SAMPLE)).to(device)


def _invert(cdf_RK: Tensor, noise_R: Tensor) -> Tensor:
    """Return the first place of each row whose cumulated probability exceeds the noise's share of the total.

    Such a place adds to the sum, so a token of probability 0 is never drawn; and the target is kept below the
    total, which float32 may otherwise round it up to, so there always is one.
    """
    total_R = cdf_RK[:, -1]
    target_R = (noise_R * total_R).minimum(total_R.nextafter(torch.zeros_like(total_R)))
    return torch.searchsorted(cdf_RK, target_R.unsqueeze(1), right=True).squeeze(1).clamp_(max=cdf_RK.shape[1] - 1)


def _without_broken_rows(tokens_R: Tensor, logits_RV: Tensor) -> Tensor:
    return tokens_R.masked_fill_(~logits_RV.amax(-1).isfinite(), NO_TOKEN)
