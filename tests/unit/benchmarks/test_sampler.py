"""The cases of the sampler's benchmark, and the watch that times it."""

from typing import Any

import pytest
import torch

from benchmarks.sampler import RepeatedModel, Stopwatch, choose, features
from gpu_worker.sampling.pipeline import SamplingPipeline
from plugins.errors import InvalidConfig
from plugins.types import SamplingParams


def test_every_feature_is_something_that_a_request_can_ask_for() -> None:
    asked = {name: SamplingParams(**{"temperature": 0.8} | dict(given)) for name, given in features().items()}

    plain = asked.pop("temperature")
    assert plain == SamplingParams(temperature=0.8)
    assert [name for name, params in asked.items() if params == plain] == []


def test_features_are_chosen_by_name_and_an_unknown_one_is_told_with_those_there_are() -> None:
    known: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "top-k, top-p": {"top_k": 40}}

    assert list(choose("top-k, top-p; greedy", known)) == ["top-k, top-p", "greedy"]
    assert list(choose("", known)) == ["greedy", "top-k, top-p"]
    with pytest.raises(InvalidConfig, match="there is no 'fast'; there are greedy; top-k, top-p"):
        choose("fast", known)


def test_the_watch_leaves_the_pipeline_as_it_was() -> None:
    before = SamplingPipeline.sample

    with Stopwatch() as watch:
        assert SamplingPipeline.sample is not before

    assert SamplingPipeline.sample is before
    assert watch.elapsed_s == 0.0


def test_a_model_repeats_what_it_answered_to_as_many_rows_and_nobody_can_spoil_it() -> None:
    asked: list[int] = []

    class Doubling:
        def forward(self, inputs: Any, cache: Any) -> torch.Tensor:
            raise NotImplementedError

        def head(self, x_RE: torch.Tensor) -> torch.Tensor:
            asked.append(len(x_RE))
            return x_RE * 2

    model = RepeatedModel(Doubling())
    first = model.head(torch.ones(1, 2))
    first.zero_()

    model.is_computed = False
    repeated, other = model.head(torch.zeros(1, 2)), model.head(torch.ones(3, 2))

    assert repeated.tolist() == [[2.0, 2.0]]
    assert other.tolist() == [[2.0, 2.0]] * 3
    assert asked == [1, 3]
