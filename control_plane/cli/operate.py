"""`dihedral drain`, `pause`, `resume-intake` and `reset-cache`: what operators do to a running server."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated

from cyclopts import App, Group, Parameter
from rich.console import Console

from control_plane.cli.client import Client, IntakeMove
from control_plane.cli.options import Address
from control_plane.cli.render import render
from control_plane.cli.results import CacheReset, IntakeStatus

Workers = Annotated[
    tuple[str, ...],
    Parameter(name="WORKER", help="as `dihedral status` names it [the whole server]", negative=(), show_default=False),
]
AsJson = Annotated[bool, Parameter(name="--json", group=Group("General"), help="print JSON", show_default=False)]
MOVES: dict[str, tuple[IntakeMove, str]] = {
    "drain": ("drain", "Refuse new requests; those at hand go on."),
    "pause": ("pause", "Let requests at hand stand still, and new ones wait."),
    "resume-intake": ("resume", "Go on after drain or pause. Without WORKER the server's own intake alone opens."),
}


def add_operator_commands(app: App, find_address: Callable[[str], str]) -> None:
    """Add the commands. `find_address` turns what --address says, which may be nothing, into an address."""
    for name, (move, about) in MOVES.items():
        app.command(_move_command(move, find_address), name=name, help=about, sort_key=105)

    @app.command(name="reset-cache", sort_key=105)
    def reset_command(workers: Workers = (), /, *, address: Address = "", use_json: AsJson = False) -> int:
        """Forget cached prompts, so that each is computed again."""
        render(asyncio.run(_reset(find_address(address), workers)), use_json, Console())
        return 0


def _move_command(move: IntakeMove, find_address: Callable[[str], str]) -> Callable[..., int]:
    def command(workers: Workers = (), /, *, address: Address = "", use_json: AsJson = False) -> int:
        render(asyncio.run(_move(find_address(address), move, workers)), use_json, Console())
        return 0

    return command


async def _move(address: str, move: IntakeMove, workers: Sequence[str]) -> IntakeStatus:
    async with Client(address) as client:
        return await client.move_intake(move, workers)


async def _reset(address: str, workers: Sequence[str]) -> CacheReset:
    async with Client(address) as client:
        return await client.reset_prefix_cache(workers)
