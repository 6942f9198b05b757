"""Runs a list of checks and tells which ones hold. What is checked is in the module of each hook."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class CheckFailed(Exception):
    """What is checked breaks a promise of its hook; the message says which, and where."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of a report."""

    name: str  # a sentence about what should hold
    passed: bool
    why: str = ""  # what happened instead


def run_checks(checks: Iterable[Callable[[T], None]], subject: T) -> tuple[CheckResult, ...]:
    """Run every check, whatever became of the others. An exception of the plug-in fails the check it came from."""
    return tuple(_run(check, subject) for check in checks)


def require(holds: bool, message: str) -> None:
    """Raises: CheckFailed: it does not hold."""
    if not holds:
        raise CheckFailed(message)


def _run(check: Callable[[T], None], subject: T) -> CheckResult:
    name = check.__name__.replace("_", " ")
    try:
        check(subject)
    except CheckFailed as failure:
        return CheckResult(name, False, str(failure))
    except (Exception, SystemExit) as error:  # a plug-in may raise anything
        return CheckResult(name, False, f"{type(error).__name__}: {error}")
    return CheckResult(name, True)
