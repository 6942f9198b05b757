"""Measures what the control plane's own process costs: per token message, and per request.

    python -m benchmarks.control_plane [--streams 100,300,1000] [--workers 1,4,16,64] [--profile]

The control plane runs as `dihedral control-plane`, over its real ports; its workers compute nothing, and they and the
clients are other processes. Only the processor time of the one process counts, so that who shares the machine matters
little. Exits with 1 if a bar is missed.
"""

import asyncio
import pstats
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
from cyclopts import App
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.load import Client
from benchmarks.machine import Processes, machine_facts
from benchmarks.open_streams import Count, OpenStreams, short_requests
from benchmarks.prompts import WordList
from benchmarks.results_file import write_results
from benchmarks.server import Server, free_ports, running_server
from plugins.errors import ServingError
from protos.channel import channel_options

RESULTS = Path(__file__).parent / "results"
CONTROL_PLANE = ("-m", "control_plane.cli", "control-plane")
START_LIMIT_S = 60.0
SETTLE_S = 1.0  # after a change of load, before anything counts
NUM_CHANNELS = 4
NUM_PROMPT_TOKENS = 128
NUM_PROMPTS = 2_048
MAX_US_PER_MESSAGE, MAX_MS_PER_REQUEST, MAX_SPREAD = 60.0, 1.2, 1.2
NUM_PROFILE_LINES = 40
PROGRESS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

