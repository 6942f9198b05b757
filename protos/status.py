"""Turns our errors into gRPC statuses and back, once in each direction.

A status carries google.rpc details: ErrorInfo with the stable reason, BadRequest with every violated field, RetryInfo
when the same call may succeed later. Which handler's errors are translated is the business of `protos/interceptor.py`.
"""

from collections.abc import Iterator
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from plugins.errors import (
    Code,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    NotServing,
    RequestCancelled,
    ServingError,
)

DOMAIN: Final = "dihedral"
RETRY_PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"  # what gRPC clients themselves obey; RetryInfo is for people

# Everything below goes into trailers, which peers refuse above 8 KiB, and the message goes there twice.
MAX_MESSAGE_BYTES: Final = 1024
MAX_VIOLATIONS_BYTES: Final = 3072

# What a status means that does not come from us, such as one that the transport made.
_BY_CODE: Final[dict[Code, type[ServingError]]] = {
    Code.CANCELLED: RequestCancelled,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.UNAVAILABLE: NotServing,
}


def to_status(error: ServingError) -> Status:
    """Tell an error as a google.rpc.Status. What is too long for trailers is cut; the first violations stay."""
    status = Status(code=error.code, message=_cut(str(error), MAX_MESSAGE_BYTES))
    status.details.add().Pack(ErrorInfo(reason=error.reason, domain=DOMAIN))
    if isinstance(error, InvalidRequest):
        status.details.add().Pack(_bad_request(error))
    if error.retry_after_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(_milliseconds(error.retry_after_s))
        status.details.add().Pack(retry)
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServingError) -> NoReturn:
    """End a call with this error's status. Raises what `context.abort` raises, as the last thing a handler does."""
    status = rpc_status.to_status(to_status(error))
    trailing = [*status.trailing_metadata]
    if error.retry_after_s is not None:
        trailing.append((RETRY_PUSHBACK_KEY, str(_milliseconds(error.retry_after_s))))
    await context.abort(status.code, status.details, tuple(trailing))


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServingError:
    """Give back the error that the peer raised: of its class if the reason is one of ours, else by its code."""
    details = _details(error)
    reason = next((one.reason for one in details if isinstance(one, ErrorInfo)), None)
    code = _code(error)
    message = error.details() or error.code().name
    if reason is None:
        found = _with_message(_BY_CODE.get(code, ServingError), message)
        if type(found) is ServingError:
            found.code, found.reason = code, error.code().name
    else:
        found = from_reason(reason, message)
        found.code = code
    for one in details:
        if isinstance(one, RetryInfo):
            found.retry_after_s = one.retry_delay.ToMilliseconds() / 1000
        if isinstance(one, BadRequest) and isinstance(found, InvalidRequest):
            found.violations = tuple(
                FieldViolation(violation.field, violation.reason, violation.description)
                for violation in one.field_violations
            )
    return found


def from_reason(reason: str, message: str) -> ServingError:
    """Give back an error by its stable reason, with the message that it had."""
    found = _with_message(_by_reason().get(reason, ServingError), message)
    found.reason = reason
    return found


def _bad_request(error: InvalidRequest) -> BadRequest:
    bad_request = BadRequest()
    for violation in error.violations:
        bad_request.field_violations.add(
            field=_cut(violation.field, 256),
            reason=violation.reason,
            description=_cut(violation.description, MAX_MESSAGE_BYTES),
        )
        if bad_request.ByteSize() > MAX_VIOLATIONS_BYTES:
            del bad_request.field_violations[-1]
            break
    return bad_request


def _cut(text: str, max_bytes: int) -> str:
    """Shorten to whole characters. What is no text, such as half a surrogate pair in a path, becomes '?'."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - len("...")].decode(errors="ignore") + "..."


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _details(error: grpc.aio.AioRpcError) -> list[Any]:
    """The details that we know how to read; a status of another kind, or a damaged one, has none."""
    known = (ErrorInfo, BadRequest, RetryInfo)
    found: list[Any] = []
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the error has the three methods that it calls
        for packed in status.details if status else ():
            for kind in known:
                if packed.Is(kind.DESCRIPTOR):
                    found.append(kind.FromString(packed.value))
    except (ValueError, DecodeError):
        return []
    if not any(isinstance(one, ErrorInfo) and one.domain == DOMAIN for one in found):
        return []
    return found


def _code(error: grpc.aio.AioRpcError) -> Code:
    number, _ = error.code().value
    return Code(number) if number in set(Code) else Code.INTERNAL


def _by_reason() -> dict[str, type[ServingError]]:
    return {cls.reason: cls for cls in _subclasses(ServingError) if "reason" in vars(cls)}


def _subclasses(cls: type[ServingError]) -> Iterator[type[ServingError]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _with_message(cls: type[ServingError], message: str) -> ServingError:
    """Make an error with the message that came, in place of the numbers that its constructor makes one from."""
    error = cls.__new__(cls, message)
    if isinstance(error, InvalidRequest):
        error.violations = ()
    return error
