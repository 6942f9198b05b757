"""Draws a world from a seed: its sizes and limits, and what its clients will want.

Everything is drawn before anything happens, so that what happens never changes what was drawn.
"""

import random
from dataclasses import dataclass, replace

from control_plane.admission.config import AdmissionConfig
from control_plane.scheduling.config import SchedulerConfig
from control_plane.workers.config import WorkersConfig
from plugins.types import WorkerInfo
from tests.fakes import worker_info
from tests.simulation.clients import CANCELS, DEADLINES, Story
from tests.simulation.faults import FaultPlan, Point

ROUTERS = ("prefix_affinity", "least_load", "power_of_two", "round_robin")
POLICIES = ("fcfs", "fcfs", "priority", "fair_share")
MAX_PROMPT = 40
MAX_OUTPUT = 24
FEW_REQUESTS = (3, 24)
MANY_REQUESTS = (60, 150)  # in some seeds


@dataclass(frozen=True, slots=True)
class Settings:
    """The sizes and limits of one world."""

    info: WorkerInfo
    num_workers: int
    router: str
    scheduler: SchedulerConfig
    admission: AdmissionConfig
    workers: WorkersConfig
    subscribes: bool  # somebody follows the cached blocks


def max_prompt(faults: FaultPlan) -> int:
    """The most tokens of a prompt: few where blocks are few, so that outputs outgrow them together."""
    return MAX_PROMPT // 4 if faults.is_active(Point.POOL_TIGHT) else MAX_PROMPT


