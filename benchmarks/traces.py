"""A trace of requests as public statistics describe them: bursts, mixed lengths, prefixes that many share.

Values only, drawn by a seed; who serves them is the business of `benchmarks/policies.py`.

Where the shape comes from (`benchmarks/README.md` has the references): the two kinds of use and their medians are
those of Azure's traces of 2023, conversation with 1,020 tokens in and 129 out, code with 1,500 in and 13 out; that a
cache without limits could hit about half of all prompt tokens is Mooncake's; gamma intervals model bursts as BurstGPT
found them.
"""

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from plugins.types import TokenId

VOCAB_SIZE = 32_000
ANSWER_S_PER_TOKEN = 0.02  # a turn follows when its answer has come and was read: about so long after the last one
URGENT, ORDINARY = 0, 1  # priorities


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of use. Lengths are lognormal: a median, and the spread of the logarithm.

    A turn's prompt is the system prompt, all turns before it and what it adds, so that the medians of the statistics
    are reached with less per turn.
    """

    name: str
    share: float  # of the conversations
    num_systems: int  # system prompts; each conversation begins with one, and the first are the most popular
    system_tokens: tuple[int, int]  # the least and the most of a system prompt
    added_tokens: tuple[float, float]  # by a turn: median and spread
    output_tokens: tuple[float, float]  # likewise
    mean_turns: float  # of a conversation; geometric
    think_s: float  # before the next turn; exponential


KINDS = (
    Kind(
        name="conversation",
        share=0.65,
        num_systems=24,
        system_tokens=(80, 500),
        added_tokens=(280.0, 0.9),
        output_tokens=(129.0, 0.8),
        mean_turns=3.0,
        think_s=15.0,
    ),
    Kind(
        name="code",
        share=0.35,
        num_systems=12,
        system_tokens=(150, 700),
        added_tokens=(640.0, 0.8),
        output_tokens=(13.0, 0.9),
        mean_turns=2.0,
        think_s=6.0,
    ),
)
TENANTS = (("big", 0.7), ("middle", 0.2), ("small", 0.1))  # with their shares of the conversations


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace, and what will be answered."""

    request_id: str
    arrival_s: float
    kind: str
    tenant: str
    priority: int
    prompt_token_ids: tuple[TokenId, ...]
    output_token_ids: tuple[TokenId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """How much of it, and how fast."""

    num_requests: int = 4_000
    conversations_per_s: float = 16.0
    burstiness: float = 4.0  # squared coefficient of variation of the intervals; 1 is a Poisson process
    length_scale: float = 1.0  # of every length, for workers smaller than those of the statistics
    max_model_len: int = 4_096
    urgent_share: float = 0.1  # of the conversations; they are URGENT
    seed: int = 1


def generate_trace(config: TraceConfig) -> tuple[TracedRequest, ...]:
    """Draw a trace, in the order of arrival. The same configuration gives the same trace."""
    rng = random.Random(config.seed)
    systems = {
        kind.name: [
            _tokens(rng, round(config.length_scale * rng.randint(*kind.system_tokens))) for _ in range(kind.num_systems)
        ]
        for kind in KINDS
    }
    requests: list[TracedRequest] = []
    start_s = 0.0
    # Later conversations begin after all that is returned: one request each is the least that they give.
    for number in range(config.num_requests):
        shape = 1 / config.burstiness
        start_s += rng.gammavariate(shape, 1 / (shape * config.conversations_per_s))
        requests.extend(_conversation(config, rng, systems, number, start_s))
    requests.sort(key=lambda request: (request.arrival_s, request.request_id))
    return tuple(islice(requests, config.num_requests))


def _conversation(
    config: TraceConfig,
    rng: random.Random,
    systems: dict[str, list[tuple[TokenId, ...]]],
    number: int,
    start_s: float,
) -> Iterator[TracedRequest]:
    (kind,) = rng.choices(KINDS, [kind.share for kind in KINDS])
    ((tenant, _),) = rng.choices(TENANTS, [share for _, share in TENANTS])
    priority = URGENT if rng.random() < config.urgent_share else ORDINARY
    popularity = [1 / (place + 1) for place in range(kind.num_systems)]
    (history,) = rng.choices(systems[kind.name], popularity)
    num_turns = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / kind.mean_turns))
    arrival_s = start_s
    for turn in range(num_turns):
        prompt = history + _tokens(rng, _length(config, rng, kind.added_tokens))
        output = _tokens(rng, _length(config, rng, kind.output_tokens))
        if len(prompt) + len(output) > config.max_model_len:
            return
        yield TracedRequest(f"{number:05d}-{turn}", arrival_s, kind.name, tenant, priority, prompt, output)
        history = prompt + output
        arrival_s += len(output) * ANSWER_S_PER_TOKEN + rng.expovariate(1 / kind.think_s)


def _length(config: TraceConfig, rng: random.Random, lognormal: tuple[float, float]) -> int:
    median, spread = lognormal
    return max(1, round(config.length_scale * rng.lognormvariate(math.log(median), spread)))


def _tokens(rng: random.Random, count: int) -> tuple[TokenId, ...]:
    return tuple(map(TokenId, rng.choices(range(VOCAB_SIZE), k=count)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """What a trace is like, to hold against the statistics."""

    num_requests: int
    duration_s: float
    requests_per_s: float
    interval_variation: float  # standard deviation of the intervals between requests over their mean
    prompt_tokens_p50: dict[str, float]  # by kind
    output_tokens_p50: dict[str, float]
    shared_ratio: float  # prompt tokens that a cache without limits could hit


def describe_trace(trace: Sequence[TracedRequest], block_size: int) -> TraceFacts:
    """Measure a trace; shared tokens are counted in whole blocks."""
    kinds = sorted({request.kind for request in trace})
    intervals = [later.arrival_s - early.arrival_s for early, later in zip(trace, trace[1:], strict=False)]
    seen: set[int] = set()
    num_hits = 0
    for request in trace:
        tokens = request.prompt_token_ids + request.output_token_ids
        names, name = [], 0
        for end in range(block_size, len(tokens) + 1, block_size):
            name = hash((name, tokens[end - block_size : end]))
            names.append(name)
        usable = (len(request.prompt_token_ids) - 1) // block_size
        num_hits += block_size * next((at for at, each in enumerate(names[:usable]) if each not in seen), usable)
        seen.update(names)
    duration_s = trace[-1].arrival_s
    return TraceFacts(
        num_requests=len(trace),
        duration_s=round(duration_s, 1),
        requests_per_s=round(len(trace) / duration_s, 2),
        interval_variation=round(statistics.pstdev(intervals) / statistics.fmean(intervals), 2),
        prompt_tokens_p50={kind: _median(trace, kind, "prompt_token_ids") for kind in kinds},
        output_tokens_p50={kind: _median(trace, kind, "output_token_ids") for kind in kinds},
        shared_ratio=round(num_hits / sum(len(request.prompt_token_ids) for request in trace), 3),
    )


def _median(trace: Sequence[TracedRequest], kind: str, field: str) -> float:
    return statistics.median(len(getattr(request, field)) for request in trace if request.kind == kind)
