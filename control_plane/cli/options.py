"""Flags that several client commands share, and what is refused before a server is called."""

import re
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from control_plane.admission.config import AdmissionConfig
from plugins.errors import InvalidConfig

HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
MAX_TIMEOUT_S = 1_000_000  # a longer one may overflow in gRPC, and then it has passed at once
CONNECTION = Group("Connection", sort_key=2)
SAMPLING = Group("Sampling", sort_key=1)
ACCOUNT = Group("Account", sort_key=3)
TENANT_KEY = AdmissionConfig().tenant_key
Address = Annotated[
    str, Parameter(group=CONNECTION, help="host:port of the server [server.host and server.port]", show_default=False)
]


@Parameter(name="*", group=CONNECTION)
@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Which server and model to ask."""

    address: Address = ""
    model: Annotated[str, Parameter(help="name of a model [the only one served]", show_default=False)] = ""
    timeout: Annotated[float | None, Parameter(help="seconds that one answer may take [the server's limit]")] = None


@Parameter(name="*", group=ACCOUNT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """On whose account a request runs, before whom it goes, and with whom it shares computed prompts."""

    priority: Annotated[int, Parameter(help="lower goes first, if the server orders by it [0]", show_default=False)] = 0
    tenant: Annotated[str, Parameter(help="whose request it is [nobody's]", show_default=False)] = ""
    cache_salt: Annotated[
        str, Parameter(help="share cached prompts with the same salt [with none]", show_default=False)
    ] = ""
    tenant_key: Annotated[str, Parameter(parse=False)] = TENANT_KEY  # the metadata that tells the tenant


NOBODY = Account()


def check_connection(address: str, timeout_s: float | None) -> None:
    """Refuse what can reach no server. Raises: InvalidConfig: the address, or the time an answer may take."""
    found = HOST_AND_PORT.fullmatch(address)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise InvalidConfig(f"--address must be host:port, or [v6]:port, is {address!r}")
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidConfig(f"--timeout must be above 0 and at most {MAX_TIMEOUT_S} seconds, is {timeout_s:g}")


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose tokens; None leaves a choice to the server."""

    max_tokens: Annotated[int | None, Parameter(help="output tokens at most [until the context is full]")] = None
    temperature: Annotated[float | None, Parameter(help="0 is greedy [1]")] = None
    top_k: Annotated[int | None, Parameter(help="keep the k likeliest tokens [all]")] = None
    top_p: Annotated[float | None, Parameter(help="keep the likeliest tokens that hold this mass [1]")] = None
    min_p: Annotated[float | None, Parameter(help="drop tokens below this share of the likeliest [0]")] = None
    seed: Annotated[int | None, Parameter(help="the same seed gives the same noise [drawn]")] = None
    ignore_eos: Annotated[
        bool, Parameter(help="go on past the model's end tokens", negative=(), show_default=False)
    ] = False
