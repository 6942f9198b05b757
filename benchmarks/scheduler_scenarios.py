"""What a scheduler is measured with: the scenarios, the requests of each, and how the times of steps are reduced.

Needs the standard library alone, because another server's Python imports it too: both sides are given the same
requests, drawn by the same seed. Who is measured is the business of `scheduler_cost.py` and `peer_vllm.py`.
"""

import multiprocessing
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

BLOCK_SIZE = 16
VOCAB_SIZE = 49_000
MAX_MODEL_LEN = 2_048
FIRST_SEED = 7
GC_MODES = ("on", "off")  # on: as the language has it, what was there before the requests is frozen
_ENDLESS = 1_300  # output tokens of a request that must not end while it is measured
_BLOCKS_PER_SEAT = 72  # 1,152 tokens: nobody is preempted
_MAX_FILL_STEPS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One load on one scheduler."""

    name: str
    what: str
    max_sequences: int = 256
    max_step_tokens: int = 8_192
    num_requests: int
    prompt_tokens: tuple[int, int] = (300, 700)  # the least and the most
    num_shared_tokens: int = 0  # at the start of every prompt
    max_tokens: int | None = None  # of output, on average; None: nobody ends
    tight_blocks: int | None = None  # a pool too small for all seats; None: as many as they need
    num_warm_up: int = 30  # steps after filling
    num_steps: int = 250  # that are measured

    @property
    def num_seats(self) -> int:
        return min(self.max_sequences, self.num_requests)

    @property
    def num_blocks(self) -> int:
        return self.tight_blocks or self.num_seats * _BLOCKS_PER_SEAT + 64


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="i", what="256 decodes", num_requests=256),
        Scenario(name="i-1", what="1 decode", num_requests=1),
        Scenario(name="i-32", what="32 decodes", num_requests=32),
        Scenario(name="ii", what="256 decodes, 8,000 waiting", num_requests=8_256),
        Scenario(
            name="iii-1000",
            what="1,000 decodes",
            max_sequences=1_000,
            num_requests=1_000,
            prompt_tokens=(300, 600),
            num_steps=150,
        ),
        Scenario(
            name="iii-2000",
            what="2,000 decodes",
            max_sequences=2_000,
            num_requests=2_000,
            prompt_tokens=(300, 500),
            num_steps=150,
        ),
        Scenario(
            name="iv",
            what="mixed: prompts of 512, 256 of them shared; output 64; 2,048 tokens a step",
            max_step_tokens=2_048,
            num_requests=2_656,
            prompt_tokens=(512, 512),
            num_shared_tokens=256,
            max_tokens=64,
            num_warm_up=80,
            num_steps=400,
        ),
        Scenario(
            name="v",
            what="tight pool: room for about 110 of 256 seats; output 256",
            max_step_tokens=2_048,
            num_requests=1_200,
            max_tokens=256,
            tight_blocks=4_400,
            num_warm_up=250,
            num_steps=600,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """One request, as any scheduler can be given it: greedy, and nothing but max_tokens ends it."""

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int


def draw_requests(scenario: Scenario, rng: random.Random) -> Iterator[Drawn]:
    """Yield the requests of a scenario; prompts differ from their first token that is not shared."""
    shared = tuple(rng.randrange(VOCAB_SIZE) for _ in range(scenario.num_shared_tokens))
    for index in range(scenario.num_requests):
        num_tokens = rng.randint(*scenario.prompt_tokens)
        token_ids = shared + tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens - len(shared)))
        max_tokens = _ENDLESS
        if scenario.max_tokens is not None:  # spread, or all would end in the same step
            max_tokens = max(1, int(scenario.max_tokens * rng.uniform(0.5, 1.5)))
        yield Drawn(f"cmpl-{index:06d}-{rng.getrandbits(64):016x}", token_ids, max_tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """One call of schedule and one of update, in nanoseconds; with run-ahead the update is of an earlier step."""

    schedule_ns: int
    update_ns: int
    num_requests: int  # in the plan
    num_tokens: int
    num_running: int
    num_finished: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the steps of one measurement cost, in microseconds."""

    schedule_us_p50: float
    schedule_us_p99: float
    update_us_p50: float
    update_us_p99: float
    both_us_p50: float
    both_us_p99: float
    us_per_request: float  # of a plan: all time over all requests in plans
    us_per_token: float
    add_us_p50: float  # to make one request from its tokens and hand it over, hashes included
    requests_in_step: float  # median
    tokens_in_step: float
    num_finished: int
    num_preemptions: int


def run_steps(
    scenario: Scenario, step: Callable[[], Step], count_preemptions: Callable[[], int]
) -> tuple[list[Step], int]:
    """Fill every seat and warm up; return the steps that count, and how many preemptions they had."""
    for _ in range(_MAX_FILL_STEPS if scenario.tight_blocks is None else 0):  # a tight pool never seats all
        done = step()
        has_prompts = done.num_tokens > scenario.num_seats and scenario.max_tokens is None
        if done.num_running >= scenario.num_seats and not has_prompts:
            break
    for _ in range(scenario.num_warm_up):
        step()
    num_before = count_preemptions()
    steps = [step() for _ in range(scenario.num_steps)]
    return steps, count_preemptions() - num_before


def reduce_steps(steps: Sequence[Step], add_ns: Sequence[int], num_preemptions: int) -> Cost:
    """Reduce one measurement."""
    schedule = sorted(step.schedule_ns for step in steps)
    update = sorted(step.update_ns for step in steps)
    both = sorted(step.schedule_ns + step.update_ns for step in steps)
    return Cost(
        schedule_us_p50=_us(schedule, 0.5),
        schedule_us_p99=_us(schedule, 0.99),
        update_us_p50=_us(update, 0.5),
        update_us_p99=_us(update, 0.99),
        both_us_p50=_us(both, 0.5),
        both_us_p99=_us(both, 0.99),
        us_per_request=round(sum(both) / sum(step.num_requests for step in steps) / 1000, 3),
        us_per_token=round(sum(both) / sum(step.num_tokens for step in steps) / 1000, 3),
        add_us_p50=_us(sorted(add_ns), 0.5),
        requests_in_step=statistics.median(step.num_requests for step in steps),
        tokens_in_step=statistics.median(step.num_tokens for step in steps),
        num_finished=sum(step.num_finished for step in steps),
        num_preemptions=num_preemptions,
    )


def _us(ordered_ns: Sequence[int], quantile: float) -> float:
    return round(ordered_ns[round((len(ordered_ns) - 1) * quantile)] / 1000, 2)


def in_child(measure: Callable[[], Cost], cpu: int | None) -> dict[str, float]:
    """Measure in a forked process, whose heap nobody else has used, on one core if it is named.

    Raises: RuntimeError: it ended without a figure; its traceback is on stderr.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_measure_and_send, args=(measure, cpu, writer))
    process.start()
    writer.close()
    try:
        cost: dict[str, float] = reader.recv()
    except EOFError:
        raise RuntimeError("a measurement ended without a figure") from None
    finally:
        process.join()
    return cost


def _measure_and_send(measure: Callable[[], Cost], cpu: int | None, writer: Connection) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    writer.send(asdict(measure()))
