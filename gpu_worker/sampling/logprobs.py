"""Log-probabilities of the tokens that were chosen, for the rows that ask.

Everything is computed on the device when the step is launched, and read when its result is. A row that does not ask
costs a look-up. What is told of prompts is the business of `prompt_logprobs.py`.

Shapes: R = rows of logits, V = vocabulary, A = the rows meant, K = tokens told besides the chosen one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from gpu_worker.sampling.sampler import SamplingInputs, kept_logprobs, rows_at_a_time, select, sort
from plugins.types import Admission, LogprobsMode, Row, TokenId, TokenLogprobs

_ID_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of some places, on the device: first the token that is there, then K others."""

    token_ids: Tensor  # [A, 1 + K] int64
    logprobs: Tensor  # [A, 1 + K] float32
    ranks: Tensor  # [A, 1 + K] int64

    def read(self, num_others: Sequence[int]) -> list[TokenLogprobs]:
        """Wait for the device; return one entry for each place, with so many of its others."""
        columns = (self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), num_others)
        return [
            TokenLogprobs(tuple(token_ids[: 1 + num]), tuple(logprobs[: 1 + num]), tuple(ranks[: 1 + num]))
            for token_ids, logprobs, ranks, num in zip(*columns, strict=True)
        ]


def tell_likeliest(scores_AV: Tensor, logprobs_AV: Tensor, tokens_A: Tensor, num_others: int) -> Told:
    """Tell the tokens and the likeliest ones. Ranks are those of the scores; among equal ones the lower id is first."""
    keys_AV = _keys(scores_AV)
    tokens_A1 = tokens_A.unsqueeze(1)
    ranks_A1 = (keys_AV < keys_AV.gather(1, tokens_A1)).sum(-1, keepdim=True) + 1
    num_others = min(num_others, scores_AV.shape[1])
    others_AK = keys_AV.topk(num_others, largest=False).values & _ID_BITS
    ranks_AK = torch.arange(1, num_others + 1, device=tokens_A.device).expand_as(others_AK)
    token_ids = torch.cat((tokens_A1, others_AK), 1)
    return Told(token_ids, logprobs_AV.gather(1, token_ids), torch.cat((ranks_A1, ranks_AK), 1))


def tell_chosen(scores_AV: Tensor, logprobs_AV: Tensor, tokens_A: Tensor, others_AK: Tensor) -> Told:
    """Tell the tokens and some others that were named, in their order. Sorts the rows to know the ranks of them all."""
    keys_AV = _keys(scores_AV)
    token_ids = torch.cat((tokens_A.unsqueeze(1), others_AK), 1)
    ranks = torch.searchsorted(sort(keys_AV), keys_AV.gather(1, token_ids)) + 1
    return Told(token_ids, logprobs_AV.gather(1, token_ids), ranks)


def _keys(scores_AV: Tensor) -> Tensor:
    """Return integers that grow from the best score to the worst, no two of a row alike: below them is the id."""
    bits_AV = (scores_AV + 0.0).view(torch.int32)  # -0 becomes 0, its equal
    bits_AV.bitwise_xor_((bits_AV >> 31).bitwise_and_(0x7FFFFFFF)).bitwise_not_()  # as floats order, backwards
    ids_V = torch.arange(scores_AV.shape[1], device=scores_AV.device)
    return bits_AV.long().bitwise_left_shift_(32).bitwise_or_(ids_V)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What one request wants to be told."""

    mode: LogprobsMode
    num_likeliest: int
    token_ids: tuple[TokenId, ...]  # instead of the likeliest ones, if there are any

    @property
    def num_others(self) -> int:
        return len(self.token_ids) or self.num_likeliest


@dataclass(frozen=True, slots=True)
class Asked:
    """The rows of one step that ask, and the model's own scores of those who want to know them."""

    wishes: dict[int, _Wish]  # by row of logits
    raw_scores: dict[int, int]  # row of logits: where its scores are in the next
    raw_scores_AV: Tensor


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """What is told of one step."""

    groups: tuple[tuple[Sequence[int], Sequence[int], Told], ...]  # rows of logits, how many others each wants, columns

    def read(self) -> dict[int, TokenLogprobs]:
        """Wait for the device; return what is told, by row of logits."""
        return {
            row: each
            for rows, num_others, told in self.groups
            for row, each in zip(rows, told.read(num_others), strict=True)
        }


