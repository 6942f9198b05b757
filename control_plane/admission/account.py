"""On whose account a request runs, before whom it goes, and with whom it shares computed prompts.

Checks what was given; what a priority or a tenant's share means is the scheduler's business.
"""

from control_plane.admission.submission import Submission
from plugins.errors import FieldViolation

MIN_PRIORITY, MAX_PRIORITY = -1000, 1000  # far enough apart for any order, near enough for sums of them
MAX_SALT_CHARACTERS = 256
MAX_TENANT_CHARACTERS = 128


def account_violations(submission: Submission, tenant_key: str) -> list[FieldViolation]:
    """Tell what is wrong with priority, cache_salt and tenant."""
    violations = []
    priority = submission.priority
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        description = f"is {priority}; must be in [{MIN_PRIORITY}, {MAX_PRIORITY}], lower goes first"
        violations.append(FieldViolation("priority", "OUT_OF_RANGE", description))
    num_characters = len(submission.cache_salt)
    if num_characters > MAX_SALT_CHARACTERS:
        description = f"has {num_characters} characters; at most {MAX_SALT_CHARACTERS} are allowed, send a hash of it"
        violations.append(FieldViolation("cache_salt", "TOO_LONG", description))
    elif not _is_unicode(submission.cache_salt):
        violations.append(FieldViolation("cache_salt", "NOT_UNICODE", "is not valid Unicode; send a hash of it"))
    return violations + _tenant_violations(f"metadata.{tenant_key}", submission.tenant)


def _tenant_violations(field: str, tenant: str) -> list[FieldViolation]:
    if len(tenant) > MAX_TENANT_CHARACTERS:
        description = f"has {len(tenant)} characters; at most {MAX_TENANT_CHARACTERS} are allowed, shorten it"
        return [FieldViolation(field, "TOO_LONG", description)]
    if not (tenant.isascii() and tenant.isprintable()):
        return [FieldViolation(field, "NOT_PRINTABLE_ASCII", "may only contain printable ASCII characters")]
    return []


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
