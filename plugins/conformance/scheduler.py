"""What every scheduler promises, as checks that need nothing but a way to make one.

Plans go to a worker that checks them; results come back as late as the scheduler's declared depth allows.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from plugins.conformance.plan_checker import PlanChecker, say
from plugins.conformance.report import CheckResult, require, run_checks
from plugins.scheduler import Scheduler
from plugins.types import (
    FinishReason,
    ModelInfo,
    Request,
    RequestId,
    Row,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenId,
    WorkerInfo,
)

MakeScheduler: TypeAlias = Callable[[WorkerInfo], Scheduler]
VOCAB_SIZE = 1000
MAX_MOVES = 5000  # in which all of a check's requests must have ended


def check_scheduler(make: MakeScheduler) -> tuple[CheckResult, ...]:
    """Run every check of this module."""
    return run_checks(SCHEDULER_CHECKS, make)


def small_worker(
    num_blocks: int = 64, block_size: int = 4, max_sequences: int = 8, max_step_tokens: int = 32
) -> WorkerInfo:
    """A worker on which everything happens soon."""
    return WorkerInfo(
        model=ModelInfo(
            name="checked",
            architecture="CheckedForCausalLM",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=1024,
            eos_token_ids=(TokenId(2),),
            num_parameters=0,
        ),
        incarnation="one",
        num_blocks=num_blocks,
        block_size=block_size,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        kv_cache_dtype="float32",
        kv_bytes=0,
        tokenizer_sha256="",
        load_s=0.0,
    )


def request_of(name: str, num_prompt: int = 6, max_tokens: int = 4, first_token: int = 3) -> Request:
    """A valid request; prompts with the same first token begin alike."""
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=tuple(TokenId(3 + (first_token + n) % (VOCAB_SIZE - 3)) for n in range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True),
    )


class Rig:
    """A scheduler, its checking worker, and the results that are on their way between them."""

    def __init__(self, make: MakeScheduler, info: WorkerInfo) -> None:
        self.scheduler = make(info)
        self.worker = PlanChecker(info)
        self.plans: list[StepPlan] = []
        self.results: deque[StepResult] = deque()
        self.live: dict[RequestId, Request] = {}
        self.ends: dict[RequestId, FinishReason] = {}
        self.text_ends_at: dict[RequestId, int] = {}  # output length at which the engine finds a stop string
        self.num_told: Counter[RequestId] = Counter()  # output tokens that the scheduler was told of
        self._owners: deque[dict[Row, RequestId]] = deque()  # of each result on its way
        self._num_requests = 0

    def add(self, request: Request) -> None:
        """Give the scheduler a request, numbered and timed as the engine does."""
        self._num_requests += 1
        request = replace(request, arrival=self._num_requests, arrival_s=float(self._num_requests))
        self.live[request.request_id] = request
        self.worker.expect(request)
        self.scheduler.add_request(request)

    def cancel(self, request_id: RequestId) -> None:
        del self.live[request_id]
        self.scheduler.cancel_request(request_id)
        self.worker.forget(request_id)

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        """Plan a step, and let the worker have it unless it is empty."""
        plan = self.scheduler.schedule(throttle_prefills)
        if not plan.is_empty:
            self.plans.append(plan)
            self.results.append(self.worker.take(plan))
            self._owners.append(self.worker.owners())
        return plan

    def update(self) -> None:
        """Hand over the oldest result, as the engine does: a request whose text ends there has stopped."""
        for finished in self.scheduler.update(self._read(self.results.popleft(), self._owners.popleft())):
            request_id = finished.request_id
            require(request_id in self.live, f"{request_id} ends, and is not at hand")
            del self.live[request_id]
            self.ends[request_id] = finished.reason
            self.worker.forget(request_id)

    def _read(self, result: StepResult, owners: dict[Row, RequestId]) -> StepResult:
        finishes = list(result.finishes)
        for index, (row, count) in enumerate(zip(result.rows, result.counts, strict=True)):
            request_id = owners[row]
            if request_id in self.live:
                self.num_told[request_id] += count
                if count and self.num_told[request_id] == self.text_ends_at.get(request_id):
                    finishes[index] = FinishReason.STOP
        return replace(result, finishes=tuple(finishes))

    def move(self, throttle_prefills: bool = False) -> None:
        """Plan as far ahead as declared, then hand one result over, as the engine does."""
        while len(self.results) < self.scheduler.max_plans_in_flight:
            if self.schedule(throttle_prefills).is_empty:
                break
        if self.results:
            self.update()

    def finish(self, throttle_prefills: bool = False) -> None:
        """Move until nothing is left. Raises: CheckFailed: something is left for ever, or is still held."""
        for _ in range(MAX_MOVES):
            if not (self.live or self.results or self.scheduler.has_work()):
                break
            self.move(throttle_prefills)
        require(not self.live, f"{sorted(self.live)} have not ended after {MAX_MOVES} moves")
        require(not self.scheduler.has_work(), "it has work, and no request is left")
        load = self.scheduler.load()
        require((load.num_running, load.num_waiting) == (0, 0), f"all have ended, and its load is {load}")
        require(load.num_free_blocks == load.num_blocks, f"{load.num_blocks - load.num_free_blocks} blocks are lost")


# -- the checks -----------------------------------------------------------------------------------------------------


def it_plans_nothing_when_nothing_is_to_do(make: MakeScheduler) -> None:
    """Before the first request and after the last one plans are empty, and there is no work."""
    rig = Rig(make, small_worker())
    for _ in range(2):
        require(not rig.scheduler.has_work(), "it has work, and no request was given to it")
        require(rig.schedule().is_empty, "it plans a step, and has no request")
    rig.add(request_of("only"))
    require(rig.scheduler.has_work(), "it has a request, and no work")
    rig.finish()
    require(rig.schedule().is_empty, "it plans a step after all requests have ended")


def every_request_ends_once_with_its_own_tokens(make: MakeScheduler) -> None:
    """Whatever the sizes of the worker, each request gets what the model says to its prompt, and its end."""
    for seed in range(12):
        draw = random.Random(seed)
        info = small_worker(
            num_blocks=draw.choice((16, 24, 64)),
            block_size=draw.choice((1, 4, 8)),
            max_sequences=draw.choice((1, 3, 8)),
            max_step_tokens=draw.choice((8, 16, 64)),
        )
        rig = Rig(make, info)
        requests = _drawn_requests(draw, info)
        for request in requests:
            if draw.random() < 0.3 and request.sampling.max_tokens:
                rig.worker.stop_after[request.request_id] = draw.randint(1, request.sampling.max_tokens)
            rig.add(request)
            if draw.random() < 0.5:
                rig.move()
        rig.finish()
        for request in requests:
            _check_end(rig, request)


def no_plan_asks_for_more_than_the_worker_has(make: MakeScheduler) -> None:
    """One row, or one token in a step, or as many blocks as one request needs: all are enough."""
    for info in (
        small_worker(max_sequences=1),
        small_worker(max_sequences=1, max_step_tokens=1),
        small_worker(num_blocks=4, block_size=4, max_step_tokens=5),
    ):
        rig = Rig(make, info)
        for n in range(6):
            rig.add(request_of(f"r{n}", num_prompt=11, max_tokens=5, first_token=n))
        rig.finish()


def requests_that_outgrow_the_blocks_end_with_their_own_tokens(make: MakeScheduler) -> None:
    """Four of them need twice the blocks there are. Some wait, or start over with the tokens they have."""
    rig = Rig(make, small_worker(num_blocks=16, block_size=2))
    requests = [request_of(f"r{n}", num_prompt=4, max_tokens=12, first_token=50 * n) for n in range(4)]
    for request in requests:
        rig.add(request)
    rig.finish()
    for request in requests:
        _check_end(rig, request)


def the_row_of_a_cancelled_request_is_released_by_the_next_plan(make: MakeScheduler) -> None:
    """Also with plans in flight that name it. Whoever waits leaves without a trace; unknown ids are ignored."""
    rig = Rig(make, small_worker(max_sequences=2))
    for n in range(4):
        rig.add(request_of(f"r{n}", max_tokens=30))
    rig.move()
    rig.move()
    rig.cancel(RequestId("r0"))
    rig.scheduler.cancel_request(RequestId("r0"))
    rig.scheduler.cancel_request(RequestId("nobody"))
    rig.schedule()  # the checking worker insists on the release
    rig.cancel(RequestId("r3"))
    for _ in range(3):
        rig.move()
    for request_id in sorted(rig.live):
        rig.cancel(request_id)
    rig.finish()
    require(not rig.ends, f"{sorted(rig.ends)} end, and were cancelled")


def cancelling_at_any_moment_leaves_nothing_behind(make: MakeScheduler) -> None:
    """Requests come and go at random, while others run."""
    for seed in range(12):
        draw = random.Random(seed)
        rig = Rig(make, small_worker(num_blocks=16, max_sequences=3, max_step_tokens=8))
        for request in _drawn_requests(draw, small_worker(num_blocks=16)):
            rig.add(request)
            for _ in range(draw.randint(0, 4)):
                rig.move(throttle_prefills=draw.random() < 0.3)
                if rig.live and draw.random() < 0.2:
                    rig.cancel(draw.choice(sorted(rig.live)))
        rig.finish()


def the_same_calls_give_the_same_plans(make: MakeScheduler) -> None:
    """Two instances that are told the same decide the same: no clock, no chance, no order of a set."""
    plans = []
    for _ in range(2):
        rig = Rig(make, small_worker(num_blocks=24, max_sequences=3))
        for request in _drawn_requests(random.Random(5), small_worker(num_blocks=24)):
            rig.add(request)
            rig.move()
        rig.finish()
        plans.append(rig.plans)
    require(plans[0] == plans[1], "two instances that were told the same made different plans")


def it_plans_as_far_ahead_as_it_declares(make: MakeScheduler) -> None:
    """A request that decodes is in every one of `max_plans_in_flight` plans before the first result."""
    rig = Rig(make, small_worker())
    rig.add(request_of("only", num_prompt=3, max_tokens=20))
    depth = rig.scheduler.max_plans_in_flight
    require(depth >= 1, f"its max_plans_in_flight is {depth}")
    for ahead in range(depth):
        plan = rig.schedule()
        require(bool(plan.chunks), f"it declares {depth} plans in flight, and plan {ahead + 1} computes nothing")
    rig.finish()


def a_request_with_output_is_continued(make: MakeScheduler) -> None:
    """Its tokens are known at its admission, and it ends when it has max_tokens of them, old and new together."""
    rig = Rig(make, small_worker())
    request = request_of("back", num_prompt=5, max_tokens=7)
    output = _answer(request.prompt_token_ids, 3)
    rig.add(replace(request, output_token_ids=output))
    rig.finish()
    admitted = [each for plan in rig.plans for each in plan.admitted][0]
    require(admitted.token_ids == (*request.prompt_token_ids, *output), "it is admitted without the output it had")
    _check_end(rig, request)


def advice_to_hold_prompts_back_does_not_stop_them(make: MakeScheduler) -> None:
    """With `throttle_prefills` in every step all requests end nevertheless."""
    rig = Rig(make, small_worker(max_sequences=2))
    for n in range(6):
        rig.add(request_of(f"r{n}", num_prompt=20, first_token=9 * n))
    rig.finish(throttle_prefills=True)


def a_failed_row_ends_its_request_alone(make: MakeScheduler) -> None:
    """The request ends FAILED, and those beside it go on."""
    rig = Rig(make, small_worker())
    requests = [request_of(f"r{n}", max_tokens=8) for n in range(3)]
    for request in requests:
        rig.add(request)
    rig.move()
    rig.worker.failing.add(RequestId("r1"))
    rig.finish()
    require(rig.ends[RequestId("r1")] is FinishReason.FAILED, f"a failed row ends {rig.ends[RequestId('r1')].name}")
    for request in (requests[0], requests[2]):
        _check_end(rig, request)


def a_row_that_waits_is_computed_again(make: MakeScheduler) -> None:
    """Its request gets its own tokens in the end, also if it loses its row or is cancelled meanwhile."""
    for seed in range(12):
        draw = random.Random(seed)
        info = small_worker(draw.choice((16, 64)), draw.choice((1, 4)), 3, draw.choice((8, 32)))
        rig = Rig(make, info)
        rig.worker.waits = partial(_waits_often, draw)
        requests = _drawn_requests(draw, info)
        for request in requests:
            rig.add(request)
            rig.move()
        cancelled = draw.choice(sorted(rig.live)) if rig.live else None
        if cancelled is not None:
            rig.cancel(cancelled)
        rig.finish()
        for request in requests:
            if request.request_id != cancelled:
                _check_end(rig, request)
    rig = Rig(make, small_worker())
    steps = iter(range(50))
    rig.worker.waits = lambda request_id: request_id == "waits" and next(steps, None) is not None
    requests = [request_of("waits"), request_of("goes on", max_tokens=12, first_token=90)]
    for request in requests:
        rig.add(request)
    rig.finish()
    for request in requests:
        _check_end(rig, request)


def a_text_that_ends_is_an_end(make: MakeScheduler) -> None:
    """A row may be said to have stopped while plans in flight still name it; what they bring is nobody's."""
    for seed in range(6):
        draw = random.Random(seed)
        rig = Rig(make, small_worker(num_blocks=24, max_sequences=3))
        for n in range(8):
            request = request_of(f"r{n}", draw.randint(1, 9), max_tokens=9, first_token=40 * n)
            rig.text_ends_at[request.request_id] = draw.randint(1, 9)
            rig.add(request)
        rig.finish()
        for request_id, num_tokens in rig.text_ends_at.items():
            require(rig.ends[request_id] is FinishReason.STOP, f"{request_id} stops, and ends {rig.ends[request_id]}")
            require(rig.num_told[request_id] == num_tokens, f"{request_id} goes on behind its end")


