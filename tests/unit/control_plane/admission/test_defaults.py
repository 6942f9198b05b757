"""What a request gets that does not say otherwise: the model's word, and the operator's over it."""

from dataclasses import replace

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.defaults import DefaultSampling
from control_plane.admission.submission import Submission
from control_plane.admission.validator import Validator
from control_plane.engine.served import ServedModels
from plugins.errors import InvalidConfig
from plugins.types import SamplingParams, WorkerId
from tests.unit.control_plane.admission.asking import SMALL

OWN = SamplingParams(temperature=0.6, top_k=20, max_tokens=9)
MODEL = replace(SMALL, worker=replace(SMALL.worker, model=replace(SMALL.worker.model, default_sampling=OWN)))


def default_sampling(config: AdmissionConfig) -> SamplingParams:
    """What GetModel tells of the model."""
    return served(config).get("small").worker.model.default_sampling


def served(config: AdmissionConfig) -> ServedModels:
    models = ServedModels(as_served=DefaultSampling(config.default_sampling, config.model_defaults).apply)
    models.add(WorkerId("10.0.0.1:50061"), MODEL)
    return models


def test_a_model_s_own_defaults_hold_for_what_was_not_given() -> None:
    checker = Validator(served(AdmissionConfig()), AdmissionConfig(), lambda: 77)

    (request,) = checker.validate(Submission(token_ids=[3], sampling={"top_k": 0})).requests

    assert request.sampling == SamplingParams(temperature=0.6, top_k=0, max_tokens=9, seed=77)


def test_the_operator_s_defaults_win_over_the_model_s() -> None:
    config = AdmissionConfig(default_sampling=" temperature=0.7, top_p=0.9,ignore_eos = TRUE,, ")

    assert default_sampling(config) == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=20, max_tokens=9, ignore_eos=True
    )


def test_the_operator_may_ignore_the_model_s_defaults() -> None:
    config = AdmissionConfig(model_defaults=False, default_sampling="min_p=0.1")

    assert default_sampling(config) == SamplingParams(min_p=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature=hot", "temperature must be a number, is 'hot'"),
        ("temperature=nan", r"temperature is nan; must be in \[0, 100\], 0 is greedy"),
        ("temperature=101", r"temperature is 101.0; must be in \[0, 100\], 0 is greedy"),
        ("top_k=1.5", "top_k must be a whole number, is '1.5'"),
        ("top_k=-1", r"top_k is -1; must be in \[0, 2\*\*32\), 0 keeps all tokens"),
        ("ignore_eos=1", "ignore_eos must be true or false, is '1'"),
        ("temperature", "temperature must be a number, is ''"),
        ("heat=1", "must be name=value with one of max_tokens, min_tokens, temperature, .*; is 'heat=1'"),
        ("stop=a", "must be name=value with one of"),
        ("n=2", "must be name=value with one of"),
        ("top_p=0.5,top_p=0.6", "names top_p twice"),
        ("min_tokens=5,max_tokens=4", r"min_tokens is 5; must be in \[0, 4\], which is max_tokens"),
    ],
)
def test_a_default_that_no_request_could_ask_for_stops_the_start(text: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=f"admission.default_sampling.*{message}"):
        AdmissionConfig(default_sampling=text)
