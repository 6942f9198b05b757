"""On whose account a request runs, before whom it goes, how long it waits, and with whom it shares computed prompts.

Checks what was given; what a priority or a tenant's share means is the scheduler's business.
"""

import sys
from typing import Final

from control_plane.admission.submission import Submission
from control_plane.admission.texts import is_unicode
from plugins.errors import FieldViolation
from plugins.sampling_ranges import NumberRange, told

# Far enough apart for any order, near enough for sums of them.
PRIORITY: Final = NumberRange(-1000, 1000, "must be in [-1000, 1000], lower goes first", is_whole=True)
QUEUE_TIME: Final = NumberRange(
    0, sys.float_info.max, "must be a finite number above 0, or left out", is_optional=True, is_low_open=True
)
MAX_SALT_CHARACTERS = 256
MAX_TENANT_CHARACTERS = 128


def account_violations(submission: Submission, tenant_key: str) -> list[FieldViolation]:
    """Tell what is wrong with priority, max_queue_time_s, cache_salt and tenant."""
    violations = []
    for field, allowed in (("priority", PRIORITY), ("max_queue_time_s", QUEUE_TIME)):
        fault = allowed.fault(getattr(submission, field))
        if fault is not None:
            violations.append(FieldViolation(field, *fault))
    if submission.cache_salt != "":
        violations += _salt_violations(submission.cache_salt)
    if submission.tenant != "":
        violations += _tenant_violations(f"metadata.{tenant_key}", submission.tenant)
    return violations


def _salt_violations(salt: object) -> list[FieldViolation]:
    if not isinstance(salt, str):
        return [FieldViolation("cache_salt", "WRONG_TYPE", f"is {told(salt)}; must be a text")]
    if len(salt) > MAX_SALT_CHARACTERS:
        description = f"has {len(salt)} characters; at most {MAX_SALT_CHARACTERS} are allowed, send a hash of it"
        return [FieldViolation("cache_salt", "TOO_LONG", description)]
    if not is_unicode(salt):
        return [FieldViolation("cache_salt", "NOT_UNICODE", "is not valid Unicode; send a hash of it")]
    return []


def _tenant_violations(field: str, tenant: object) -> list[FieldViolation]:
    if not isinstance(tenant, str):
        return [FieldViolation(field, "WRONG_TYPE", f"is {told(tenant)}; must be a text")]
    if len(tenant) > MAX_TENANT_CHARACTERS:
        description = f"has {len(tenant)} characters; at most {MAX_TENANT_CHARACTERS} are allowed, shorten it"
        return [FieldViolation(field, "TOO_LONG", description)]
    if not (tenant.isascii() and tenant.isprintable()):
        return [FieldViolation(field, "NOT_PRINTABLE_ASCII", "may only contain printable ASCII characters")]
    return []
