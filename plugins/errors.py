"""Every error that Dihedral raises on purpose: a status code, a stable reason, a message with the numbers.

    ServingError
    |-- InvalidRequest          INVALID_ARGUMENT      one or more fields of a request
    |-- UnknownModel            NOT_FOUND
    |-- UnknownWorker           NOT_FOUND
    |-- DuplicateRequest        ALREADY_EXISTS
    |-- QueueFull               RESOURCE_EXHAUSTED    retry later
    |-- TenantQuotaExceeded     RESOURCE_EXHAUSTED    one tenant has too much at hand; retry later
    |-- QueuedTooLong           RESOURCE_EXHAUSTED    no row became free in time; retry later
    |-- ReaderTooSlow           RESOURCE_EXHAUSTED    the output was not read within admission.max_unread_s
    |-- SubscriberTooSlow       RESOURCE_EXHAUSTED    a stream of events was not read in time, and some are lost
    |-- NotServing              UNAVAILABLE           loading, draining, no worker; retry later
    |-- WorkerLost              UNAVAILABLE           the worker went away with the request
    |   |-- WorkerAbsent        UNAVAILABLE           there was none to connect to
    |   |-- WorkerLeaving       UNAVAILABLE           it stops on purpose; nothing is wrong with its requests
    |   `-- RecoveryTimedOut    UNAVAILABLE           no worker of its generation came in time
    |-- QueryOfDeath            INTERNAL              workers died of this request
    |-- WorkerTaken             ABORTED               another control plane of the same name has the worker now
    |-- EngineClosed            FAILED_PRECONDITION   also a RuntimeError; a LocalEngine is used after its end
    |-- DeadlineExceeded        DEADLINE_EXCEEDED
    |-- RequestCancelled        CANCELLED
    |-- IllegalMove             FAILED_PRECONDITION   a state cannot be reached from where it is
    |-- WorkerOwned             FAILED_PRECONDITION   another control plane owns the worker
    |-- WrongProtocol           FAILED_PRECONDITION   the two planes speak different versions
    |-- WorkerMismatch          FAILED_PRECONDITION   the two planes have different logits processors
    |-- PlanOutOfOrder          ABORTED               a gap or a stale epoch in the step stream
    |-- StepFailed              INTERNAL              one row of a step could not be computed
    |-- PluginFailed            INTERNAL              a hook raised
    |-- DetokenizerFailed       INTERNAL              the tokens of one output could not be turned into text
    |-- InvariantBroken         INTERNAL              a bug: the engine stops rather than guess
    `-- InvalidConfig           INVALID_ARGUMENT      also a ValueError; stops the start
        |-- ModelNotFound
        `-- ModelFileBroken

Translation to and from gRPC statuses is the business of `protos/status.py`.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Code(enum.IntEnum):
    """gRPC status codes by number, so that this package needs no gRPC."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14


