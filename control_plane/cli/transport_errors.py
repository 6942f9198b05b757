"""Says in our words what gRPC itself tells a client: no server, a lost connection, a limit, a deadline.

Errors that a server raised keep their own words; which calls are made is `client.py`'s business.
"""

import grpc

from plugins.errors import Code, DeadlineExceeded, ServingError
from protos.status import from_rpc_error

CLOCK_SLACK_S = 0.1  # the server's clock may run out so much before ours
STATUS_KEY = "grpc-status-details-bin"  # the trailer of every error that a server raised on purpose
UNKNOWN_HOST = ("errors resolving", "DNS resolution failed")
NO_CONNECTION = "failed to connect"


class NoServer(ServingError):
    """Nothing listens at the address."""

    code, reason = Code.UNAVAILABLE, "NO_SERVER"


class ServerGone(ServingError):
    """The server ended, or the connection to it broke, amid a call."""

    code, reason = Code.UNAVAILABLE, "SERVER_GONE"


class MessageTooLarge(ServingError):
    """A message is above the limit of the server's port."""

    code, reason = Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"


def translate(
    error: grpc.aio.AioRpcError, address: str, timeout_s: float | None = None, elapsed_s: float = 0.0
) -> ServingError:
    """Return our own error for what ended a call; `timeout_s` is what --timeout gave it, None: nothing."""
    details = error.details() or ""
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None and elapsed_s > timeout_s - CLOCK_SLACK_S:
        return DeadlineExceeded(f"the answer was not complete within {timeout_s:g} s; give it longer with --timeout")
    if any(key == STATUS_KEY for key, _ in error.trailing_metadata() or ()):
        return from_rpc_error(error)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"the server at {address} did not answer in time")
    if "message larger than max" in details:
        sizes = details.partition("(")[2].partition(")")[0].replace("vs.", "bytes, at most")
        return MessageTooLarge(f"the message is too large ({sizes}); send less, or raise server.max_message_mib")
    if "Cancelling all calls" in details:
        return ServerGone("the server stopped before the answer was complete: its server.drain_s had elapsed")
    if code is not grpc.StatusCode.UNAVAILABLE:
        return from_rpc_error(error)
    if any(sign in details for sign in UNKNOWN_HOST):
        return NoServer(f"the host of {address} is not known; correct the address")
    if NO_CONNECTION in details:
        return NoServer(f"no server answers at {address}; start one with `dihedral serve`")
    return ServerGone(f"the connection to the server at {address} was lost ({details})")
