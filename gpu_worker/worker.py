"""The worker as its owner sees it: plans in, results out, with the device behind one thread.

Moves values between an event loop and the device thread and times them; what a plan does is the runner's business.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from plugins.errors import PlanOutOfOrder
from plugins.metrics import WORKER_QUEUE, WORKER_ROW_FAILURES, WORKER_ROWS, WORKER_STEP, WORKER_TOKENS, Metrics
from plugins.types import StepPlan, StepResult, TokenizerBundle, WorkerInfo


class Pending(Protocol):
    """A launched plan."""

    @property
    def num_prompt_tokens(self) -> int: ...

    def is_ready(self) -> bool: ...

    def result(self) -> StepResult: ...


class Runner(Protocol):
    """What the device thread runs. It alone calls it."""

    @property
    def num_rows(self) -> int: ...

    def reset(self) -> None: ...

    def launch(self, plan: StepPlan) -> Pending: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A plan on its way to the device thread."""

    plan: StepPlan
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class _Opened:
    """From here on plans belong to a new owner, who reads results from this channel."""

    channel: "_Channel"
    done: asyncio.Future[None]


class _Stop:
    """The device thread ends."""


_Command = _Submitted | _Opened | _Stop


class _Channel:
    """What one owner reads. Written by the device thread, read on the loop; None ends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.items: asyncio.Queue[StepResult | Exception | None] = asyncio.Queue()
        self._loop = loop

    def put(self, item: StepResult | Exception | None) -> None:
        """Called from the device thread."""
        _tell(self._loop, partial(self.items.put_nowait, item))


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Let a loop make a call. One that is closed has nobody left to tell."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


class Worker:
    """One model on one device, opened by one owner at a time. It fulfils the control plane's WorkerHandle.

    Used from one event loop. The device thread starts with the first `open` and ends with `close`.
    """

    def __init__(
        self,
        runner: Runner,
        info: WorkerInfo,
        bundle: TokenizerBundle,
        threads: int,
        metrics: Metrics,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._info = info
        self._bundle = bundle
        self._clock_ns = clock_ns
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        device_thread = _DeviceThread(runner, self._commands, threads, metrics, clock_ns)
        self._thread = threading.Thread(target=device_thread.run, name="device", daemon=True)
        self._channel: _Channel | None = None
        self._is_closed = False

    async def describe(self) -> WorkerInfo:
        return self._info

    async def tokenizer(self) -> TokenizerBundle:
        return self._bundle

    async def open(self) -> WorkerInfo:
        """Forget all rows, after the plans before this call and before those behind it; results of the former
        are dropped, and whoever still reads them is told the end. What the runner raises is raised here as it was,
        and the worker computes nothing until it is opened again."""
        if self._is_closed:
            raise RuntimeError("the worker is closed")
        if self._thread.ident is None:
            self._thread.start()
        loop = asyncio.get_running_loop()
        if self._channel is not None:
            self._channel.items.put_nowait(None)
        self._channel = _Channel(loop)
        opened = _Opened(self._channel, loop.create_future())
        self._commands.put(opened)
        await opened.done
        return self._info

    def submit(self, plan: StepPlan) -> None:
        self._commands.put(_Submitted(plan, self._clock_ns()))

    async def results(self) -> AsyncGenerator[StepResult, None]:
        """Yield the results of the last `open`, until it is opened again or closed.

        Raises: PlanOutOfOrder: a gap in seq. Anything else that the device thread met is raised as it was. After
        either the worker computes nothing until it is opened again.
        """
        if self._channel is None:
            raise RuntimeError("the worker was not opened")
        items = self._channel.items
        while isinstance(item := await items.get(), StepResult):
            yield item
        items.put_nowait(item)  # who asks again gets the same answer
        if item is not None:
            raise item

    async def close(self) -> None:
        """Let the thread finish what it has launched and close the runner, and end `results`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._commands.put(_Stop())
        if self._thread.ident is None:
            self._thread.start()
        await asyncio.to_thread(self._thread.join)
        if self._channel is not None:
            self._channel.items.put_nowait(None)


@dataclass(frozen=True, slots=True)
class _Launched:
    pending: Pending
    started_ns: int
    queue_ns: int


class _DeviceThread:
    """The loop that computes. Everything here runs in the device thread.

    A result is handed out as soon as it is ready; while it is not, the next plan is launched behind it.
    """

    def __init__(
        self,
        runner: Runner,
        commands: "queue.SimpleQueue[_Command]",
        threads: int,
        metrics: Metrics,
        clock_ns: Callable[[], int],
    ) -> None:
        self._runner = runner
        self._commands = commands
        self._threads = threads
        self._metrics = metrics
        self._clock_ns = clock_ns
        self._channel: _Channel | None = None  # None: nobody has opened, or the owner's plans met an error
        self._next_seq = 1
        self._launched: deque[_Launched] = deque()

    def run(self) -> None:
        # OpenMP's thread count belongs to the calling thread: it is set here, before anything computes.
        torch.set_num_threads(self._threads)
        while True:
            if self._launched and (self._launched[0].pending.is_ready() or self._commands.empty()):
                self._guarded(self._deliver)
                continue
            command = self._commands.get()
            if isinstance(command, _Stop):
                while self._launched:
                    self._guarded(self._deliver)
                self._guarded(self._runner.close)
                return
            if isinstance(command, _Opened):
                self._guarded(partial(self._open, command))
            else:
                self._guarded(partial(self._launch, command))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Whatever goes wrong goes to the owner, whose plans are then ignored until somebody opens again."""
        try:
            work()
        except BaseException as error:  # one that ended the thread would let the owner wait for ever
            self._launched.clear()
            if self._channel is not None:
                self._channel.put(error if isinstance(error, Exception) else RuntimeError(f"a step met {error!r}"))
            self._channel = None

    def _open(self, opened: _Opened) -> None:
        self._launched.clear()
        self._channel, self._next_seq = opened.channel, 1
        failure: Exception | None = None
        try:
            self._runner.reset()
        except Exception as error:
            failure = error
            raise
        finally:
            _tell(opened.done.get_loop(), partial(_finish, opened.done, failure))

    def _launch(self, submitted: _Submitted) -> None:
        if self._channel is None:
            return
        plan = submitted.plan
        if plan.seq != self._next_seq:
            raise PlanOutOfOrder(f"plan {plan.seq} came, expected {self._next_seq}")
        self._next_seq += 1
        started_ns = self._clock_ns()
        pending = self._runner.launch(plan)
        self._launched.append(_Launched(pending, started_ns, started_ns - submitted.arrived_ns))

    def _deliver(self) -> None:
        launched = self._launched.popleft()
        result = launched.pending.result()
        compute_ns = self._clock_ns() - launched.started_ns
        if self._channel is not None:
            self._channel.put(replace(result, queue_ns=launched.queue_ns, compute_ns=compute_ns))
        self._metrics.observe(WORKER_STEP, compute_ns / 1e9)
        self._metrics.observe(WORKER_QUEUE, launched.queue_ns / 1e9)
        self._metrics.count(WORKER_TOKENS, launched.pending.num_prompt_tokens, "prompt")
        self._metrics.count(WORKER_TOKENS, len(result.token_ids), "output")
        for failure in result.failures:
            self._metrics.count(WORKER_ROW_FAILURES, 1, failure.reason)
        self._metrics.set(WORKER_ROWS, self._runner.num_rows)


def _finish(done: asyncio.Future[None], failure: Exception | None) -> None:
    if done.done():
        return  # whoever opened waits no longer
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)
