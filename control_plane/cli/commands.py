"""The console script `dihedral`: its commands, how they are found, and how their errors are told.

A command that serves takes the whole configuration as flags; its work is in a module of its own, or in another plane.
"""

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points, version
from inspect import Parameter as Argument
from inspect import Signature
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter, UnknownCommandError, UnknownOptionError, UnusedCliTokensError
from rich.console import Console

from control_plane.admission.config import AdmissionConfig
from control_plane.api.config import ServerConfig
from control_plane.cli.client import Client, local_address
from control_plane.cli.flags import Flag, canonical, make_flags, signature
from control_plane.cli.generation_commands import add_generation_commands
from control_plane.cli.hooks import add_plugin_commands
from control_plane.cli.launch import Context, Invocation, launch
from control_plane.cli.operate import add_operator_commands
from control_plane.cli.options import Account, Address, Connection, check_connection
from control_plane.cli.render import render
from control_plane.cli.results import ServerStatus
from control_plane.config import CONTROL_PLANE_SECTIONS, Config, Source, find_sections, load_config
from plugins.errors import InvalidConfig, ServingError

COMMAND_GROUP = "dihedral.commands"  # entry points: commands that other planes and distributions provide
GENERAL = Group("General", sort_key=100)
MODEL_KEYS = (
    "worker.model",
    "worker.load_format",
    "worker.dtype",
    "worker.threads",
    "worker.max_model_len",
    "worker.kv_cache_gib",
    "worker.max_sequences",
    "worker.max_step_tokens",
)
SERVER_KEYS = ("server.host", "server.port", "server.drain_s", "admission.max_waiting")
SCHEDULER_KEYS = ("scheduler.policy", "scheduler.scheduler_cls")
STEP_KEYS = ("scheduler.max_sequences", "scheduler.max_step_tokens")
OPERATING_KEYS = ("log.level", "log.format", "metrics.enabled", "metrics.port")