class Logprobs:
    """Who wants to be told of chosen tokens. Owned by the pipeline; called from the device thread alone."""

    def __init__(self) -> None:
        self._wishes: dict[Row, _Wish] = {}

    def admit(self, admission: Admission) -> None:
        """Take a new occupant of a row."""
        sampling = admission.sampling
        self._wishes.pop(admission.row, None)
        if sampling.logprobs is not None:
            wish = _Wish(sampling.logprobs_mode, sampling.logprobs, sampling.logprob_token_ids)
            self._wishes[admission.row] = wish

    def release(self, rows: Sequence[Row]) -> None:
        """Forget some rows."""
        for row in rows:
            self._wishes.pop(row, None)

    def clear(self) -> None:
        """Forget every row."""
        self._wishes.clear()

    def look(self, logits_RV: Tensor, rows_R: np.ndarray) -> Asked | None:
        """Keep the model's own scores, before any stage, of the rows that ask for them. None: nobody asks anything."""
        if not self._wishes:
            return None
        wishes = {place: self._wishes[row] for place, row in enumerate(rows_R.tolist()) if row in self._wishes}
        if not wishes:
            return None
        raw = [place for place, wish in wishes.items() if wish.mode is LogprobsMode.RAW]
        kept_AV = logits_RV.index_select(0, torch.tensor(raw, dtype=torch.int64, device=logits_RV.device))
        return Asked(wishes, {place: index for index, place in enumerate(raw)}, kept_AV)


def tell(asked: Asked, logits_RV: Tensor, inputs: SamplingInputs, tokens_R: Tensor) -> SampledLogprobs:
    """Tell of the tokens that were chosen from these logits, behind all stages. Nothing waits for the device."""
    groups = []
    num_rows = rows_at_a_time(logits_RV)
    for mode, has_token_ids in product(LogprobsMode, (False, True)):
        alike = [
            place for place, wish in asked.wishes.items() if (wish.mode, bool(wish.token_ids)) == (mode, has_token_ids)
        ]
        for start in range(0, len(alike), num_rows):
            places = alike[start : start + num_rows]
            scores_AV, logprobs_AV = _scores(asked, mode, places, logits_RV, inputs)
            tokens_A = tokens_R.index_select(0, torch.tensor(places, device=tokens_R.device)).clamp(min=0)
            wishes = [asked.wishes[place] for place in places]
            num_others = [wish.num_others for wish in wishes]
            if has_token_ids:
                others_AK = torch.zeros((len(places), max(num_others)), dtype=torch.int64)
                for index, wish in enumerate(wishes):
                    others_AK[index, : wish.num_others] = torch.tensor(wish.token_ids)
                told = tell_chosen(scores_AV, logprobs_AV, tokens_A, others_AK.to(tokens_A.device))
            else:
                told = tell_likeliest(scores_AV, logprobs_AV, tokens_A, max(num_others))
            groups.append((places, num_others, told))
    return SampledLogprobs(tuple(groups))


def _scores(
    asked: Asked, mode: LogprobsMode, places: Sequence[int], logits_RV: Tensor, inputs: SamplingInputs
) -> tuple[Tensor, Tensor]:
    """Return the scores of some rows, as they want them, and their log-probabilities: [A, V] each."""
    if mode is LogprobsMode.RAW:
        indices_A = torch.tensor([asked.raw_scores[place] for place in places], device=logits_RV.device)
        scores_AV = asked.raw_scores_AV.index_select(0, indices_A)
        return scores_AV, scores_AV.log_softmax(-1)
    rows_A = torch.tensor(places)
    scores_AV = logits_RV.index_select(0, rows_A.to(logits_RV.device))
    logprobs_AV = kept_logprobs(scores_AV, select(inputs, rows_A))
    return scores_AV.masked_fill_(logprobs_AV == -torch.inf, -torch.inf), logprobs_AV