def a_prompt_that_is_told_about_is_computed_as_a_whole(make: MakeScheduler) -> None:
    """With `prompt_logprobs` no token is taken from a cache or from a sibling: something is told of each."""
    rig = Rig(make, small_worker())
    for name in ("first", "second"):
        request = request_of(name, num_prompt=16)
        request = replace(request, sampling=replace(request.sampling, prompt_logprobs=0))
        require(rig.scheduler.num_cached_tokens(request) == 0, "it says that tokens are cached of such a prompt")
        rig.add(request)
        if name == "first":
            rig.move()
        else:
            rig.add(replace(request, request_id=RequestId("sibling"), sibling_of=RequestId("first")))
    rig.finish()


def its_load_counts_the_requests_at_hand(make: MakeScheduler) -> None:
    """Running and waiting ones together are all; no more run than there are rows."""
    rig = Rig(make, small_worker(max_sequences=2))
    for n in range(5):
        rig.add(request_of(f"r{n}"))
    for _ in range(MAX_MOVES):
        load = rig.scheduler.load()
        num_live = len(rig.live)
        require(load.num_running + load.num_waiting == num_live, f"{num_live} are at hand, and its load is {load}")
        require(load.num_running <= 2, f"{load.num_running} run on two rows")
        require(0 <= load.num_free_blocks <= load.num_blocks == 64, f"its blocks are {load}")
        if not rig.live:
            break
        rig.move()
    rig.finish()


