"""Options have names that gRPC knows, and a port that is taken is told instead of shared."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc.aio import server

from plugins.errors import InvalidConfig
from protos.channel import bind, channel_options, internal_server_options, public_server_options


def test_the_internal_server_lets_its_peers_ping() -> None:
    assert internal_server_options(1024) == (
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", 1024),
        ("grpc.max_send_message_length", 1024),
        ("grpc.so_reuseport", 0),
    )


def test_the_public_server_sends_away_who_pings_too_often() -> None:
    assert public_server_options(1024) == (
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        ("grpc.max_receive_message_length", 1024),
        ("grpc.max_send_message_length", 1024),
        ("grpc.so_reuseport", 0),
    )


def test_a_channel_keeps_itself_alive_and_reconnects_within_a_second() -> None:
    assert channel_options(1024) == (
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", 1024),
        ("grpc.max_send_message_length", 1024),
    )


def test_grpc_itself_knows_every_option() -> None:
    options = {*internal_server_options(1), *public_server_options(1), *channel_options(1)}

    library = _native_library()

    assert [name for name, _ in options if name.encode() not in library] == []


async def test_no_call_of_a_large_burst_is_dropped_before_anybody_looked_at_it() -> None:
    port = server(options=public_server_options(1024))
    port.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Echo", {"Say": grpc.unary_unary_rpc_method_handler(_echo)}),)
    )
    address = f"127.0.0.1:{bind(port, '127.0.0.1', 0)}"
    await port.start()

    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        say: Any = channel.unary_unary("/test.Echo/Say")
        answers = await asyncio.gather(*(say(b"x") for _ in range(2_500)), return_exceptions=True)
    await port.stop(None)

    assert [answer for answer in answers if answer != b"x"] == []


async def _echo(message: bytes, context: object) -> bytes:
    return message


async def test_a_port_in_use_is_told_with_its_address_and_the_remedy() -> None:
    first, second = server(options=internal_server_options()), server(options=internal_server_options())
    port = bind(first, "127.0.0.1", 0)
    await first.start()

    with pytest.raises(InvalidConfig) as refused:
        bind(second, "127.0.0.1", port)

    await first.stop(None)
    assert str(refused.value) == (
        f"cannot listen on 127.0.0.1:{port}: the port is in use, or the host is not an address of this machine; "
        "stop the other process, or choose another host or port"
    )


async def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    listening = server(options=internal_server_options())
    port = bind(listening, "127.0.0.1", 0)
    await listening.start()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/nobody/Answers")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(b"")

    await listening.stop(None)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_ipv6_address_is_put_in_brackets() -> None:
    listening = server(options=internal_server_options())

    with pytest.raises(InvalidConfig, match=r"cannot listen on \[2001:db8::1\]:1: "):
        bind(listening, "2001:db8::1", 1)


def _native_library() -> bytes:
    (path,) = (Path(grpc.__file__).parent / "_cython").glob("cygrpc.*.so")
    return path.read_bytes()
