"""The scheduler and its allocator as a state machine: any order of calls, with the worker's answers late."""

from collections import deque

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.types import FinishReason, RequestId, StepResult
from tests.fakes import FakeWorker, request, worker_info

NUM_BLOCKS, BLOCK_SIZE, MAX_SEQUENCES, MAX_STEP_TOKENS = 6, 4, 3, 8
CAPACITY = NUM_BLOCKS * BLOCK_SIZE


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, wait, are cancelled and finish with up to two plans in flight; a checking worker runs them."""

    def __init__(self) -> None:
        super().__init__()
        info = worker_info(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_sequences=MAX_SEQUENCES,
            max_step_tokens=MAX_STEP_TOKENS,
        )
        config = SchedulerConfig(max_step_tokens=MAX_STEP_TOKENS, max_sequences=MAX_SEQUENCES, watermark_ratio=0.2)
        self.scheduler = RunAheadScheduler(config, info)
        self.worker = FakeWorker(info)
        self.waiting: set[RequestId] = set()  # whose rows wait in this plan
        self.worker.waits = self.waiting.__contains__
        self.results: deque[StepResult] = deque()
        self.live: dict[RequestId, int] = {}  # and how many tokens each may still have
        self.num_requests = 0

    @rule(num_prompt=st.integers(1, CAPACITY - 1), max_tokens=st.integers(1, 8))
    def add(self, num_prompt: int, max_tokens: int) -> None:
        self.num_requests += 1
        new = request(f"r{self.num_requests}", range(3, 3 + num_prompt), min(max_tokens, CAPACITY - num_prompt))
        self.scheduler.add_request(new)
        self.live[new.request_id] = min(max_tokens, CAPACITY - num_prompt)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.cancel_request(request_id)
        del self.live[request_id]

    @rule(throttle=st.booleans(), data=st.data())
    @precondition(lambda self: len(self.results) < RunAheadScheduler.max_plans_in_flight)
    def schedule(self, throttle: bool, data: st.DataObject) -> None:
        if self.live:
            self.waiting |= data.draw(st.sets(st.sampled_from(sorted(self.live)), max_size=2))
        self._schedule(throttle)
        self.waiting.clear()

    def _schedule(self, throttle: bool) -> None:
        plan = self.scheduler.schedule(throttle)
        if not plan.is_empty:
            self.results.append(self.worker.execute(plan))

    @rule()
    @precondition(lambda self: self.results)
    def update(self) -> None:
        for end in self.scheduler.update(self.results.popleft()):
            assert end.reason is FinishReason.LENGTH
            del self.live[end.request_id]

    @invariant()
    def blocks_and_requests_add_up(self) -> None:
        self.scheduler.kv.check()
        load = self.scheduler.load()
        assert load.num_running + load.num_waiting == len(self.live)
        assert load.num_running <= MAX_SEQUENCES
        assert load.num_running > 0 or load.num_free_blocks == NUM_BLOCKS

    def teardown(self) -> None:
        """Nobody waits for ever: with nothing new, all requests end, and every block is free."""
        for _ in range(2000):
            if not self.live:
                break
            if len(self.results) < RunAheadScheduler.max_plans_in_flight:
                self._schedule(throttle=False)
            if self.results:
                self.update()
        assert not self.live
        assert self.scheduler.kv.num_free == NUM_BLOCKS


TestSchedulerMachine = SchedulerMachine.TestCase
