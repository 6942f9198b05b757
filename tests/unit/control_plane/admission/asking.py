"""Short ways to ask admission: what becomes of a request with these sampling parameters."""

from typing import Any

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.submission import Submission
from control_plane.admission.validator import Validator
from control_plane.engine.served import ServedModel
from plugins.errors import InvalidRequest
from plugins.types import SamplingParams
from tests.unit.control_plane.admission.models import directory, served_model

SMALL = served_model()
NAN, INFINITY = float("nan"), float("inf")


def validator(model: ServedModel = SMALL, config: AdmissionConfig | None = None, **hooks: Any) -> Validator:
    """One model, 270 tokens, a context of 128; every seed drawn is 77."""
    return Validator(directory(model), config or AdmissionConfig(), lambda: 77, lambda: "drawn", **hooks)


def admitted(checker: Validator | None = None, prompt: int = 1, **sampling: object) -> SamplingParams:
    """The parameters of the only output of a request with a prompt of so many tokens."""
    submission = Submission(token_ids=[3] * prompt, sampling=sampling)
    (request,) = (checker or validator()).validate(submission).requests
    return request.sampling


def refused(checker: Validator | None = None, prompt: int = 1, **sampling: object) -> list[tuple[str, str, str]]:
    """Everything that is wrong with a request: field, reason, description."""
    with pytest.raises(InvalidRequest) as raised:
        (checker or validator()).validate(Submission(token_ids=[3] * prompt, sampling=sampling))
    return [(each.field, each.reason, each.description) for each in raised.value.violations]


def only(checker: Validator | None = None, prompt: int = 1, **sampling: object) -> tuple[str, str, str]:
    """The one thing that is wrong with a request."""
    (violation,) = refused(checker, prompt, **sampling)
    return violation
