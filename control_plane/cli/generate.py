"""`dihedral generate` and `dihedral chat`: text that appears while it is made."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TextIO

from control_plane.cli.client import Client
from control_plane.cli.options import NOBODY, PLAIN, Account, Connection, Details, Sampling
from control_plane.cli.results import Completion
from plugins.errors import InvalidConfig, InvariantBroken, ServingError


async def complete(
    prompt: str | Sequence[tuple[str, str]],
    connection: Connection,
    sampling: Sampling,
    write: Callable[[str], object],
    account: Account = NOBODY,
    details: Details = PLAIN,
) -> Completion:
    """Get one completion of a text or a chat; `write` is called with each piece of text as it comes."""
    async with Client(connection.address) as client:
        deltas = client.generate(prompt, sampling, connection.model, connection.timeout, account, details)
        async with aclosing(deltas):
            async for delta in deltas:
                write(delta.prompt + delta.text)
                if delta.completion is not None:
                    return delta.completion
    raise InvariantBroken("the stream of a completion ended without its final message")


def generate(
    prompt: str,
    as_chat: bool,
    connection: Connection,
    sampling: Sampling,
    out: TextIO | None,
    account: Account = NOBODY,
    details: Details = PLAIN,
) -> Completion:
    """Get one completion; it appears on `out`, if given, as it comes, with a line break at its end, however it ends.

    Several outputs come at once, and are for the caller to show.
    """
    messages = [("user", prompt)] if as_chat else prompt
    if out is None or (sampling.n or 1) > 1:
        return asyncio.run(complete(messages, connection, sampling, lambda text: None, account, details))
    parts: list[str] = []
    write = partial(_show_and_keep, out, parts)
    try:
        return asyncio.run(complete(messages, connection, sampling, write, account, details))
    finally:
        if parts:
            print(file=out)


def chat(
    system: str,
    connection: Connection,
    sampling: Sampling,
    source: TextIO,
    out: TextIO,
    log: TextIO,
    account: Account = NOBODY,
    details: Details = PLAIN,
) -> None:
    """Hold a conversation: a line of `source` is a message, its end ends the conversation.

    Ctrl-C stops the answer that is being made; what came of it stays in the conversation. At a terminal an error
    ends one answer and is told on `log`; elsewhere it is raised.
    Raises: InvalidConfig: several answers are asked for, or log-probabilities, for which there is no place.
    """
    if (sampling.n or 1) > 1:
        raise InvalidConfig(f"--n: a conversation goes on from one answer, not {sampling.n}")
    for flag, number in (("--logprobs", sampling.logprobs), ("--prompt-logprobs", details.prompt_logprobs)):
        if number is not None:
            raise InvalidConfig(f"{flag}: a conversation shows text alone; generate --chat tells log-probabilities")
    details = replace(details, echo=False)  # the conversation is there to be seen
    history = [("system", system)] if system else []
    is_dialogue = source.isatty()
    with asyncio.Runner() as runner:
        for message in _messages(source, "you> " if is_dialogue else ""):
            history.append(("user", message))
            parts: list[str] = []
            write = partial(_show_and_keep, out, parts)
            try:
                runner.run(complete(history, connection, sampling, write, account, details))
            except KeyboardInterrupt:
                pass
            except ServingError as error:
                history.pop()
                if parts:
                    print(file=out)
                if not is_dialogue:
                    raise
                print(f"dihedral: {error}", file=log)
                continue
            print(file=out)
            history.append(("assistant", "".join(parts)))


def _messages(source: TextIO, invitation: str) -> Iterator[str]:
    """Yield each line that says something; an invitation is for a terminal, whose lines can be edited."""
    if invitation:
        with suppress(ImportError):  # some builds of Python lack it
            import readline  # noqa: F401  # `input` edits lines once it is loaded
    while True:
        try:
            line = input(invitation) if invitation else source.readline()
        except EOFError:
            return
        if not invitation and not line:
            return
        if line.strip():
            yield line.strip()


def _show_and_keep(out: TextIO, parts: list[str], text: str) -> None:
    parts.append(text)
    out.write(text)
    out.flush()