def asking_for_cached_tokens_changes_nothing(make: MakeScheduler) -> None:
    """The answer leaves a token to compute, and the plans are those of a scheduler that was not asked."""
    plans = []
    for is_asked in (False, True):
        rig = Rig(make, small_worker())
        for n in range(4):
            request = request_of(f"r{n}", num_prompt=16, first_token=3)
            if is_asked:
                num_cached = rig.scheduler.num_cached_tokens(request)
                require(0 <= num_cached < 16, f"{num_cached} of 16 prompt tokens are said to be cached")
            rig.add(request)
            rig.finish()
        plans.append(rig.plans)
    require(plans[0] == plans[1], "it plans otherwise after it was asked")


def nothing_is_hit_after_a_reset(make: MakeScheduler) -> None:
    """What was computed before `reset_prefix_cache` is computed again."""
    rig = Rig(make, small_worker())
    rig.add(request_of("before", num_prompt=16))
    rig.finish()
    rig.scheduler.reset_prefix_cache()
    again = request_of("after", num_prompt=16)
    require(rig.scheduler.num_cached_tokens(again) == 0, "it says that tokens are cached after a reset")
    rig.add(again)
    plan = rig.schedule()
    require(
        all(each.num_cached_tokens == 0 for each in plan.admitted), "a prompt hits what was computed before a reset"
    )
    rig.finish()


