"""Penalties at the ends of their range leave scores that a token can be drawn from, and mend none that cannot."""

import pytest
import torch

from tests.unit.gpu_worker.sampling.tables import Tables, apply, take


@pytest.mark.parametrize("penalty", [2.0**-149, 1e-38, 100.0])
def test_no_repetition_penalty_makes_a_score_infinite(penalty: float) -> None:
    """Case B002: what is admitted is served, also just above the lower end."""
    tables = Tables(vocab_size=8)
    tables.put(3, (1, 2), (4,))
    stages = tables.stages()
    take(stages, 3, repetition_penalty=penalty)

    scores = apply(stages, torch.tensor([[0.0, 1e30, -1e30, 5.0, 5.0, -5.0, 0.5, 0.0]]), tables.context(3))

    assert scores.isfinite().all()
    assert scores[0, 3].item() == 5.0


@pytest.mark.parametrize("penalties", [{"repetition_penalty": 1.5}, {"presence_penalty": 1.0}])
@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_a_score_that_is_not_finite_stays_so_and_fails_its_row(broken: float, penalties: dict[str, float]) -> None:
    tables = Tables(vocab_size=8)
    tables.put(3, (1, 2), (4,))
    stages = tables.stages()
    take(stages, 3, **penalties)

    scores = apply(stages, torch.tensor([[0.0, 1.0, broken, 5.0, broken, -5.0, 0.5, 0.0]]), tables.context(3))

    assert scores[0, [2, 4]].tolist() == pytest.approx([broken] * 2, nan_ok=True)
