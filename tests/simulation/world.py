"""The engine core, a checking fake worker and random clients in one thread, driven by a seed.

No clock and no sockets: what happens next is drawn from the seed, so that the same seed tells the same story.
"""

import hashlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field

from control_plane.engine.core import Delivery, EngineCore
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.fcfs import FCFSScheduler
from plugins.errors import DuplicateRequest, QueueFull, ServingError, WorkerLost
from plugins.scheduler import Scheduler
from plugins.types import FinishReason, Request, RequestId, StepResult, TokenId, WorkerInfo
from tests.fakes import EOS, FakeWorker, expected_output, request, worker_info


@dataclass(slots=True)
class Client:
    """What one request was promised, and what it got."""

    request: Request
    token_ids: list[TokenId] = field(default_factory=list)
    finish: FinishReason | None = None
    error: ServingError | None = None


class World:
    """One seed's story. `run` plays it to the end and checks it on the way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random
        max_step_tokens = draw.choice((4, 7, 16, 64))
        self.info = worker_info(
            num_blocks=draw.randint(4, 24),
            block_size=draw.choice((1, 4, 16)),
            max_sequences=draw.randint(1, min(8, max_step_tokens)),
            max_step_tokens=max_step_tokens,
        )
        self.config = SchedulerConfig(
            max_step_tokens=max_step_tokens,
            max_sequences=draw.randint(1, min(8, max_step_tokens)),
            watermark_ratio=draw.choice((0.0, 0.1)),
        )
        self.scheduler: FCFSScheduler | None = None
        self.core = EngineCore(self._make_scheduler, max_waiting=draw.choice((4, 16)))
        self.worker = FakeWorker(self.info)
        self.results: deque[StepResult] = deque()  # computed, and still on their way to the core
        self.clients: dict[RequestId, Client] = {}
        self.seen: Counter[str] = Counter()
        self.trace = hashlib.blake2b()
        self.num_requests = draw.randint(1, 40)
        self._num_started = 0
        self._connect()

    def run(self) -> None:
        """Play until every request has ended. Raises: AssertionError, InvariantBroken: a promise was broken."""
        for _ in range(20_000):
            if self._num_started == self.num_requests and not self.core.has_work():
                break
            self._move()
        else:
            raise AssertionError("20,000 moves, and some requests have not ended")
        self._check_the_end()

    # -- moves --------------------------------------------------------------------------------------------------

    def _move(self) -> None:
        draw = self.random.random()
        if draw < 0.2 and self._num_started < self.num_requests:
            self._submit()
        elif draw < 0.25:
            self._cancel(FinishReason.CANCELLED)
        elif draw < 0.27:
            self._cancel(FinishReason.DEADLINE)
        elif draw < 0.275:
            self._crash()
        elif self.results:
            self._step((self.results.popleft(),))
        else:
            self._step(())

    def _submit(self) -> None:
        draw = self.random
        capacity = min(self.info.num_blocks * self.info.block_size, self.info.model.max_model_len)
        self._num_started += 1
        num_prompt = draw.randint(1, max(1, min(capacity - 1, 60)))
        max_tokens = draw.randint(1, max(1, min(capacity - num_prompt, 30)))
        prompt = [draw.randint(3, 900) for _ in range(num_prompt)]
        name = f"r{self._num_started}"
        if self.clients and draw.random() < 0.2:
            name = draw.choice(tuple(self.clients))
        new = request(name, prompt, max_tokens, ignore_eos=draw.random() < 0.5)
        in_use = new.request_id in self.clients and self.clients[new.request_id].finish is None
        try:
            self.core.submit(new)
        except (QueueFull, DuplicateRequest) as error:
            assert in_use or isinstance(error, QueueFull), f"{name} has ended, and its name is still taken"
            self.seen["refused" if isinstance(error, QueueFull) else "duplicate"] += 1
            return
        assert not in_use, f"{name} is used twice at once"
        if new.request_id in self.clients:
            self._check_tokens(self.clients[new.request_id])
        if draw.random() < 0.3:
            self.worker.eos_after[new.request_id] = draw.randint(1, max_tokens)
        else:
            self.worker.eos_after.pop(new.request_id, None)
        self.clients[new.request_id] = Client(new)

    def _cancel(self, reason: FinishReason) -> None:
        if self.clients:
            request_id = self.random.choice(tuple(self.clients))
            state = "live" if self.clients[request_id].finish is None else "ended"
            self.core.cancel(request_id, reason)
            self.seen[f"{reason.name} while {state}"] += 1

    def _crash(self) -> None:
        """The worker goes away with everything in flight, and another one comes."""
        self.seen["crash"] += 1
        self.core.detach(WorkerLost("the simulated worker was killed"))
        self._step(())
        self.results.clear()
        self.core.connect()
        self.worker = FakeWorker(self.info, eos_after=self.worker.eos_after)
        self._connect()

    def _connect(self) -> None:
        self.core.attach(self.info)

    def _make_scheduler(self, info: WorkerInfo) -> Scheduler:
        self.scheduler = FCFSScheduler(self.config, info)
        return self.scheduler

    def _step(self, results: tuple[StepResult, ...]) -> None:
        preempted_before = self.core.load().num_preemptions
        output = self.core.step(results)
        self.seen["preemption"] += max(0, self.core.load().num_preemptions - preempted_before)
        for plan in output.plans:
            self.trace.update(repr(plan).encode())
            self.results.append(self.worker.execute(plan))
        for delivery in output.deliveries:
            self._receive(delivery)
        if self.scheduler is not None:
            self.scheduler.kv.check()

    # -- checks -------------------------------------------------------------------------------------------------

    def _receive(self, delivery: Delivery) -> None:
        client = self.clients[delivery.request_id]
        assert client.finish is None, f"{delivery.request_id} got more after its end"
        client.token_ids += delivery.token_ids
        client.finish = delivery.finish
        client.error = delivery.error
        if delivery.finish is not None:
            self.seen[delivery.finish.name] += 1
            normal = delivery.finish in (FinishReason.STOP, FinishReason.LENGTH)
            assert (delivery.error is None) == normal

    def _check_the_end(self) -> None:
        for client in self.clients.values():
            assert client.finish is not None, f"{client.request.request_id} never ended"
            self._check_tokens(client)
        while self.results:
            self._step((self.results.popleft(),))
        self._step(())
        load = self.core.load()
        assert (load.num_running, load.num_waiting) == (0, 0)
        assert load.num_free_blocks == load.num_blocks

    def _check_tokens(self, client: Client) -> None:
        tokens = tuple(client.token_ids)
        expected = expected_output(client.request.prompt_token_ids, len(tokens))
        if client.finish is FinishReason.STOP:
            assert tokens[-1] == EOS
            tokens, expected = tokens[:-1], expected[:-1]
        assert tokens == expected, f"{client.request.request_id}: {tokens} is not {expected}"
        if client.finish is FinishReason.LENGTH:
            assert len(tokens) == client.request.sampling.max_tokens