def draw_settings(seed: int, faults: FaultPlan) -> Settings:
    """Draw the sizes and limits. Points that need small limits have them when they are active."""
    draw = random.Random(f"settings of {seed}")
    is_tight = faults.is_active(Point.POOL_TIGHT)
    block_size = draw.choice((1, 4, 4, 16))
    largest = -(-(max_prompt(faults) + MAX_OUTPUT) // block_size)
    num_blocks = draw.randint(largest, largest * 3 // 2) if is_tight else largest * 6
    max_sequences = 8 if is_tight else draw.choice((2, 4, 8))
    info = worker_info(
        num_blocks=num_blocks,
        block_size=block_size,
        max_sequences=max_sequences,
        max_step_tokens=draw.choice((8, 16, 64)),
        name="fake",
    )
    scheduler = SchedulerConfig(
        async_scheduling=draw.random() < 0.8,
        policy=draw.choice(POLICIES),
        max_chunk_tokens=draw.choice((None, None, 5)),
        watermark_ratio=draw.choice((0.0, 0.05)),
        prefix_caching=draw.random() < 0.85,
        prefix_hash_key="the key of all simulations",
        priority_ageing_s=0.2,
        tenant_weights="a=2",
    )
    admission = AdmissionConfig(
        max_waiting=draw.randint(2, 4) if faults.is_active(Point.QUEUE_FULL) else 1000,
        max_waiting_tokens=draw.randint(40, 80) if faults.is_active(Point.QUEUE_FULL_TOKENS) else 100_000,
        max_tenant_requests=draw.randint(2, 4) if faults.is_active(Point.TENANT_QUOTA) else None,
        max_queue_s=draw.uniform(0.05, 0.3) if faults.is_active(Point.QUEUED_TOO_LONG) else 300.0,
        max_unread_s=0.5,
        max_deadline_s=600.0,
    )
    workers = WorkersConfig(
        owner_id="us",
        drain_s=0.5,
        heartbeat_s=1.0,
        step_timeout_s=2.0,
        recovery_timeout_s=draw.choice((0.2, 5.0)),
    )
    return Settings(
        replace(info, weights_version="1"),
        draw.choice((1, 2, 2, 3)),
        draw.choice(ROUTERS),
        scheduler,
        admission,
        workers,
        draw.random() < 0.25,
    )


def draw_stories(seed: int, faults: FaultPlan, settings: Settings) -> list[Story]:
    """Draw what each client wants, in the order of their arrival."""
    draw = random.Random(f"stories of {seed}")
    block_size = settings.info.block_size
    prefixes = [[draw.randint(3, 900) for _ in range(MAX_PROMPT)] for _ in range(3)]
    stories: list[Story] = []
    now = 0.1
    hurry = draw.choice((0.001, 0.005, 0.04))
    for number in range(draw.randint(*(MANY_REQUESTS if draw.random() < 0.1 else FEW_REQUESTS))):
        now += draw.expovariate(1 / hurry)
        prompt = _draw_prompt(draw, prefixes, block_size, max_prompt(faults))
        max_tokens = draw.choice((1, 2, draw.randint(1, MAX_OUTPUT), draw.randint(1, MAX_OUTPUT), MAX_OUTPUT))
        story = Story(
            name=f"r{number}",
            arrives_at=now,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            ends_after=draw.randint(1, max_tokens) if draw.random() < 0.3 else None,
            salt=draw.choice(("", "", "", "s")),
            tenant=draw.choice(("", "a", "b")),
            priority=draw.choice((0, 0, -1, 1)),
        )
        if stories and not stories[-1].is_invalid and draw.random() < 0.15:  # another sample of the prompt before it
            before = stories[-1]
            story = replace(
                story, prompt=before.prompt, salt=before.salt, tenant=before.tenant, leader=before.leader or before.name
            )
        story = _with_faults(draw, faults, _with_wishes(draw, story), stories, settings)
        stories.append(replace(story, others=_others(draw, faults, story)))
    return stories


def _draw_prompt(draw: random.Random, prefixes: list[list[int]], block_size: int, longest: int) -> list[int]:
    """Prompts from a small tree, whose lengths lie around the bounds of blocks."""
    edges = (1, block_size - 1, block_size, block_size + 1, 2 * block_size, longest)
    length = draw.choice(edges) if draw.random() < 0.4 else draw.randint(1, longest)
    length = min(max(1, length), longest)
    if draw.random() < 0.7:
        shared = draw.choice((length, draw.randint(0, length)))
        return [*draw.choice(prefixes)[:shared], *(draw.randint(3, 900) for _ in range(length - shared))]
    return [draw.randint(3, 900) for _ in range(length)]


def _with_wishes(draw: random.Random, story: Story) -> Story:
    """Let some ask for log-probabilities, and some have a text that ends them."""
    return replace(
        story,
        tells=draw.random() < 0.15,
        stops_at=draw.randint(1, story.max_tokens) if draw.random() < 0.25 else None,
    )


def _others(draw: random.Random, faults: FaultPlan, first: Story) -> tuple[Story, ...]:
    """Further outputs of some requests, each with an end of its own. Those that are cancelled are so alone."""
    if first.is_invalid or first.is_deadly or draw.random() >= 0.15:
        return ()
    others: list[Story] = []
    for index in range(1, draw.randint(2, 4)):
        story = replace(first, name=f"{first.name}·{index}", leader=first.name, trigger=None, tells=first.tells)
        story = replace(story, ends_after=draw.randint(1, first.max_tokens) if first.ends_after else None)
        story = replace(story, stops_at=draw.randint(1, first.max_tokens) if draw.random() < 0.4 else None)
        for point in (Point.CANCEL_ADMITTED, Point.CANCEL_DECODE, Point.CANCEL_FINISHING):
            if faults.draws(point):
                story = replace(story, trigger=point)
        others.append(story)
    return tuple(others)


def _with_faults(
    draw: random.Random, faults: FaultPlan, story: Story, before: list[Story], settings: Settings
) -> Story:
    """Let at most one thing go wrong at a moment of the request, and some others besides."""
    for point in (*CANCELS, *DEADLINES):
        if faults.draws(point):
            story = replace(story, trigger=point, anytime_s=draw.uniform(0, 0.3))
            break
    if story.trigger in DEADLINES:
        story = replace(story, deadline_s=draw.uniform(0.02, 0.4))
    elif draw.random() < 0.3:
        story = replace(story, deadline_s=30.0)
    if before and faults.draws(Point.DUPLICATE_ID):
        story = replace(story, name=before[-1].name)
    elif before and faults.draws(Point.ID_REUSED):
        story = replace(story, name=draw.choice(before).name)
    if faults.draws(Point.READER_STOPS):
        story = replace(story, stops_after=draw.choice((0, 1, 2)), max_tokens=MAX_OUTPUT)
    elif faults.draws(Point.READER_SLOW):
        story = replace(story, read_pause_s=draw.uniform(0.005, 0.08))
    if faults.draws(Point.INVALID):
        room = min(settings.info.num_blocks * settings.info.block_size, settings.info.model.max_model_len)
        prompt = draw.choice(((), tuple(range(3, 3 + room)), (5, 10_000)))
        story = replace(story, prompt=prompt, is_invalid=True, leader=None)
    if faults.draws(Point.TEXT_BREAKS):
        story = replace(story, breaks_at=draw.randint(1, story.max_tokens))
    if faults.draws(Point.QUERY_OF_DEATH):
        story = replace(story, is_deadly=True)
    return story
