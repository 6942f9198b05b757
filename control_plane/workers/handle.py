"""How the control plane speaks to a worker, in process or over gRPC.

Two classes fulfil it: `gpu_worker.worker.Worker` itself, and `GrpcWorkerHandle`. One contract suite holds both to it.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from plugins.types import StepPlan, StepResult, TokenizerBundle, WorkerInfo


class WorkerHandle(Protocol):
    """One worker. Used by one event loop; a handle is opened once and not reused after `close`."""

    async def describe(self) -> WorkerInfo:
        """Tell what the worker is. Needs no ownership, and may be asked at any time: while it answers, it lives.

        Raises: WorkerLost: it does not answer; WorkerLeaving: it stops on purpose.
        """

    async def tokenizer(self) -> TokenizerBundle:
        """Fetch the model's tokenizer. Raises: WorkerLost: it does not answer, or what came is damaged."""

    async def open(self) -> WorkerInfo:
        """Take the worker: it forgets all rows, and plans may be submitted, the first with seq 1.

        Raises: WorkerOwned: another control plane has it; WrongProtocol; WorkerLost.
        """

    def submit(self, plan: StepPlan) -> None:
        """Hand one plan out. Never waits; plans run in the order of this call."""

    def results(self) -> AsyncIterator[StepResult]:
        """Yield one result per plan, in order, until the worker goes away or the handle is closed.

        Raises: WorkerLost: the stream broke; WorkerLeaving: the worker stops on purpose, and what it had computed
            was yielded; PlanOutOfOrder: a gap in seq.
        """

    async def close(self) -> None:
        """Let the worker go. Idempotent; ends `results`."""
