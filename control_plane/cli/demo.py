"""`make demo`: both planes as processes, three chats at once, and what the metrics counted.

Everything goes through the doors that users have: the command line, gRPC and /metrics.
"""

import asyncio
import contextlib
import re
import signal
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel

from control_plane.cli.generate import complete
from control_plane.cli.options import Connection, Sampling
from control_plane.cli.render import table
from control_plane.cli.results import Completion
from plugins.errors import InvariantBroken, ServingError
from plugins.metrics import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, TTFT

PROMPTS = (
    "Why is the sky blue? Answer in two sentences.",
    "Write four short lines of verse about the sea.",
    "Give me three tips for baking bread.",
)
SAMPLING = Sampling(max_tokens=96, temperature=0)
READY = re.compile(r"^Ready: (?P<model>.*) at (?P<address>\S+), metrics at (?P<metrics>\S+)$")
COUNTING_S = 5.0  # a request is counted just after its last message was sent


@dataclass(frozen=True, slots=True)
class Server:
    """The processes of a running `dihedral serve`."""

    process: asyncio.subprocess.Process
    model: str
    address: str
    metrics_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table of figures."""

    prompt: str
    tokens: int
    first_token_s: float
    tokens_per_s: float
    ended: str


class Screen(Protocol):
    """Where three texts appear while they are made."""

    def write(self, index: int, text: str) -> None: ...

    def close(self) -> None: ...


class Panels:
    """Three growing panels on a terminal."""

    def __init__(self, console: Console) -> None:
        self._texts = [""] * len(PROMPTS)
        self._live = Live(console=console, refresh_per_second=20, vertical_overflow="visible")
        self._live.start()

    def write(self, index: int, text: str) -> None:
        """Let one panel grow."""
        self._texts[index] += text
        width = max(20, self._live.console.width // len(PROMPTS) - 1)
        panels = [Panel(each, title=prompt, width=width) for prompt, each in zip(PROMPTS, self._texts, strict=True)]
        self._live.update(Columns(panels, padding=(0, 1, 0, 0)))

    def close(self) -> None:
        """Leave the panels as they are."""
        self._live.stop()


class Lines:
    """Numbered lines, for where there is no terminal. A line ends with its text, or when it is long."""

    WIDTH = 72

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending = [""] * len(PROMPTS)
        for index, prompt in enumerate(PROMPTS):
            console.print(f"[{index + 1}] > {prompt}", markup=False, highlight=False)

    def write(self, index: int, text: str) -> None:
        """Print what makes whole lines, and keep the rest."""
        *whole, rest = (self._pending[index] + text).split("\n")
        if len(rest) > self.WIDTH and " " in rest:
            line, _, rest = rest.rpartition(" ")
            whole.append(line)
        self._pending[index] = rest
        for line in whole:
            self._print(index, line)

    def close(self) -> None:
        """Print what is left."""
        for index, rest in enumerate(self._pending):
            self._print(index, rest)

    def _print(self, index: int, line: str) -> None:
        if line.strip():
            self._console.print(f"[{index + 1}] {line}", markup=False, highlight=False, soft_wrap=True)


async def demo(console: Console, serve_arguments: Sequence[str] = ()) -> int:
    """Start both planes, show three completions and what was counted, stop. Returns the exit code."""
    server = await start_server(console, serve_arguments)
    pids = [server.process.pid, *children(server.process.pid)]
    try:
        console.print(f"\n{server.model} answers three chats at once at {server.address}:\n", highlight=False)
        completions = await stream_all(server.address, Panels(console) if console.is_terminal else Lines(console))
        console.print()
        figures = [_row(*pair) for pair in zip(PROMPTS, completions, strict=True)]
        console.print(table("figures", figures, console))
        is_counted = await check_counts(console, server.metrics_url, expected_counts(completions), COUNTING_S)
    finally:
        code = await end(server.process)
    left = still_running(pids)
    console.print(
        f"Both processes stopped (exit code {code})." if not left else f"Still running: {left}", highlight=False
    )
    return 0 if is_counted and code == 0 and not left else 1


async def start_server(console: Console, arguments: Sequence[str]) -> Server:
    """Run `dihedral serve` on free ports; what it says of loading goes to this terminal. Raises: ServingError."""
    console.print("Starting a control plane and a worker; the worker loads the model.", highlight=False)
    command = [sys.executable, "-P", "-m", "control_plane.cli", "serve"]
    ports = ["--port=0", "--metrics.port=0", "--log.level=error"]
    process = await asyncio.create_subprocess_exec(
        *command, *ports, *arguments, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    if process.stdout is None:
        raise InvariantBroken("a process that was started with a pipe has none")
    try:
        while line := (await process.stdout.readline()).decode().strip():
            if found := READY.match(line):
                return Server(process, found["model"], found["address"], found["metrics"])
    except asyncio.CancelledError:
        await end(process)
        raise
    raise ServingError(f"the server ended before it could serve (exit code {await process.wait()}); see above")


async def stream_all(address: str, screen: Screen) -> list[Completion]:
    """Ask all prompts at once and show the answers as they come."""
    connection = Connection(address=address)
    try:
        return await asyncio.gather(
            *(
                complete([("user", prompt)], connection, SAMPLING, partial(screen.write, index))
                for index, prompt in enumerate(PROMPTS)
            )
        )
    finally:
        screen.close()


def expected_counts(completions: Sequence[Completion]) -> dict[str, float]:
    """Say what the metrics must tell after these completions, by name of sample."""
    return {
        REQUESTS.name: len(completions),
        PROMPT_TOKENS.name: sum(each.prompt_tokens for each in completions),
        OUTPUT_TOKENS.name: sum(each.output_tokens for each in completions),
        f"{TTFT.name}_count": len(completions),
    }


async def check_counts(console: Console, url: str, expected: Mapping[str, float], wait_s: float) -> bool:
    """Scrape until the counts are as expected, or `wait_s` have passed; show both. False: they never were."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        counted = totals(await asyncio.to_thread(scrape, url))
        is_counted = all(counted.get(name) == value for name, value in expected.items())
        if is_counted or asyncio.get_running_loop().time() >= deadline:
            break
        await asyncio.sleep(0.05)
    console.print(f"\n{url} counted:", highlight=False)
    for name, value in expected.items():
        verdict = "as streamed" if counted.get(name) == value else f"but {value:g} were streamed"
        console.print(f"  {name} {counted.get(name, 0):g} ({verdict})", highlight=False)
    return is_counted


def scrape(url: str) -> str:
    """Fetch a page of metrics, past any proxy: it is a process of this machine that answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        body: bytes = answer.read()
    return body.decode()


def totals(page: str) -> dict[str, float]:
    """Sum every sample of a page of metrics over its labels, by name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def end(process: asyncio.subprocess.Process) -> int:
    """Ask a server to end, and wait until it has. Returns its exit code."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            process.send_signal(signal.SIGTERM)
    return await process.wait()


def children(pid: int) -> list[int]:
    """List the processes that this one started and that still run."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def still_running(pids: Sequence[int]) -> list[int]:
    """Return those of some processes that have not ended."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _row(prompt: str, completion: Completion) -> Row:
    return Row(
        prompt=prompt,
        tokens=completion.output_tokens,
        first_token_s=completion.first_token_s,
        tokens_per_s=completion.tokens_per_s,
        ended=completion.finish_reason,
    )


def main() -> int:
    """Run the demo with the embedded model, or with what the arguments say to `dihedral serve`."""
    console = Console()
    try:
        return asyncio.run(demo(console, sys.argv[1:]))
    except ServingError as error:
        console.print(f"dihedral: {error}", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
