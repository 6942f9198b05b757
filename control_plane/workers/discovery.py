"""Finds out where workers listen: from a list, a DNS name that is resolved again and again, or a file that may change.

Tells sets of addresses; what becomes of a worker that appears or goes is the business of `fleet.py`.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from plugins.errors import InvalidConfig

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]  # a name and a port to `host:port` of each address
OnFailure = Callable[[str], object]
Sleep = Callable[[float], Awaitable[object]]

_FORMS: Final = "give host:port, several with commas between, dns:name:port, or file:path"


@dataclass(frozen=True, slots=True)
class StaticPlaces:
    """These addresses and no other."""

    addresses: frozenset[str]


@dataclass(frozen=True, slots=True)
class DnsName:
    """Every address of a name."""

    name: str
    port: int


@dataclass(frozen=True, slots=True)
class AddressFile:
    """Every address in a file."""

    path: Path


Places: TypeAlias = StaticPlaces | DnsName | AddressFile


class Discovery(Protocol):
    """Where workers listen, over time."""

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """Yield the set of addresses once it is known, and again whenever it has changed. A failure keeps the last."""


def parse_address(text: str) -> Places:
    """Read `workers.address`. Raises: InvalidConfig: it is of no known form; the message tells those there are."""
    kind, _, rest = text.partition(":")
    if kind == "file":
        if not rest:
            raise _refused(text, "names no file")
        return AddressFile(Path(rest))
    if kind == "dns" and ":" in rest:
        host, port = split_address(rest)
        return DnsName(host, port)
    return StaticPlaces(frozenset(normal_address(part) for part in text.split(",")))


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`, without the brackets of an IPv6 literal. Raises: InvalidConfig."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_ipv6(host):
            raise _refused(text, f"{host!r} is no IPv6 address")
    elif ":" in host:
        raise _refused(text, "has several colons; an IPv6 address needs brackets, such as [::1]:50061")
    if not colon or not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        raise _refused(text, "has no port in [1, 65535]")
    if not host or any(character.isspace() or character in "/,[]@" for character in host):
        raise _refused(text, "has no host")
    return host, int(port)


def _refused(text: str, why: str) -> InvalidConfig:
    return InvalidConfig(f"workers.address must tell where workers listen: {text.strip()!r} {why}; {_FORMS}")


def normal_address(text: str) -> str:
    """Return `host:port` with the brackets that an IPv6 address needs. Raises: InvalidConfig."""
    return join_address(*split_address(text))


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_ipv6(host: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    except ValueError:
        return False


def discovery_of(text: str, refresh_s: float, on_failure: OnFailure = lambda why: None) -> Discovery:
    """Return what watches the workers of `workers.address`. `on_failure` is told why a lookup failed.

    Raises: InvalidConfig: the address is of no known form.
    """
    match parse_address(text):
        case StaticPlaces(addresses):
            return StaticAddresses(addresses)
        case DnsName(name, port):
            return DnsAddresses(name, port, refresh_s, on_failure=on_failure)
        case AddressFile(path):
            return FileAddresses(path, refresh_s, on_failure=on_failure)


class StaticAddresses:
    """A set that never changes."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        yield self._addresses


async def resolve(name: str, port: int) -> tuple[str, ...]:
    """Ask the system for every address of a name. Raises: OSError: it has none, or nobody answers."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return tuple(join_address(str(address[0]), port) for *_, address in found)


class DnsAddresses:
    """Every address of a name, such as that of a headless service: each is another worker."""

    def __init__(
        self,
        name: str,
        port: int,
        refresh_s: float,
        resolve: Resolve = resolve,
        sleep: Sleep = asyncio.sleep,
        on_failure: OnFailure = lambda why: None,
    ) -> None:
        self._name = name
        self._port = port
        self._resolve = resolve
        self._polling = _Polling(f"dns:{name}:{port}", self._look, refresh_s, sleep, on_failure)

    def watch(self) -> AsyncIterator[frozenset[str]]:
        return self._polling.watch()

    async def _look(self) -> frozenset[str]:
        return frozenset(await self._resolve(self._name, self._port))


class FileAddresses:
    """One `host:port` a line; empty lines and those that start with # say nothing. The file is read whole each time."""

    def __init__(
        self,
        path: Path,
        refresh_s: float,
        read: Callable[[Path], str] = Path.read_text,
        sleep: Sleep = asyncio.sleep,
        on_failure: OnFailure = lambda why: None,
    ) -> None:
        self._path = path
        self._read = read
        self._polling = _Polling(f"file:{path}", self._look, refresh_s, sleep, on_failure)

    def watch(self) -> AsyncIterator[frozenset[str]]:
        return self._polling.watch()

    async def _look(self) -> frozenset[str]:
        lines = (line.strip() for line in self._read(self._path).splitlines())
        return frozenset(normal_address(line) for line in lines if line and not line.startswith("#"))


class _Polling:
    """Looks again and again, tells what is new, and logs each failure once until it looks different."""

    def __init__(
        self,
        place: str,
        look: Callable[[], Awaitable[frozenset[str]]],
        every_s: float,
        sleep: Sleep,
        on_failure: OnFailure,
    ) -> None:
        self._place = place
        self._look = look
        self._every_s = every_s
        self._sleep = sleep
        self._on_failure = on_failure

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        told: frozenset[str] | None = None
        failure = ""
        while True:
            try:
                found = await self._look_twice()
                failure = ""
                if found != told:
                    told = found
                    yield found
            except (OSError, ValueError) as error:  # no such name or file; text that is no address
                if str(error) != failure:
                    failure = str(error)
                    logger.warning("worker_lookup_failed", extra={"place": self._place, "why": failure})
                    self._on_failure(f"{self._place} cannot be looked up: {failure}")
            await self._sleep(self._every_s)

    async def _look_twice(self) -> frozenset[str]:
        """Look, and believe that there is no address only when it is told twice in a row.

        A file that somebody is writing is empty for a moment, and every worker would be sent away for that.
        """
        found = await self._look()
        if not found:
            await self._sleep(self._every_s)
            found = await self._look()
        return found
