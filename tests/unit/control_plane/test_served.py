"""The directory of served models: each name leads to the newest generation that lives."""

from dataclasses import replace

import pytest

from control_plane.engine.facts import Intake
from control_plane.engine.served import ServedModels
from plugins.errors import NotServing, UnknownModel
from plugins.types import GenerationId, WorkerId
from tests.unit.control_plane.admission.models import served_model

A, B, C = WorkerId("10.0.0.1:1"), WorkerId("10.0.0.2:1"), WorkerId("10.0.0.3:1")
OLD = replace(served_model("m"), generation=GenerationId("m-old"), ordinal=1)
NEW = replace(served_model("m"), generation=GenerationId("m-new"), ordinal=2)


def test_a_model_is_found_by_name_or_as_the_only_one() -> None:
    models = ServedModels()
    models.add(A, OLD)

    assert models.get("m") is OLD
    assert models.get("") is OLD


def test_an_unknown_name_and_an_empty_one_among_several_are_told_what_is_served() -> None:
    models = ServedModels()
    models.add(A, OLD)
    models.add(B, served_model("a"))

    with pytest.raises(UnknownModel, match="model 'x' is not served here; served: a, m"):
        models.get("x")
    with pytest.raises(UnknownModel, match="model '' is not served here"):
        models.get("")
    assert [model.worker.model.name for model in models.all()] == ["a", "m"]


def test_requests_get_the_newest_generation_that_lives_and_the_old_one_again_when_it_is_gone() -> None:
    models = ServedModels()
    models.add(A, OLD)
    models.add(B, NEW)
    models.add(C, OLD)
    with_both = models.get("m")

    models.remove(B)

    assert with_both is NEW
    assert models.get("m") is OLD


def test_a_newer_generation_that_drains_is_passed_over_as_long_as_an_older_one_takes_requests() -> None:
    intakes = {A: Intake.OPEN, B: Intake.OPEN}
    models = ServedModels(intakes.__getitem__)
    models.add(A, OLD)
    models.add(B, NEW)
    found = []

    for intakes[A], intakes[B] in [
        (Intake.OPEN, Intake.DRAINING),
        (Intake.PAUSED, Intake.DRAINING),
        (Intake.DRAINING, Intake.DRAINING),
        (Intake.OPEN, Intake.PAUSED),
        (Intake.DRAINING, Intake.OPEN),
    ]:
        models.note_intake()
        found.append((models.get("m"), models.open_names()))

    assert found == [(OLD, ("m",)), (OLD, ()), (NEW, ()), (NEW, ()), (NEW, ("m",))]


def test_a_model_is_served_until_its_last_worker_is_gone_and_then_it_is_told_why() -> None:
    models = ServedModels()
    models.add(A, OLD)
    models.add(B, OLD)
    models.remove(A)
    models.remove(A)
    still = models.get("m")
    models.remove(B)
    models.absence = "it was killed"

    with pytest.raises(NotServing, match="no model is served now: it was killed"):
        models.get("m")
    assert still is OLD
    assert models.all() == ()


def test_a_model_whose_workers_are_away_is_unavailable_beside_others_and_unknown_once_they_are_forgotten() -> None:
    models = ServedModels()
    models.add(A, OLD)
    models.add(B, served_model("a"))
    models.remove(A)
    models.absence = "it was killed"

    with pytest.raises(NotServing, match="model 'm' is not served now: it was killed"):
        models.get("m")
    models.forget(A)
    with pytest.raises(UnknownModel, match="model 'm' is not served here; served: a"):
        models.get("m")
