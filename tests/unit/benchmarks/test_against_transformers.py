"""The verdict of the race, and that both competitors have the same weights."""

import torch

from benchmarks.against_transformers import Round, judge, load_reference
from gpu_worker.config import WorkerConfig
from gpu_worker.loading.open import open_model


def test_the_verdict_is_the_ratio_of_medians() -> None:
    rounds = [Round(20.0, 25.0, 90.0), Round(10.0, 24.0, 100.0), Round(22.0, 50.0, 10.0)]

    verdict = judge(rounds)

    assert (verdict.transformers_1, verdict.dihedral_1, verdict.dihedral_8) == (20.0, 25.0, 90.0)
    assert (verdict.one_stream, verdict.eight_streams) == (1.25, 4.5)
    assert verdict.holds


def test_either_ratio_under_its_floor_loses() -> None:
    assert not judge([Round(20.0, 19.9, 90.0)]).holds
    assert not judge([Round(20.0, 20.0, 79.0)]).holds
    assert judge([Round(20.0, 20.0, 80.0)]).holds


def test_the_reference_holds_the_weights_of_the_served_model() -> None:
    config = WorkerConfig(load_format="dummy", seed=3)
    weights = dict(open_model(config)[0].weights())

    reference = load_reference(config)

    state = reference.state_dict()
    assert len(weights) > 10
    assert set(state) - set(weights) <= {"lm_head.weight"}  # tied to the embedding
    assert all(torch.equal(state[name], weight.to(torch.bfloat16)) for name, weight in weights.items())