class ServingError(Exception):
    """Base of all our errors. `code` and `reason` belong to the class; the message tells numbers and remedy."""

    code: Code = Code.INTERNAL
    reason: str = "INTERNAL"
    retry_after_s: float | None = None  # set: the same call may succeed after so long


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field of a request."""

    field: str  # path, such as sampling.top_p
    reason: str  # UPPER_SNAKE, stable
    description: str  # the value, its limit and the remedy


class InvalidRequest(ServingError):
    """Some fields of a request are out of their range; all of them are told together."""

    code, reason = Code.INVALID_ARGUMENT, "INVALID_REQUEST"

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{violation.field}: {violation.description}" for violation in self.violations))


class UnknownModel(ServingError):
    code, reason = Code.NOT_FOUND, "UNKNOWN_MODEL"

    def __init__(self, name: str, served: Sequence[str]) -> None:
        super().__init__(f"model {name!r} is not served here; served: {', '.join(served) or 'none yet'}")


class UnknownWorker(ServingError):
    code, reason = Code.NOT_FOUND, "UNKNOWN_WORKER"

    def __init__(self, worker_id: str, known: Sequence[str]) -> None:
        super().__init__(f"worker {worker_id!r} is not known here; known: {', '.join(known) or 'none yet'}")


class DuplicateRequest(ServingError):
    code, reason = Code.ALREADY_EXISTS, "DUPLICATE_REQUEST"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request_id {request_id!r} is already in flight; choose another or leave it empty")


class QueueFull(ServingError):
    code, reason = Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"

    def __init__(self, num_waiting: int, max_waiting: int, retry_after_s: float, unit: str = "requests") -> None:
        self.retry_after_s = retry_after_s
        what = f"{num_waiting} {unit} are" if num_waiting != 1 else f"1 {unit.removesuffix('s')} is"
        super().__init__(f"{what} waiting; at most {max_waiting} may; retry in {retry_after_s:g} s")


class TenantQuotaExceeded(ServingError):
    code, reason = Code.RESOURCE_EXHAUSTED, "TENANT_QUOTA_EXCEEDED"

    def __init__(self, tenant: str, num_requests: int, max_requests: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        requests = "1 request" if num_requests == 1 else f"{num_requests} requests"
        super().__init__(
            f"tenant {tenant!r} has {requests} at hand; at most {max_requests} may be "
            f"(admission.max_tenant_requests); retry in {retry_after_s:g} s"
        )


class QueuedTooLong(ServingError):
    code, reason = Code.RESOURCE_EXHAUSTED, "QUEUED_TOO_LONG"

    def __init__(self, waited_s: float, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"the request waited {waited_s:g} s for a row (its max_queue_time_s, or admission.max_queue_s); "
            f"retry in {retry_after_s:g} s"
        )


class ReaderTooSlow(ServingError):
    code, reason = Code.RESOURCE_EXHAUSTED, "READER_TOO_SLOW"

    def __init__(self, max_unread_s: float) -> None:
        super().__init__(f"nobody read the output for {max_unread_s:g} s (admission.max_unread_s); read faster")


class SubscriberTooSlow(ServingError):
    code, reason = Code.RESOURCE_EXHAUSTED, "SUBSCRIBER_TOO_SLOW"

    def __init__(self, max_unread: int) -> None:
        super().__init__(
            f"{max_unread} events were left unread, and further ones are lost; forget what the events told, "
            "subscribe again, and read faster"
        )


class NotServing(ServingError):
    code, reason = Code.UNAVAILABLE, "NOT_SERVING"

    def __init__(self, why: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{why}; retry in {retry_after_s:g} s")


class WorkerLost(ServingError):
    code, reason = Code.UNAVAILABLE, "WORKER_LOST"

    def __init__(self, why: str) -> None:
        self.retry_after_s = 1.0
        super().__init__(f"the worker went away: {why}")


class WorkerAbsent(WorkerLost):
    reason = "WORKER_ABSENT"

    def __init__(self, why: str) -> None:
        self.retry_after_s = 1.0
        ServingError.__init__(self, why)


class WorkerLeaving(WorkerLost):
    reason = "WORKER_LEAVING"

    def __init__(self, why: str) -> None:
        self.retry_after_s = 1.0
        ServingError.__init__(self, f"the worker is leaving: {why}")


class RecoveryTimedOut(WorkerLost):
    reason = "RECOVERY_TIMED_OUT"

    def __init__(self, waited_s: float) -> None:
        self.retry_after_s = 1.0
        ServingError.__init__(
            self,
            f"the worker went away, and no other of its generation came within {waited_s:g} s "
            "(workers.recovery_timeout_s); retry in 1 s",
        )


class QueryOfDeath(ServingError):
    code, reason = Code.INTERNAL, "QUERY_OF_DEATH"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"at least two workers died while they computed request {request_id!r}; it is not tried again")


class WorkerTaken(ServingError):
    code, reason = Code.ABORTED, "WORKER_TAKEN"

    def __init__(self, owner_id: str) -> None:
        super().__init__(
            f"another control plane that calls itself {owner_id!r} took the worker over; stop one of them, or give "
            "each a workers.owner_id and a worker of its own"
        )


class EngineClosed(ServingError, RuntimeError):
    code, reason = Code.FAILED_PRECONDITION, "ENGINE_CLOSED"

    def __init__(self) -> None:
        super().__init__("the engine is closed; make another one")


class DeadlineExceeded(ServingError):
    code, reason = Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"


class RequestCancelled(ServingError):
    code, reason = Code.CANCELLED, "REQUEST_CANCELLED"


class IllegalMove(ServingError):
    code, reason = Code.FAILED_PRECONDITION, "ILLEGAL_MOVE"

    def __init__(self, what: str, now: str, to: str, legal: Sequence[str]) -> None:
        super().__init__(f"{what} cannot move from {now} to {to}; from there it may move to {' or '.join(legal)}")


class WorkerOwned(ServingError):
    code, reason = Code.FAILED_PRECONDITION, "WORKER_OWNED"

    def __init__(self, owner_id: str, lease_left_s: float) -> None:
        super().__init__(
            f"control plane {owner_id!r} owns this worker (its lease ends {lease_left_s:.1f} s after its stream); "
            "stop it, or give this control plane another worker"
        )


class WrongProtocol(ServingError):
    code, reason = Code.FAILED_PRECONDITION, "WRONG_PROTOCOL"

    def __init__(self, theirs: int, ours: int) -> None:
        super().__init__(f"the peer speaks step protocol {theirs}, this process {ours}; run the same release on both")


class WorkerMismatch(ServingError):
    code, reason = Code.FAILED_PRECONDITION, "WORKER_MISMATCH"

    def __init__(self, theirs: Sequence[str], ours: Sequence[str]) -> None:
        super().__init__(
            f"the worker has the logits processors {', '.join(theirs) or '<none>'}, this control plane "
            f"{', '.join(ours) or '<none>'}; install the same plug-ins and set the same plugins.logits_processors on "
            "both"
        )


class PlanOutOfOrder(ServingError):
    code, reason = Code.ABORTED, "PLAN_OUT_OF_ORDER"


class StepFailed(ServingError):
    """A row failed on the worker. `reason` is the row's own; a grammar that leads nowhere is the caller's fault."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        if reason in ("GRAMMAR_TOO_COMPLEX", "INVALID_GRAMMAR"):
            self.code = Code.INVALID_ARGUMENT
        super().__init__(message)


class PluginFailed(ServingError):
    code, reason = Code.INTERNAL, "PLUGIN_FAILED"


class DetokenizerFailed(ServingError):
    """Tells the kind of what the tokenizer raised; its message may quote the output."""

    code, reason = Code.INTERNAL, "DETOKENIZER_FAILED"

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the output could not be turned into text: the tokenizer raised {type(error).__name__}")


class InvariantBroken(ServingError):
    """Something that cannot be is. A bug of ours; never caught to carry on."""

    code, reason = Code.INTERNAL, "INVARIANT_BROKEN"


class InvalidConfig(ServingError, ValueError):
    """The configuration cannot work. The message names the key, the value and the remedy."""

    code, reason = Code.INVALID_ARGUMENT, "INVALID_CONFIG"


class ModelNotFound(InvalidConfig):
    """The named model is not there."""

    reason = "MODEL_NOT_FOUND"


class ModelFileBroken(InvalidConfig):
    """A model's file is damaged, incomplete or of an unknown kind. The message names file and tensor."""

    reason = "MODEL_FILE_BROKEN"