app = App(name="python -m benchmarks.control_plane", help="Measure what the control plane's process costs.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One load on one control plane."""

    series: str  # streams or workers: what grows from level to level
    num_streams: int
    num_workers: int

    @property
    def rows(self) -> int:
        """Sequences that each worker holds: with room, because routers do not split evenly."""
        return max(8, 2 * self.num_streams // self.num_workers) if self.num_workers > 1 else self.num_streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one level cost. Processor time is that of the control plane alone."""

    us_per_message: float  # at the paced rate
    messages_per_s: float
    tokens_per_message: float  # above 1 the client was too slow, and messages were merged
    full_us_per_message: float  # with workers that answer at once
    full_messages_per_s: float
    full_tokens_per_message: float
    ms_per_request: float  # of one token, with as many clients as there are streams
    requests_per_s: float


@app.default
def measure(
    *,
    streams: str = "100,300,1000",
    workers: str = "1,4,16,64",
    streams_per_worker: int = 16,
    rate: float = 3_000.0,
    seconds: float = 5.0,
    profile: bool = False,
    name: str = "control_plane",
) -> int:
    """Measure the chosen levels, each with a control plane of its own.

    Parameters
    ----------
    streams: open streams on one worker, one level each, by comma; empty for none
    workers: simulated workers, one level each, by comma; empty for none
    streams_per_worker: open streams of each of them
    rate: token messages per second in all streams together, at the paced rate
    seconds: how long each figure is measured
    profile: run the control plane under cProfile, which about doubles its cost, and print where the time goes
    name: of the file in benchmarks/results
    """
    console = Console()
    levels = [Level(series="streams", num_streams=number, num_workers=1) for number in _numbers(streams)]
    levels += [
        Level(series="workers", num_streams=number * streams_per_worker, num_workers=number)
        for number in _numbers(workers)
    ]
    RESULTS.mkdir(exist_ok=True)
    try:
        runs = asyncio.run(_measure_all(console, levels, rate, seconds, profile, name))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except ServingError as error:
        console.print(f"{error}", style="red", markup=False)
        return 1
    missed = [] if profile else misses(runs)
    path = RESULTS / f"{name}.json"
    write_results(path, {"machine": machine_facts(), "rate": rate, "runs": runs, "missed": missed})
    console.print(_table(runs))
    for line in missed:
        console.print(line, style="red", markup=False)
    console.print(f"written to {path}", highlight=False)
    return 1 if missed else 0


def misses(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each bar that a run misses, or that a series misses by growing."""
    lines = []
    for run in runs:
        level = f"{run['num_streams']} streams on {run['num_workers']} workers"
        if run["us_per_message"] > MAX_US_PER_MESSAGE:
            lines.append(f"{level}: {run['us_per_message']:.1f} us per message, above {MAX_US_PER_MESSAGE:g}")
        if run["ms_per_request"] > MAX_MS_PER_REQUEST:
            lines.append(f"{level}: {run['ms_per_request']:.2f} ms per request, above {MAX_MS_PER_REQUEST:g}")
    for series in dict.fromkeys(run["series"] for run in runs):
        for figure in ("us_per_message", "ms_per_request"):
            costs = [float(run[figure]) for run in runs if run["series"] == series]
            if max(costs) > MAX_SPREAD * costs[0]:
                growth = max(costs) / costs[0]
                lines.append(f"{series}: {figure} grows to {growth:.2f} of the first level's, above {MAX_SPREAD:g}")
    return lines


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


async def _measure_all(
    console: Console, levels: Sequence[Level], rate: float, seconds: float, profile: bool, name: str
) -> list[dict[str, Any]]:
    runs = []
    with Progress(*PROGRESS, console=console) as progress:
        task = progress.add_task("", total=3 * len(levels))
        for level in levels:
            log = RESULTS / f"{name}.log"
            profile_path = log.with_suffix(".prof") if profile else None
            figures = await _measure(level, rate, seconds, log, profile_path, progress, task)
            runs.append(asdict(level) | asdict(figures))
            if profile_path is not None:
                console.print(f"{level}", markup=False)
                console.print(_profile(profile_path), markup=False, highlight=False, soft_wrap=True)
                profile_path.unlink()
    return runs


async def _measure(
    level: Level,
    rate: float,
    seconds: float,
    log: Path,
    profile_path: Path | None,
    progress: Progress,
    task: TaskID,
) -> Figures:
    label = f"{level.num_streams} streams, {level.num_workers} workers"
    profiling = () if profile_path is None else ("-m", "cProfile", "-o", str(profile_path))
    async with AsyncExitStack() as stack:
        ports = free_ports(level.num_workers)
        workers = await stack.enter_async_context(_fake_workers(ports, level.rows))
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        arguments = (f"--workers.address={addresses}", "--admission.max_waiting=4096")
        program = (sys.executable, *profiling, *CONTROL_PLANE)
        server = await stack.enter_async_context(
            running_server(arguments, log, START_LIMIT_S, time.perf_counter, program)
        )
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=channel_options()))
            for _ in range(NUM_CHANNELS)
        ]
        words = await WordList.measure(Client(channels[0], time.perf_counter).tokenize)
        source = words.prompts(0, NUM_PROMPT_TOKENS, seed=level.num_streams)
        prompts = [source[index] for index in range(NUM_PROMPTS)]
        meter = _Meter(server, seconds)
        progress.update(task, description=f"{label}: opening")
        await workers.set_step_s(level.num_streams / rate)
        async with OpenStreams(channels, prompts[: level.num_streams]) as streams:
            progress.update(task, description=f"{label}: paced")
            paced = await meter.run(streams.count)
            progress.advance(task)
            progress.update(task, description=f"{label}: at once")
            await workers.set_step_s(0)
            full = await meter.run(streams.count)
            progress.advance(task)
        progress.update(task, description=f"{label}: requests")
        count = Count()
        async with short_requests(channels, prompts, level.num_streams, count):
            requests = await meter.run(count)
        progress.advance(task)
    return Figures(
        us_per_message=round(1e6 * paced.cpu_s / paced.num_messages, 2),
        messages_per_s=round(paced.num_messages / paced.wall_s, 1),
        tokens_per_message=round(paced.num_tokens / paced.num_messages, 3),
        full_us_per_message=round(1e6 * full.cpu_s / full.num_messages, 2),
        full_messages_per_s=round(full.num_messages / full.wall_s, 1),
        full_tokens_per_message=round(full.num_tokens / full.num_messages, 3),
        ms_per_request=round(1e3 * requests.cpu_s / requests.num_requests, 4),
        requests_per_s=round(requests.num_requests / requests.wall_s, 1),
    )


@dataclass(frozen=True, slots=True)
class _Window:
    wall_s: float
    cpu_s: float
    num_messages: int
    num_tokens: int
    num_requests: int


class _Meter:
    """Reads one process's processor time and a count, before and after a while."""

    def __init__(self, server: Server, seconds: float) -> None:
        if server.pid is None:
            raise ServingError("only a server of our own can be measured")
        self._process = Processes(server.pid)
        self._seconds = seconds

    async def run(self, count: Count) -> _Window:
        """Let the load settle, then measure it. Raises: ServingError: nothing came."""
        await asyncio.sleep(SETTLE_S)
        before = self._now(count)
        await asyncio.sleep(self._seconds)
        window = _Window(*(late - early for late, early in zip(self._now(count), before, strict=True)))
        if not window.num_messages:
            raise ServingError(f"no token came within {self._seconds:g} s")
        return window

    def _now(self, count: Count) -> tuple[Any, ...]:
        return time.perf_counter(), self._process.cpu_s(), count.num_messages, count.num_tokens, count.num_requests


class _FakeWorkers:
    """The process of the simulated workers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def set_step_s(self, step_s: float) -> None:
        """Let every step take so long from now on."""
        if self._process.stdin is not None:
            self._process.stdin.write(f"{1000 * step_s:.3f}\n".encode())
            await self._process.stdin.drain()


@asynccontextmanager
async def _fake_workers(ports: Sequence[int], rows: int) -> AsyncIterator[_FakeWorkers]:
    arguments = ("-m", "benchmarks.fake_worker", "--ports", ",".join(map(str, ports)), "--rows", str(rows))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=asyncio.subprocess.PIPE)
    try:
        yield _FakeWorkers(process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _profile(path: Path) -> str:
    text = StringIO()
    pstats.Stats(str(path), stream=text).strip_dirs().sort_stats("tottime").print_stats(NUM_PROFILE_LINES)
    return text.getvalue()


def _table(runs: Sequence[Mapping[str, Any]]) -> Table:
    headings = ("us per\nmessage", "mes-\nsages/s", "at once:\nus", "mes-\nsages/s", "tokens/\nmessage")
    table = Table("streams", "workers", *headings, "ms per\nrequest", "re-\nquests/s", box=None, padding=(0, 1, 0, 0))
    figures = (
        "us_per_message",
        "messages_per_s",
        "full_us_per_message",
        "full_messages_per_s",
        "full_tokens_per_message",
        "ms_per_request",
        "requests_per_s",
    )
    for run in runs:
        table.add_row(str(run["num_streams"]), str(run["num_workers"]), *(f"{run[name]:,.4g}" for name in figures))
    return table


if __name__ == "__main__":
    sys.exit(app())
