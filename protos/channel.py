"""The options of every gRPC server and channel, and how a server takes its port.

gRPC ignores an option whose name it does not know: these names exist, and tests hold both ends to what they do.
"""

from typing import Final

import grpc

from plugins.errors import InvalidConfig

Options = tuple[tuple[str, int], ...]

MIB: Final = 1024 * 1024
MAX_PENDING_CALLS: Final = 20_000  # a burst of so many is answered in some 15 s
INTERNAL_MAX_MESSAGE_BYTES: Final = 512 * MIB  # a plan may admit 256 requests of 128k tokens, each asking for the most

_KEEPALIVE: Final[Options] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # gRPC's own 60 s would come before what keepalive promises
    ("grpc.keepalive_permit_without_calls", 1),
)


def internal_server_options(max_message_bytes: int = INTERNAL_MAX_MESSAGE_BYTES) -> Options:
    """Options of a port that only our own processes call: its peers may ping as often as they like."""
    return (
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        *_sizes(max_message_bytes),
        ("grpc.so_reuseport", 0),  # else a second server starts silently on a port that is taken
    )


def public_server_options(max_message_bytes: int) -> Options:
    """Options of a port that anybody may call: who pings more often than every 10 s is sent away."""
    return (
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 2),
        # Calls that wait to be looked at: beyond 1,000 of them, gRPC itself drops some at random with CANCELLED, which
        # tells nobody to come again. Ours are refused in order, with the reason and a time to retry.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
        *_sizes(max_message_bytes),
        ("grpc.so_reuseport", 0),
    )


def channel_options(max_message_bytes: int = INTERNAL_MAX_MESSAGE_BYTES) -> Options:
    """Options of a client: notices a silent peer within 40 s, and a peer that came back within a second."""
    return (
        *_KEEPALIVE,
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_http_proxy", 0),  # else http_proxy diverts even loopback, and Dihedral speaks to its own alone
        ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the backoff of an old one
        *_sizes(max_message_bytes),
    )


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Let a server listen, and return its port; port 0 takes any free one.

    Raises: InvalidConfig: the port is taken, or the host is not this machine's.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise InvalidConfig(
            f"cannot listen on {address}: the port is in use, or the host is not an address of this machine; "
            "stop the other process, or choose another host or port"
        ) from error


def _sizes(max_message_bytes: int) -> Options:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    )