@dataclass(frozen=True, slots=True)
class ServingCommand:
    """A command that takes the configuration as flags and serves until it is stopped."""

    name: str
    about: str
    sections: tuple[str, ...]  # in the order of its help
    primary: tuple[str, ...]  # sections whose keys may be given without the section's name
    positional: str | None  # the key that needs no flag
    common: tuple[str, ...]  # keys that --help shows; --help-all shows every one
    plane: str  # whose metrics it exports
    load: Callable[[], Callable[[Context], int]]
    settle: Callable[[Config], Config] = lambda config: config  # what is chosen at start becomes a part of it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, `sys.argv` by default. Returns the exit code: 2 for wrong words or configuration."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(words, os.environ)
    except CycloptsError as error:
        command = "dihedral" if isinstance(error, UnknownCommandError) else f"dihedral {words[0]}"
        return _fail(f"{_complaint(words, error)} See `{command} --help`.", 2)
    except InvalidConfig as error:
        return _fail(str(error), 2)
    except ServingError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the reader has gone; nothing is to be flushed at exit
        return 1
    except KeyboardInterrupt:
        return 130


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Find the command, parse its flags and run it.

    Raises: CycloptsError: the words make no command; ServingError: what the command could not do.
    """
    everything = "--help-all" in words
    words = ["--help" if word == "--help-all" else word for word in words]
    app = App(
        name="dihedral",
        help="Serve large language models in two planes that meet over gRPC.",
        version=version("dihedral"),
        help_format="plaintext",
        default_parameter=Parameter(negative=()),
    )
    sections = find_sections()
    for place, command in enumerate(find_commands(sections)):
        kinds = {name: sections[name] for name in command.sections}
        flags = make_flags(kinds, command.primary)
        if words and words[0] == command.name:
            words = [words[0], *canonical(words[1:], flags)]
        shown = [flag.key for flag in flags if everything or flag.key in command.common]
        app.command(_serving_function(command, flags, shown, environ), name=command.name, sort_key=place)
    _add_client_commands(app, environ, everything)
    add_plugin_commands(app)
    code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    return code if isinstance(code, int) else 0


def find_commands(sections: Mapping[str, type[Any]]) -> tuple[ServingCommand, ...]:
    """List the commands that serve: our own, then those of entry points, which read the section of their own name."""
    own = tuple(CONTROL_PLANE_SECTIONS)
    commands = [
        ServingCommand(
            "serve",
            "Serve a model on this machine, with both planes.",
            ("worker", *own),
            ("server", "worker"),
            "worker.model",
            (*MODEL_KEYS, *SERVER_KEYS, *SCHEDULER_KEYS, *OPERATING_KEYS),
            "control_plane",
            _load_serve,
            _settle_serve,
        ),
        ServingCommand(
            "control-plane",
            "Run the control plane, for workers that run elsewhere.",
            own,
            ("server", "scheduler"),
            None,
            (*SERVER_KEYS, *SCHEDULER_KEYS, *STEP_KEYS, "workers.address", *OPERATING_KEYS),
            "control_plane",
            _load_control_plane,
        ),
    ]
    for entry in sorted(entry_points(group=COMMAND_GROUP), key=lambda entry: entry.name):
        owner = entry.dist.name if entry.dist else "an unknown distribution"
        about = "Run a worker: it computes steps for a control plane."
        keys = tuple(field.name for field in fields(sections[entry.name])) if entry.name in sections else ()
        commands.append(
            ServingCommand(
                entry.name,
                about if entry.name == "worker" else f"Provided by {owner}.",
                (*([entry.name] if keys else []), "plugins", "log", "metrics"),
                (entry.name,),
                f"{entry.name}.model" if "model" in keys else None,
                (*MODEL_KEYS, "worker.host", "worker.port", *OPERATING_KEYS),
                "worker",
                partial(_load_entry, entry),
            )
        )
    return tuple(commands)


def _serving_function(
    command: ServingCommand, flags: Sequence[Flag], shown: Sequence[str], environ: Mapping[str, str]
) -> Callable[..., int]:
    """Make the function that the parser calls: its parameters are the flags, its body launches the command."""

    def function(*arguments: object, **named: object) -> int:
        bound = whole.bind_partial(*arguments, **named).arguments
        file = bound.get("config")
        given = {flag.key: bound[flag.parameter] for flag in flags if bound.get(flag.parameter) is not None}
        names = {flag.key: flag.name for flag in flags}
        source = Source(given, "on the command line", lambda key: names.get(key, key))
        config = command.settle(load_config(find_sections(), source, environ, file))
        return launch(Invocation(config, command.sections, given, file), command.plane, command.load())

    about = Parameter(group=GENERAL, help="YAML file of sections and keys [DIHEDRAL_CONFIG]", show_default=False)
    file = Argument("config", Argument.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, about])
    whole = Signature([*signature(flags, shown, command.positional).parameters.values(), file])
    function.__signature__ = whole  # type: ignore[attr-defined]  # functions take it
    function.__annotations__ = {}  # those of the signature hold
    function.__doc__ = f"{command.about}\n\nKeys are also read from DIHEDRAL_SECTION__KEY; --help-all lists all."
    return function


def _load_serve() -> Callable[[Context], int]:
    from control_plane.cli.serve import serve

    return serve


def _settle_serve(config: Config) -> Config:
    from control_plane.cli.serve import settle_worker

    return settle_worker(config)


def _load_control_plane() -> Callable[[Context], int]:
    from control_plane.cli.serve import control_plane

    return control_plane


def _load_entry(entry: EntryPoint) -> Callable[[Context], int]:
    try:
        loaded: Callable[[Context], int] = entry.load()
    except ImportError as error:
        owner = entry.dist.name if entry.dist else "an unknown distribution"
        remedy = f", such as pip install '{owner}[{entry.name}]'" if entry.dist else ""
        raise InvalidConfig(
            f"command {entry.name!r} ({entry.value} of {owner}) cannot be loaded: {error}; "
            f"install what it needs{remedy}"
        ) from error
    return loaded


def _add_client_commands(app: App, environ: Mapping[str, str], everything: bool) -> None:
    """Add the commands that ask a running server. They read the configuration to find it."""
    as_json = Parameter(name="--json", group=GENERAL, help="print JSON", show_default=False)

    def configured() -> Config:
        return load_config(find_sections(), Source({}, "", str), environ, None)

    def connect(connection: Connection) -> Connection:
        """Fill the address in. Raises: InvalidConfig: a flag can reach no server."""
        address = connection.address
        if not address:
            server = configured().section(ServerConfig)
            address = local_address(server.host, server.port)
        check_connection(address, connection.timeout)
        return replace(connection, address=address)

    def identify(account: Account) -> Account:
        """Fill in how the server is told whose request it is."""
        return (
            replace(account, tenant_key=configured().section(AdmissionConfig).tenant_key) if account.tenant else account
        )

    add_generation_commands(app, connect, identify, everything)

    @app.command(name="status", sort_key=100)
    def status_command(*, address: Address = "", use_json: Annotated[bool, as_json] = False) -> int:
        """Show a server, its load and its workers."""
        connection = connect(Connection(address=address))
        render(asyncio.run(_status(connection.address)), use_json, Console())
        return 0

    add_operator_commands(app, lambda address: connect(Connection(address=address)).address)


async def _status(address: str) -> ServerStatus:
    async with Client(address) as client:
        return await client.status()


def _complaint(words: Sequence[str], error: CycloptsError) -> str:
    """Say on one line what is wrong with the words; what follows a prompt is most often a part of it."""
    after_dashes = [word.partition("=")[0] for word in words[words.index("--") :]] if "--" in words else []
    match error:
        case UnusedCliTokensError(unused_tokens=list(left_over)):
            pass
        case UnknownOptionError(token=token) if (option := token.keyword or token.value) in after_dashes:
            left_over = [option]
        case _:
            return " ".join(str(error).split())
    advice = " Quote the prompt; options go before `--`." if words[0] == "generate" else ""
    return f"Words are left over: {shlex.join(left_over)}.{advice}"


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"dihedral: {message}\n")
    return code
