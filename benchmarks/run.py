"""Runs the workloads against a server and writes what they measured.

    python -m benchmarks.run [--workloads W1,W2] [--seconds 10] [--repeats 2] [-- --threads 2 ...]

starts `dihedral serve` for the time of the runs; what follows `--` is for it. Each workload warms up, is measured
once to find how many requests fill the time, and then runs `--repeats` times, each time with other prompts.
"""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import grpc
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.bench import Bench
from benchmarks.load import Client
from benchmarks.machine import machine_facts
from benchmarks.prompts import WordList
from benchmarks.report import rich_table
from benchmarks.server import Server, running_server, wait_until_ready
from benchmarks.workloads import WORKLOADS, Workload
from plugins.errors import InvalidConfig, ServingError
from protos.channel import channel_options

RESULTS = Path(__file__).parent / "results"
START_LIMIT_S = 300.0

app = App(name="python -m benchmarks.run", help="Run the workloads against a server and write what they measured.")


@app.default
def run(
    *serve_arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    workloads: str = ",".join(WORKLOADS),
    seconds: float = 10.0,
    repeats: int = 2,
    address: str | None = None,
    name: str = "dihedral",
) -> int:
    """Run the workloads.

    Parameters
    ----------
    serve_arguments: arguments of the server, after `--`
    workloads: which ones, by comma
    seconds: how long a run lasts, about
    repeats: runs of each workload
    address: a server that is running already, as host:port
    name: of the file in benchmarks/results
    """
    console = Console()
    try:
        chosen = choose(workloads)
        results = asyncio.run(
            _run(console, chosen, seconds, repeats, address, serve_arguments, RESULTS / f"{name}.log")
        )
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except ServingError as error:
        console.print(f"{error}", style="red", markup=False)
        return 1
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    console.print(rich_table(results["runs"]))
    console.print(f"written to {path}", highlight=False)
    return 0 if is_clean(results["runs"].values()) else 1


def choose(names: str) -> tuple[Workload, ...]:
    """Look workloads up by name. Raises: InvalidConfig: there is no such workload."""
    unknown = [name for name in names.split(",") if name not in WORKLOADS]
    if unknown:
        raise InvalidConfig(f"no workload is called {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    return tuple(WORKLOADS[name] for name in names.split(","))


def is_clean(workloads: Iterable[Sequence[Mapping[str, Any]]]) -> bool:
    """Tell whether every request of every run was answered, and with the lengths that were asked for."""
    faults = ("errors", "wrong_prompt_lengths", "wrong_output_lengths")
    return not any(run[fault] for runs in workloads for run in runs for fault in faults)


async def _run(
    console: Console,
    workloads: Sequence[Workload],
    seconds: float,
    repeats: int,
    address: str | None,
    serve_arguments: Sequence[str],
    log: Path,
) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        starting = progress.add_task("starting the server", total=None)
        async with _server(address, serve_arguments, log) as server:
            progress.remove_task(starting)
            async with grpc.aio.insecure_channel(server.address, options=channel_options()) as channel:
                client = Client(channel, time.perf_counter)
                bench = Bench(client, await WordList.measure(client.tokenize), server.pid, progress)
                runs = {each.name: await bench.measure(each, seconds, repeats) for each in workloads}
    return {
        "machine": machine_facts(),
        "server": {"command": server.command[1:], "start_to_ready_s": server.start_s},
        "runs": runs,
    }


@asynccontextmanager
async def _server(address: str | None, arguments: Sequence[str], log: Path) -> AsyncIterator[Server]:
    if address is None:
        async with running_server(arguments, log, START_LIMIT_S, time.perf_counter) as server:
            yield server
    else:
        await wait_until_ready(address, START_LIMIT_S)
        yield Server(address, None, None)


if __name__ == "__main__":
    sys.exit(app())
