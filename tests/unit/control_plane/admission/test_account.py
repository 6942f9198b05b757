"""Priority, tenant and salt: what is taken, and what is refused with which words."""

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.submission import Submission
from control_plane.admission.validator import Validator
from plugins.errors import InvalidRequest
from tests.unit.control_plane.admission.models import directory, served_model


def validator(tenant_key: str = "dihedral-tenant") -> Validator:
    return Validator(directory(served_model()), AdmissionConfig(tenant_key=tenant_key), lambda: 1)


def refusal(submission: Submission, checker: Validator | None = None) -> tuple[str, str, str]:
    with pytest.raises(InvalidRequest) as refused:
        (checker or validator()).validate(submission)
    (violation,) = refused.value.violations
    return violation.field, violation.reason, violation.description


def test_priority_tenant_and_salt_reach_the_request() -> None:
    submission = Submission(text="a", priority=-3, tenant="team red", cache_salt="pinch")

    (request,) = validator().validate(submission).requests

    assert (request.priority, request.tenant, request.cache_salt) == (-3, "team red", "pinch")


def test_who_gives_none_is_everybody_with_priority_0_and_no_salt() -> None:
    (request,) = validator().validate(Submission(text="a")).requests

    assert (request.priority, request.tenant, request.cache_salt) == (0, "", "")


@pytest.mark.parametrize("priority", [-1000, 1000])
def test_the_outermost_priorities_are_taken(priority: int) -> None:
    assert validator().validate(Submission(text="a", priority=priority)).requests[0].priority == priority


@pytest.mark.parametrize("priority", [-1001, 1001, -(2**31), 2**31 - 1])
def test_a_priority_beyond_them_is_refused(priority: int) -> None:
    assert refusal(Submission(text="a", priority=priority)) == (
        "priority",
        "OUT_OF_RANGE",
        f"is {priority}; must be in [-1000, 1000], lower goes first",
    )


def test_a_salt_may_have_256_characters_of_any_kind() -> None:
    assert validator().validate(Submission(text="a", cache_salt="é" * 256)).requests[0].cache_salt == "é" * 256


@pytest.mark.parametrize(
    ("salt", "reason", "description"),
    [
        ("s" * 257, "TOO_LONG", "has 257 characters; at most 256 are allowed, send a hash of it"),
        ("a\ud800", "NOT_UNICODE", "is not valid Unicode; send a hash of it"),
    ],
)
def test_a_salt_that_cannot_be_one_is_refused(salt: str, reason: str, description: str) -> None:
    assert refusal(Submission(text="a", cache_salt=salt)) == ("cache_salt", reason, description)


def test_a_tenant_may_have_128_characters() -> None:
    assert validator().validate(Submission(text="a", tenant="~" * 128)).requests[0].tenant == "~" * 128


@pytest.mark.parametrize(
    ("tenant", "reason", "description"),
    [
        ("t" * 129, "TOO_LONG", "has 129 characters; at most 128 are allowed, shorten it"),
        ("a\nb", "NOT_PRINTABLE_ASCII", "may only contain printable ASCII characters"),
        ("é", "NOT_PRINTABLE_ASCII", "may only contain printable ASCII characters"),
    ],
)
def test_a_tenant_that_cannot_be_one_is_refused_under_the_name_of_its_metadata_key(
    tenant: str, reason: str, description: str
) -> None:
    checker = validator(tenant_key="x-team")

    assert refusal(Submission(text="a", tenant=tenant), checker) == ("metadata.x-team", reason, description)