SCHEDULER_CHECKS: Sequence[Callable[[MakeScheduler], None]] = (
    it_plans_nothing_when_nothing_is_to_do,
    every_request_ends_once_with_its_own_tokens,
    no_plan_asks_for_more_than_the_worker_has,
    requests_that_outgrow_the_blocks_end_with_their_own_tokens,
    the_row_of_a_cancelled_request_is_released_by_the_next_plan,
    cancelling_at_any_moment_leaves_nothing_behind,
    the_same_calls_give_the_same_plans,
    it_plans_as_far_ahead_as_it_declares,
    a_request_with_output_is_continued,
    advice_to_hold_prompts_back_does_not_stop_them,
    a_failed_row_ends_its_request_alone,
    a_row_that_waits_is_computed_again,
    a_text_that_ends_is_an_end,
    a_prompt_that_is_told_about_is_computed_as_a_whole,
    its_load_counts_the_requests_at_hand,
    asking_for_cached_tokens_changes_nothing,
    nothing_is_hit_after_a_reset,
)


def _drawn_requests(draw: random.Random, info: WorkerInfo) -> list[Request]:
    """Requests that fit the worker: prompts that begin alike, under two cache salts, of several tenants."""
    capacity = info.num_blocks * info.block_size
    requests: list[Request] = []
    for n in range(16):
        num_prompt = draw.randint(1, min(40, capacity - 1))
        request = request_of(f"r{n}", num_prompt, draw.randint(1, min(16, capacity - num_prompt)))
        if requests and draw.random() < 0.15:
            request = replace(request, prompt_token_ids=requests[-1].prompt_token_ids, cache_salt="")
            request = replace(request, sampling=replace(request.sampling, max_tokens=1))
        requests.append(
            replace(
                request,
                cache_salt=draw.choice(("", "", "other")),
                tenant=draw.choice(("a", "b", "c")),
                priority=draw.choice((0, 0, 1, 5)),
            )
        )
    return requests


def _waits_often(draw: random.Random, request_id: RequestId) -> bool:
    """Every second request has a row that waits now and then."""
    return request_id[-1] in "02468" and draw.random() < 0.4


def _answer(prompt: Sequence[TokenId], num_tokens: int) -> tuple[TokenId, ...]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(say(token_ids, VOCAB_SIZE))
    return tuple(token_ids[len(prompt) :])


def _check_end(rig: Rig, request: Request) -> None:
    request_id = request.request_id
    stops_at = rig.worker.stop_after.get(request_id)
    num_tokens = stops_at or request.sampling.max_tokens or 0
    reason = FinishReason.STOP if stops_at else FinishReason.LENGTH
    require(rig.ends.get(request_id) is reason, f"{request_id} ends {rig.ends.get(request_id)}, should {reason.name}")
    output = tuple(rig.worker.outputs[request_id])
    require(output == _answer(request.prompt_token_ids, num_tokens), f"{request_id} got tokens that are not its own")
