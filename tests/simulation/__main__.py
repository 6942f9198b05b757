"""`make simulate`: plays many seeds on all cores, and tells what they met.

python -m tests.simulation --seeds 10000
python -m tests.simulation --seed 123          one seed, with the traceback if it breaks a promise
"""

import argparse
import hashlib
import logging
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.simulation.faults import EVENTS, STATES, Point
from tests.simulation.world import Report, simulate

BATCH = 25  # seeds that a process plays at a time
ENOUGH_SEEDS = 10_000  # from so many on, a fault that hardly fired is a failure too
ENOUGH_FIRINGS = 100
MAX_TOLD = 20  # failures
BESIDES_ENDS = ("Blocks", "culprit")  # how everything starts that was seen and is no end of a request
# A sequence that waits has no blocks to lose, so only these are ever preempted.
PREEMPTIBLE = ("prefilling", "decoding")
PAIRS = [(state, event) for state in STATES for event in EVENTS if event != "preempt" or state in PREEMPTIBLE]


@dataclass(slots=True)
class Failure:
    """A seed that broke a promise."""

    seed: int
    message: str
    trace: str  # the traceback


@dataclass(slots=True)
class Summary:
    """What many seeds showed together."""

    num_seeds: int = 0
    traces: dict[int, str] = field(default_factory=dict)
    fired: Counter[Point] = field(default_factory=Counter)
    fired_live: Counter[Point] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, outcome: Report | Failure) -> None:
        """Count one seed."""
        self.num_seeds += 1
        if isinstance(outcome, Failure):
            self.failures.append(outcome)
            return
        self.traces[outcome.seed] = outcome.trace
        self.fired += outcome.fired
        self.fired_live += outcome.fired_live
        self.pairs += outcome.pairs
        self.seen += outcome.seen

    @property
    def trace(self) -> str:
        """One hash of all traces, whatever the order in which they came."""
        digest = hashlib.blake2b(digest_size=16)
        for _, trace in sorted(self.traces.items()):
            digest.update(trace.encode())
        return digest.hexdigest()

    def gaps(self) -> list[str]:
        """What these seeds should have met and did not."""
        points = [f"{point.value}: {self.fired_live[point]}" for point in Point if not self.is_enough(point)]
        return points + [f"{state} and {event}: never" for state, event in PAIRS if not self.pairs[state, event]]

    def is_enough(self, point: Point) -> bool:
        """Did the point fire as often as many seeds should make it?"""
        return self.fired_live[point] >= ENOUGH_FIRINGS


def play(seeds: Iterable[int]) -> list[Report | Failure]:
    """Play some seeds; what breaks is an answer."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # workers are lost all the time
    try:
        return [play_one(seed) for seed in seeds]
    finally:
        logging.disable(before)


def play_one(seed: int) -> Report | Failure:
    """Play one seed."""
    try:
        return simulate(seed)
    except Exception as error:
        return Failure(seed, f"{type(error).__name__}: {error}", traceback.format_exc())


def play_all(seeds: range, console: Console) -> Summary:
    """Play seeds on all cores."""
    summary = Summary()
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    with Progress(console=console, transient=True) as progress, ProcessPoolExecutor(os.cpu_count()) as processes:
        bar = progress.add_task("seeds", total=len(seeds))
        for outcomes in processes.map(play, batches):
            for outcome in outcomes:
                summary.add(outcome)
            progress.advance(bar, len(outcomes))
    return summary


def tell(summary: Summary, console: Console) -> None:
    """Print what there is to know."""
    points = Table("fault point", "fired", "with a live request", title="faults")
    for point in Point:
        points.add_row(point.value, str(summary.fired[point]), str(summary.fired_live[point]))
    pairs = Table("a request that is", *EVENTS, title="what happened to requests")
    for state in STATES:
        counts = (str(summary.pairs[state, event]) if (state, event) in PAIRS else "-" for event in EVENTS)
        pairs.add_row(state, *counts)
    ends = Table("end", "requests", title="how requests ended")
    others = Table("what", "times", title="also seen")
    for what, count in sorted(summary.seen.items()):
        (others if what.startswith(BESIDES_ENDS) else ends).add_row(what, str(count))
    for table in (points, pairs, ends, others):
        console.print(table)
    for failure in summary.failures[:MAX_TOLD]:
        console.print(f"seed {failure.seed}: {failure.message}\n    make simulate SEED={failure.seed}", markup=False)
    seeds, failures = counted(summary.num_seeds, "seed"), counted(len(summary.failures), "failure")
    console.print(f"{seeds}, {failures}, trace {summary.trace}")


def counted(num: int, what: str) -> str:
    """Say how many there are of something."""
    return f"{num} {what}" if num == 1 else f"{num} {what}s"


def natural(text: str) -> int:
    """Read a number from 1 on. Raises: ValueError: it is none."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def main(arguments: list[str]) -> int:
    """Play, tell, and return the exit code: 1 if a promise was broken or too little was met."""
    parser = argparse.ArgumentParser(prog="make simulate", description="Simulate the control plane under faults.")
    parser.add_argument("--seeds", type=natural, default=1000, help="how many to play, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play only this one, and show its traceback")
    options = parser.parse_args(arguments)
    console = Console()
    if options.seed is not None:
        outcome = play([options.seed])[0]
        if isinstance(outcome, Failure):
            console.print(outcome.trace, markup=False)
            return 1
        console.print(f"trace {outcome.trace}: no promise broken", markup=False)
        return 0
    started_at = time.monotonic()
    summary = play_all(range(options.first, options.first + options.seeds), console)
    tell(summary, console)
    console.print(f"{(time.monotonic() - started_at) / options.seeds * 1000:.1f} ms per seed")
    gaps = summary.gaps() if options.seeds >= ENOUGH_SEEDS else []
    for gap in gaps:
        console.print(f"met too seldom: {gap}", markup=False)
    return int(bool(summary.failures or gaps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
