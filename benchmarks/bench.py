"""Runs one workload after another against one server: warm-up, calibration, then the runs that count.

Puts load and machine together; where the server comes from is the business of `benchmarks/run.py`.
"""

import time
from dataclasses import asdict
from typing import Any

from rich.progress import Progress

from benchmarks.load import Answer, Client, Figures, closed_loop, num_requests_for, summarise
from benchmarks.machine import Usage, Watch
from benchmarks.prompts import WordList
from benchmarks.workloads import WORKLOADS, Workload

WARM_UP_SEED, CALIBRATION_SEED = 90, 80  # the runs that count have 100, 200, ...; each workload adds its index


class Bench:
    """One server, one client, and the workloads that they run. Used by one event loop."""

    def __init__(self, client: Client, words: WordList, server_pid: int | None, progress: Progress) -> None:
        self._client = client
        self._words = words
        self._server_pid = server_pid
        self._progress = progress

    async def measure(self, workload: Workload, run_s: float, repeats: int) -> list[dict[str, Any]]:
        """Warm up, calibrate, and run a workload; one mapping of figures per run."""
        index = list(WORKLOADS).index(workload.name)
        await self._run(workload, WARM_UP_SEED + index, workload.num_clients, "warm-up")
        wave, _ = await self._run(workload, CALIBRATION_SEED + index, workload.num_clients, "calibration")
        num_requests = num_requests_for(workload, wave.wall_s, run_s)
        runs = []
        for repeat in range(1, repeats + 1):
            figures, usage = await self._run(workload, 100 * repeat + index, num_requests, f"run {repeat}")
            runs.append(asdict(figures) | asdict(usage))
        return runs

    async def _run(self, workload: Workload, seed: int, num_requests: int, label: str) -> tuple[Figures, Usage]:
        prompts = self._words.prompts(workload.num_prefix_tokens, workload.num_distinct_tokens, seed)
        task = self._progress.add_task(f"{workload.name} {label}", total=num_requests)

        async def send(index: int) -> Answer:
            return await self._client.generate(prompts[index], workload.num_output_tokens)

        async with Watch(self._server_pid) as watch:
            start_s = time.perf_counter()
            answers = await closed_loop(send, num_requests, workload.num_clients, lambda: self._progress.advance(task))
            wall_s = time.perf_counter() - start_s
        self._progress.remove_task(task)
        return summarise(answers, workload, wall_s), watch.usage()
