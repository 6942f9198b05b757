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
FURTHER = Group("Sampling, further", sort_key=1)
SHAPE = Group("Shape of the output", sort_key=1)
TOLD = Group("What is told", sort_key=1)
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
    """How to choose tokens, as far as most people say; None and () leave a choice to the server."""

    max_tokens: Annotated[int | None, Parameter(help="output tokens at most [until the context is full]")] = None
    temperature: Annotated[float | None, Parameter(help="0 is greedy [the model's own, or 1]")] = None
    top_k: Annotated[int | None, Parameter(help="keep the k likeliest tokens [all]")] = None
    top_p: Annotated[float | None, Parameter(help="keep the likeliest tokens that hold this mass [1]")] = None
    min_p: Annotated[float | None, Parameter(help="drop tokens below this share of the likeliest [0]")] = None
    seed: Annotated[int | None, Parameter(help="the same seed gives the same noise [drawn]")] = None
    n: Annotated[int | None, Parameter(help="outputs of the same prompt [1]")] = None
    stop: Annotated[
        tuple[str, ...], Parameter(help="a text that ends the output; may be given again", show_default=False)
    ] = ()
    ignore_eos: Annotated[
        bool, Parameter(help="go on past the model's end tokens", negative=(), show_default=False)
    ] = False
    logprobs: Annotated[int | None, Parameter(help="tell log-probabilities, and so many likeliest tokens")] = None
    json_schema: Annotated[str | None, Parameter(help="JSON schema that the output keeps to, or a file with it")] = None


@Parameter(name="*", group=FURTHER)
@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """Everything else that a request may ask for; None, () and False leave a choice to the server."""

    min_tokens: Annotated[int | None, Parameter(help="nothing ends the output before [0]")] = None
    stop_token_id: Annotated[
        tuple[int, ...], Parameter(help="a token that ends the output; may be given again", show_default=False)
    ] = ()
    include_stop: Annotated[bool, Parameter(help="the text keeps what ended it", negative=(), show_default=False)] = (
        False
    )
    presence_penalty: Annotated[float | None, Parameter(help="taken off tokens that the output has [0]")] = None
    frequency_penalty: Annotated[float | None, Parameter(help="likewise, times how often [0]")] = None
    repetition_penalty: Annotated[float | None, Parameter(help="divides tokens of prompt and output [1]")] = None
    logit_bias: Annotated[
        tuple[str, ...], Parameter(help="ID=VALUE, added to a token's score; may be given again", show_default=False)
    ] = ()
    bad_word: Annotated[
        tuple[str, ...], Parameter(help="a text that the output will not have; may be given again", show_default=False)
    ] = ()
    allowed_token_id: Annotated[
        tuple[int, ...], Parameter(help="no other tokens are chosen; may be given again", show_default=False)
    ] = ()
    extra_arg: Annotated[
        tuple[str, ...], Parameter(help="NAME=JSON for a logits processor; may be given again", show_default=False)
    ] = ()
    json_object: Annotated[
        bool, Parameter(group=SHAPE, help="the output is a JSON object", negative=(), show_default=False)
    ] = False
    regex: Annotated[str | None, Parameter(group=SHAPE, help="the whole output matches it")] = None
    choice: Annotated[
        tuple[str, ...],
        Parameter(group=SHAPE, help="the output is this text, or another that is given so", show_default=False),
    ] = ()
    grammar: Annotated[str | None, Parameter(group=SHAPE, help="file with a Lark grammar that the output keeps to")] = (
        None
    )
    prompt_logprobs: Annotated[int | None, Parameter(group=TOLD, help="log-probabilities of the prompt too")] = None
    logprob_token_id: Annotated[
        tuple[int, ...],
        Parameter(
            group=TOLD, help="tell of this token instead of the likeliest; may be given again", show_default=False
        ),
    ] = ()
    processed_logprobs: Annotated[
        bool, Parameter(group=TOLD, help="of what was drawn from, not the model's own", negative=(), show_default=False)
    ] = False
    keep_special_tokens: Annotated[
        bool, Parameter(group=TOLD, help="special tokens have text", negative=(), show_default=False)
    ] = False
    stream_interval: Annotated[int | None, Parameter(group=TOLD, help="tokens per message [1]")] = None
    echo: Annotated[bool, Parameter(group=TOLD, help="tell the prompt first", negative=(), show_default=False)] = False
    max_queue_time: Annotated[
        float | None, Parameter(group=CONNECTION, help="seconds to wait for a turn [the server's limit]")
    ] = None


PLAIN = Details()
