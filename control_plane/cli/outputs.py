"""Shows what stands beside the text of an answer: several outputs under headings, log-probabilities in tables."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from rich.console import Console

from control_plane.cli.client import Client
from control_plane.cli.options import Connection
from control_plane.cli.render import table
from control_plane.cli.results import Candidate, Completion, Output

MAX_ROWS: Final = 200  # of one table; --json tells all


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One place of a sequence."""

    token: str
    logprob: str
    rank: int
    others: str  # and their log-probabilities


def outputs_of(completion: Completion) -> tuple[Output, ...]:
    """Return all outputs of an answer, the first one too."""
    first = Output(
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        stopped_by=completion.stopped_by,
        logprobs=completion.logprobs,
    )
    return (first, *completion.others)


def show_outputs(completion: Completion, out: TextIO) -> None:
    """Print the prompt, if it was told, and each of several outputs under its number and its end."""
    if completion.prompt:
        out.write(f"{completion.prompt}\n")
    for index, output in enumerate(outputs_of(completion)):
        out.write(f"[{index}] {output.finish_reason}, {len(output.token_ids)} tokens\n{output.text}\n")


def show_logprobs(completion: Completion, connection: Connection, console: Console) -> None:
    """Print a table for the prompt, if it was told, and one for each output. Asks the server for the tokens' texts."""
    tables = {"prompt": completion.prompt_logprobs}
    outputs = outputs_of(completion)
    for index, output in enumerate(outputs):
        tables["tokens" if len(outputs) == 1 else f"tokens of [{index}]"] = output.logprobs
    shown = {title: places[:MAX_ROWS] for title, places in tables.items() if places}
    if not shown:
        return
    token_ids = [each.token_id for places in shown.values() for place in places for each in place]
    texts = asyncio.run(_texts(token_ids, connection))
    for title, places in shown.items():
        console.print(table(title, _rows(places, texts), console), highlight=False)
        if len(places) < len(tables[title]):
            console.print(f"{len(tables[title]) - len(places)} more; --json tells all", highlight=False)


def _rows(places: Sequence[Sequence[Candidate]], texts: dict[int, str]) -> tuple[TokenRow, ...]:
    def name(token: Candidate) -> str:
        return repr(texts[token.token_id]) if texts[token.token_id] else f"<{token.token_id}>"

    def told(token: Candidate, candidates: Sequence[Candidate]) -> str:
        others = (each for each in candidates if each.token_id != token.token_id)
        return ", ".join(f"{name(each)} {_number(each)}" for each in others)

    return tuple(TokenRow(name(token), _number(token), token.rank, told(token, others)) for token, *others in places)


def _number(token: Candidate) -> str:
    return "-inf" if token.logprob is None else f"{token.logprob:.3f}"


async def _texts(token_ids: Sequence[int], connection: Connection) -> dict[int, str]:
    async with Client(connection.address) as client:
        return await client.token_texts(token_ids, connection.model)
