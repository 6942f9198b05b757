"""The commands `dihedral generate` and `dihedral chat`: their flags, and which of them help shows."""

import sys
from collections.abc import Callable
from typing import Annotated

from cyclopts import App, Group, Parameter
from rich.console import Console

from control_plane.cli.generate import chat, generate
from control_plane.cli.options import NOBODY, PLAIN, Account, Connection, Details, Sampling
from control_plane.cli.outputs import show_logprobs, show_outputs
from control_plane.cli.render import render

GENERAL = Group("General", sort_key=100)
PROMPT_HELP = "text to continue [standard input, less one line break at its end]"


def add_generation_commands(
    app: App,
    connect: Callable[[Connection], Connection],
    identify: Callable[[Account], Account],
    everything: bool,
) -> None:
    """Add both commands; `connect` and `identify` fill in what the configuration knows.

    Help shows the flags of `Details` only with `everything`.
    """
    as_json = Parameter(name="--json", group=GENERAL, help="print JSON", show_default=False)
    further = Parameter(show=everything)

    @app.command(name="generate", sort_key=100)
    def generate_command(
        prompt: Annotated[str | None, Parameter(help=PROMPT_HELP)] = None,
        /,
        *,
        use_chat: Annotated[
            bool,
            Parameter(
                name="--chat", group=GENERAL, help="ask as a chat message, not as plain text", show_default=False
            ),
        ] = False,
        use_json: Annotated[bool, as_json] = False,
        sampling: Sampling = Sampling(),  # noqa: B008  # frozen
        details: Annotated[Details, further] = PLAIN,
        connection: Connection = Connection(),  # noqa: B008  # frozen
        account: Account = NOBODY,
    ) -> int:
        """Continue a text; it appears while it is made. --help-all lists all flags."""
        connection = connect(connection)
        text = sys.stdin.read().removesuffix("\n") if prompt is None else prompt
        out = None if use_json else sys.stdout
        completion = generate(text, use_chat, connection, sampling, out, identify(account), details)
        if use_json:
            render(completion, True, Console())
            return 0
        if completion.others:
            show_outputs(completion, sys.stdout)
        show_logprobs(completion, connection, Console())
        if sys.stdout.isatty():
            sys.stderr.write(f"{completion.summary}\n")
        return 0

    @app.command(name="chat", sort_key=100)
    def chat_command(
        *,
        system: Annotated[str, Parameter(group=GENERAL, help="message that sets the tone", show_default=False)] = "",
        sampling: Sampling = Sampling(),  # noqa: B008  # frozen
        details: Annotated[Details, further] = PLAIN,
        connection: Connection = Connection(),  # noqa: B008  # frozen
        account: Account = NOBODY,
    ) -> int:
        """Hold a conversation, one message a line. Ctrl-C stops an answer, Ctrl-D ends. --help-all lists all flags."""
        chat(system, connect(connection), sampling, sys.stdin, sys.stdout, sys.stderr, identify(account), details)
        return 0
