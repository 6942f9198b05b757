"""Cells: a control plane and its workers, each a process of its own that can be lost and started again."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from tests.end_to_end.clients import Client, connected
from tests.end_to_end.processes import DIHEDRAL, FREE_PORTS, TINY, Dihedral, dihedral, free_port

REFERENCE = (*TINY, "--dtype=float32")  # the tiny model, in the mode whose tokens are exact


class Cell:
    """The processes of one cell. Workers are numbered from 0 and keep their places over restarts."""

    def __init__(self, stack: AsyncExitStack, worker_words: Sequence[str], worker_program: Sequence[str]) -> None:
        self.control_plane: Dihedral  # set once it is started
        self.addresses: list[str] = []
        self.workers: list[Dihedral] = []
        self._stack = stack
        self._words = tuple(worker_words)
        self._program = worker_program

    async def add_worker(self) -> int:
        """Start one more worker at a place of its own; returns its number."""
        self.addresses.append(f"127.0.0.1:{free_port()}")
        number = len(self.workers)
        self.workers.append(await self._start(number))
        return number

    async def add_control_plane(self, *words: str) -> Dihedral:
        """Start a control plane."""
        return await self._stack.enter_async_context(dihedral("control-plane", *FREE_PORTS, *words))

    async def restart(self, number: int, *words: str) -> None:
        """Start a worker again where it was, and wait until the control plane works with it."""
        since = len(self.control_plane.log)
        self.workers[number] = await self._start(number, *words)
        await self.control_plane.logged("worker_ready", since, worker_id=self.addresses[number])

    async def stop(self, number: int) -> int:
        """Ask a worker to end, and wait until it has; returns its exit code."""
        self.workers[number].process.send_signal(signal.SIGTERM)
        return await self.workers[number].process.wait()

    @asynccontextmanager
    async def kept_running(self) -> AsyncIterator[list[int | None]]:
        """Start each worker again whenever it dies, as a supervisor of processes does. Gives the exit codes so far."""
        codes: list[int | None] = []
        tasks = [asyncio.create_task(self._keep_running(number, codes)) for number in range(len(self.workers))]
        try:
            yield codes
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def all_ready(self) -> None:
        """Wait until the control plane works with every worker."""
        for address in self.addresses:
            await self.control_plane.logged("worker_ready", worker_id=address)

    def story(self) -> str:
        """Tell what happened to the workers, for whoever looks into a failure."""
        codes = [worker.process.returncode for worker in self.workers]
        events = [line for line in self.control_plane.log if '"event": "worker_' in line]
        return "\n".join((f"exit codes of the workers: {codes}", *events))

    async def _keep_running(self, number: int, codes: list[int | None]) -> None:
        while True:
            codes.append(await self.workers[number].process.wait())
            self.workers[number] = await self._start(number)

    async def _start(self, number: int, *words: str) -> Dihedral:
        port = self.addresses[number].rpartition(":")[2]
        command = ("worker", *self._words, f"--port={port}", "--metrics.port=0", *words)
        return await self._stack.enter_async_context(dihedral(*command, program=self._program))


@asynccontextmanager
async def cell(
    *words: str,
    num_workers: int = 2,
    worker_words: Sequence[str] = REFERENCE,
    worker_program: Sequence[str] = DIHEDRAL,
    places: Callable[[Sequence[str]], str] = ",".join,
) -> AsyncIterator[Cell]:
    """Run a cell, with these words for its control plane, from when all its workers serve. None outlives the test.

    `places` makes `workers.address` of the addresses.
    """
    async with AsyncExitStack() as stack:
        started = Cell(stack, worker_words, worker_program)
        for _ in range(num_workers):
            await started.add_worker()
        address = places(started.addresses)
        started.control_plane = await started.add_control_plane(f"--workers.address={address}", *words)
        await started.control_plane.ready()
        await started.all_ready()
        try:
            yield started
        except BaseException as error:
            error.add_note(started.story())
            raise


@asynccontextmanager
async def serving(*words: str, model: Sequence[str] = REFERENCE) -> AsyncIterator[tuple[Dihedral, Client]]:
    """The smallest cell: `dihedral serve`, and a client of it."""
    async with dihedral("serve", *model, *FREE_PORTS, *words) as server:
        await server.ready()
        async with connected(server.address) as client:
            yield server, client
