"""Simulated clients: each submits one request, reads it in its own way, and checks what it was promised.

What a client wants is drawn ahead, in `Story`; the world tells it when its request reaches a moment.
"""

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.submission import Submission, given
from control_plane.admission.validator import Validator
from control_plane.engine.driver import EngineDriver
from control_plane.engine.served import ServedModel
from control_plane.engine.streams import OutputStream
from plugins.errors import (
    DetokenizerFailed,
    DuplicateRequest,
    InvalidRequest,
    NotServing,
    QueuedTooLong,
    QueueFull,
    ReaderTooSlow,
    ServingError,
    StepFailed,
    TenantQuotaExceeded,
)
from plugins.types import FinishReason, Request, RequestId, SamplingParams, TokenId, TokenLogprobs
from tests.fakes import EOS, expected_output, told_of_output, told_of_prompt
from tests.simulation.faults import FaultPlan, Point
from tests.simulation.virtual_loop import VirtualLoop

RETRIES = 12  # of a request that the server did not want, for now
RETRY_S = 0.25
DEADLINE_SLACK_S = 0.001
CLOCK_SLACK_S = 1e-6  # timers of one instant run together


class Moment(enum.Enum):
    """A hand-over in the life of a request."""

    EARLY = enum.auto()
    QUEUED = enum.auto()
    ADMITTED = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    FINISHING = enum.auto()
    ENDED = enum.auto()
    ANYTIME = enum.auto()


CANCELS = {
    Point.CANCEL_EARLY: Moment.EARLY,
    Point.CANCEL_QUEUED: Moment.QUEUED,
    Point.CANCEL_ADMITTED: Moment.ADMITTED,
    Point.CANCEL_PREFILL: Moment.PREFILL,
    Point.CANCEL_DECODE: Moment.DECODE,
    Point.CANCEL_FINISHING: Moment.FINISHING,
    Point.CANCEL_ENDED: Moment.ENDED,
    Point.CANCEL_ANYTIME: Moment.ANYTIME,
}
DEADLINES = {
    Point.DEADLINE_QUEUED: Moment.QUEUED,
    Point.DEADLINE_ADMITTED: Moment.ADMITTED,
    Point.DEADLINE_PREFILL: Moment.PREFILL,
    Point.DEADLINE_DECODE: Moment.DECODE,
    Point.DEADLINE_FINISHING: Moment.FINISHING,
    Point.DEADLINE_ANYTIME: Moment.ANYTIME,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What one client wants, drawn before anything happens."""

    name: str
    arrives_at: float
    prompt: tuple[int, ...]
    max_tokens: int
    ends_after: int | None = None  # output length at which the model says its end
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    leader: str | None = None  # whose sibling it is
    deadline_s: float | None = None
    trigger: Point | None = None  # what happens to it, at the moment that belongs to it
    anytime_s: float = 0.0  # for a cancel at any time
    read_pause_s: float = 0.0  # between two reads
    stops_after: int | None = None  # reads, before it stops to read for too long
    tells: bool = False  # asks for log-probabilities of prompt and output
    stops_at: int | None = None  # output length at which its text ends it
    breaks_at: int | None = None  # output length at which its tokens have no text
    others: tuple["Story", ...] = ()  # further outputs of the request
    is_deadly: bool = False  # kills every worker that computes it
    is_invalid: bool = False  # nobody could ever serve it


def is_other(story: Story) -> bool:
    """Is it a further output of a request, that came with the first one?"""
    return "·" in story.name


class Watcher:
    """A StopWatcher that ends an output where its story says so, and keeps what it was given."""

    def __init__(self, story: Story) -> None:
        self.token_ids: list[TokenId] = []
        self.has_broken = False
        self._story = story

    def push(self, token_ids: Sequence[TokenId], is_stopped: bool = False) -> int | None:
        num_before = len(self.token_ids)
        self.token_ids += token_ids
        assert is_stopped == (EOS in token_ids), f"{self._story.name} is told of a stop: {is_stopped}"
        stops_at, breaks_at = self._story.stops_at, self._story.breaks_at
        if breaks_at is not None and len(self.token_ids) >= breaks_at:
            self.has_broken = True
            raise ValueError("these tokens have no text")
        return stops_at - num_before if stops_at is not None and stops_at <= len(self.token_ids) else None


class Surroundings(Protocol):
    """What a client needs of its world."""

    loop: VirtualLoop
    driver: EngineDriver
    validator: Validator
    faults: FaultPlan
    admission: AdmissionConfig
    live: dict[RequestId, "Client"]  # taken, and no end was delivered

    def on_request(self, client: "Client") -> None:
        """A request was taken."""

    def may_refuse(self) -> bool:
        """True while there may be no worker, or the server may be draining."""

    def count(self, what: str) -> None:
        """Note that something happened that a seed should meet now and then."""


class Client:
    """One request and what became of it. `run` is one task of the world's loop."""

    def __init__(self, story: Story, world: Surroundings) -> None:
        self.story = story
        self.request_id = RequestId(story.name)
        self.model: ServedModel | None = None  # of the request that was taken
        self.token_ids: list[TokenId] = []
        self.finish: FinishReason | None = None
        self.error: ServingError | None = None
        self.refusal: ServingError | None = None
        self.taken_at = 0.0
        self.arrival = 0  # grows with each request that was taken
        self.num_cached_tokens: int | None = None  # of its prompt, when it first got a row
        self.num_admissions = 0
        self.num_preemptions = 0
        self.num_deaths = 0  # of workers, while a plan with this request was in flight
        self.num_recoveries = 0
        self.is_preempted = False
        self.may_fail = False  # a row of it was made to fail, or its scheduler raised
        self.ended_at: float | None = None  # when the engine delivered its end
        self.is_cancelled = False
        self._stalled_s = 0.0  # of the loop, when the request was taken
        self._world = world
        self._has_triggered = False
        self._num_reads = 0
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs | None] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._others = [Client(other, world) for other in story.others]
        self._watcher = Watcher(story) if story.stops_at or story.breaks_at else None
        self.group = RequestId(story.leader) if is_other(story) and story.leader else self.request_id

    async def run(self) -> None:
        """Submit, read to the end, check. Raises: AssertionError: a promise was broken."""
        await asyncio.sleep(self.story.arrives_at - self._world.loop.time())
        streams = await self._submit()
        await asyncio.gather(
            *(client._read(stream) for client, stream in zip((self, *self._others), streams, strict=False))
        )

    async def _read(self, stream: OutputStream) -> None:
        num_cached = 0
        detokenizer = self.served.text.detokenizer()
        try:
            while self.finish is None:
                await self._pause(stream)
                output = await stream.next()
                self._num_reads += 1
                self.token_ids += output.token_ids
                self._text.append(detokenizer.push(output.token_ids))
                self._logprobs += output.logprobs
                self._prompt_logprobs += output.prompt_logprobs
                self.finish, self.error = output.finish, output.error
                num_cached = output.num_cached_tokens
        finally:
            if not stream.is_ended:
                self._world.driver.cancel(self.request_id)
        self._text.append(detokenizer.flush())
        assert num_cached == (self.num_cached_tokens or 0), f"{self.request_id} is told {num_cached} cached tokens"
        self.reach(Moment.ENDED)
        self._check()

    @property
    def served(self) -> ServedModel:
        """The model that took the request."""
        assert self.model is not None
        return self.model

    def reach(self, moment: Moment) -> None:
        """The request is at this moment: do what its story says, once."""
        point = self.story.trigger
        if point is None or self._has_triggered:
            return
        if CANCELS.get(point) is moment:
            self._has_triggered = True
            self._world.loop.call_soon(self._cancel, point)
        elif DEADLINES.get(point) is moment and point is not Point.DEADLINE_ANYTIME:
            self._has_triggered = True
            self._world.loop.call_soon(self._meet_deadline, point)

    # -- submission ---------------------------------------------------------------------------------------------

    async def _submit(self) -> list[OutputStream]:
        """Return the stream of each output; none if the request was refused for good."""
        for _ in range(RETRIES):
            try:
                return self._try_to_submit()
            except InvalidRequest as error:
                self.refusal = error
                assert self.story.is_invalid, f"{self.story} was refused: {error}"
                self._world.faults.note(Point.INVALID, len(self._world.live))
                return []
            except DuplicateRequest as error:
                self.refusal = error
                assert self._is_taken(), f"{self.request_id} has ended, and its name is taken"
                self._world.faults.note(Point.DUPLICATE_ID, len(self._world.live))
                return []
            except (NotServing, QueueFull, TenantQuotaExceeded) as error:
                self.refusal = error
                self._note_refusal(error)
            await asyncio.sleep(RETRY_S)
        return []

    def _is_taken(self) -> bool:
        """Is a name of this request in use, or does one that came with the first of that name still live?"""
        live = self._world.live
        names = [client.request_id for client in (self, *self._others)]
        return any(name in live or any(each.group == name for each in live.values()) for name in names)

    def _try_to_submit(self) -> list[OutputStream]:
        world, story = self._world, self.story
        was_taken = self._is_taken()
        if story.trigger is Point.CANCEL_EARLY and not was_taken:
            world.driver.cancel(self.request_id)  # of a name that nobody knows: ignored
        sampling = SamplingParams(max_tokens=story.max_tokens, seed=0, temperature=0.0, ignore_eos=not story.ends_after)
        admitted = world.validator.validate(
            Submission(
                request_id=story.name,
                token_ids=story.prompt,
                sampling=given(sampling),
                tenant=story.tenant,
                priority=story.priority,
                cache_salt=story.salt,
            )
        )
        (request,), model = admitted.requests, admitted.model
        clients = (self, *self._others)
        streams = world.driver.submit(
            [client._output_of(request) for client in clients],
            model.generation,
            story.deadline_s,
            admitted.max_queue_s,
            [client._watcher for client in clients],
        )
        assert not was_taken, f"{self.request_id} is used twice at once"
        for client in clients:
            client._note_taken(model)
        return streams

    def _output_of(self, request: Request) -> Request:
        """The request of one output. Only the first one asks about the prompt."""
        story = self.story
        sampling = request.sampling
        if story.tells:
            sampling = replace(sampling, logprobs=0, prompt_logprobs=None if is_other(story) else 0)
        leader = RequestId(story.leader) if story.leader else None
        return replace(request, request_id=self.request_id, sampling=sampling, sibling_of=leader)

    def _note_taken(self, model: ServedModel) -> None:
        world, story = self._world, self.story
        self.model, self.refusal = model, None
        self.taken_at, self._stalled_s = world.loop.time(), world.loop.stalled_s
        world.on_request(self)
        if story.trigger is Point.CANCEL_ANYTIME:
            world.loop.call_later(story.anytime_s, self._cancel, story.trigger)
        self.reach(Moment.EARLY)
        self.reach(Moment.QUEUED)

    def _note_refusal(self, error: ServingError) -> None:
        world = self._world
        assert error.retry_after_s is not None, f"{error!r} does not tell when to try again"
        num_live = len(world.live)
        if isinstance(error, NotServing):
            assert world.may_refuse(), f"{self.request_id} was refused: {error}"
            world.count("refused: not serving")
        elif isinstance(error, TenantQuotaExceeded):
            num = sum(client.story.tenant == self.story.tenant for client in world.live.values())
            num += len(self._others)
            assert num >= (world.admission.max_tenant_requests or num + 1), f"{num} of this tenant are at hand: {error}"
            world.faults.note(Point.TENANT_QUOTA, num_live)
        elif "prompt token" in str(error):
            world.faults.note(Point.QUEUE_FULL_TOKENS, num_live)
        else:
            num_waiting = num_live + len(self._others)
            assert num_waiting >= world.admission.max_waiting, f"{num_live} requests are at hand: {error}"
            world.faults.note(Point.QUEUE_FULL, num_live)

    # -- what happens to it -------------------------------------------------------------------------------------

    async def _pause(self, stream: OutputStream) -> None:
        world, story = self._world, self.story
        if story.stops_after == self._num_reads:
            was_ended, stalled_s = stream.is_ended, world.loop.stalled_s
            await asyncio.sleep(world.admission.max_unread_s * 2.5)
            unread_s = world.loop.time() - (stream.unread_since_s or world.loop.time())
            unread_s -= world.loop.stalled_s - stalled_s  # nobody could look meanwhile
            assert stream.is_ended or unread_s < world.admission.max_unread_s * 2, f"{unread_s} s of {self.request_id}"
            if not was_ended:
                world.faults.note(Point.READER_STOPS, len(world.live))
        elif story.read_pause_s:
            world.faults.note(Point.READER_SLOW, len(world.live))
            await asyncio.sleep(story.read_pause_s)

    def _cancel(self, point: Point) -> None:
        ours = (self, *self._others)
        named = [each for each in self._world.live.values() if self.request_id in (each.request_id, each.group)]
        if all(each in ours for each in named):  # else the name is another request's by now
            for client in ours:
                client.is_cancelled = True
            self._world.faults.note(point, len(self._world.live))
            self._world.driver.cancel(self.request_id)

    def _meet_deadline(self, point: Point) -> None:
        """Stand still until the deadline has passed: it is met at this moment of the request."""
        world = self._world
        left_s = self.taken_at + (self.story.deadline_s or 0.0) - world.loop.time()
        if self.ended_at is None and left_s > 0:
            world.faults.note(point, len(world.live))
            world.loop.stall(left_s)

    # -- what it was promised -----------------------------------------------------------------------------------

    def _check(self) -> None:
        tokens, story = tuple(self.token_ids), self.story
        expected = expected_output(story.prompt, len(tokens), self.served.worker.weights_version)
        if self.finish is FinishReason.STOP:
            ends_at = story.ends_after if tokens[-1] == EOS else story.stops_at
            assert len(tokens) == ends_at, f"{self.request_id} stopped at {tokens}"
        if tokens[-1:] == (EOS,):
            tokens, expected = tokens[:-1], expected[:-1]
        assert tokens == expected, f"{self.request_id}: {tokens} is not {expected}"
        assert len(self.token_ids) <= (story.stops_at or story.max_tokens)
        self._check_watcher()
        self._check_logprobs()
        if self.finish is FinishReason.LENGTH:
            assert len(tokens) == story.max_tokens
        assert "".join(self._text) == self.served.text.decode(self.token_ids), f"{self.request_id}: {self._text}"
        assert self.ended_at is not None, f"{self.request_id} read an end that was not delivered"
        self._check_reason()

    def _check_watcher(self) -> None:
        """Each token was read once, whatever happened to the request on its way."""
        if self._watcher is not None:
            num_untold = len(self._watcher.token_ids) - len(self.token_ids)
            assert num_untold == self._watcher.has_broken, f"{self.request_id}: {num_untold} tokens were read in vain"
            assert self._watcher.token_ids[: len(self.token_ids)] == self.token_ids, f"{self.request_id} was misread"

    def _check_logprobs(self) -> None:
        story, version = self.story, self.served.worker.weights_version
        outputs = told_of_output(story.prompt, self.token_ids, version) if story.tells else ()
        assert tuple(self._logprobs) == outputs, f"{self.request_id} is told of {len(self._logprobs)} tokens"
        prompt = told_of_prompt(story.prompt, version) if story.tells and not is_other(story) else ()
        num_told = len(self._prompt_logprobs)
        assert tuple(self._prompt_logprobs) == prompt[:num_told], f"{self.request_id} is misinformed about its prompt"
        assert num_told == len(prompt) or not self.token_ids, f"{num_told} of {len(prompt)} places of {self.request_id}"

    def _check_reason(self) -> None:
        story, world, error, after_s = self.story, self._world, self.error, (self.ended_at or 0.0) - self.taken_at
        finish = self.finish.name if self.finish is not None else ""
        world.count(finish if self.finish is not FinishReason.FAILED else type(error).__name__)
        assert (error is None) == (self.finish in (FinishReason.STOP, FinishReason.LENGTH)), f"{finish} with {error!r}"
        if story.deadline_s is not None:
            stalled_s = world.loop.stalled_s - self._stalled_s
            assert after_s <= story.deadline_s + DEADLINE_SLACK_S + stalled_s, f"{self.request_id} lived {after_s} s"
        match self.finish:
            case FinishReason.CANCELLED:
                assert self.is_cancelled, f"{self.request_id} was not cancelled"
            case FinishReason.DEADLINE:
                assert story.deadline_s is not None and after_s >= story.deadline_s - CLOCK_SLACK_S, (
                    f"{after_s} s are early"
                )
                if story.trigger is Point.DEADLINE_ANYTIME:
                    world.faults.note(story.trigger, len(world.live) + 1)
            case FinishReason.FAILED:
                self._check_error(error, after_s)

    def _check_error(self, error: ServingError | None, after_s: float) -> None:
        faults, request_id = self._world.faults, self.request_id
        match type(error).__name__:
            case QueuedTooLong.__name__:
                assert after_s >= self._world.admission.max_queue_s - CLOCK_SLACK_S and not self.num_admissions, (
                    f"{after_s} s queued"
                )
                faults.note(Point.QUEUED_TOO_LONG, len(self._world.live) + 1)
            case ReaderTooSlow.__name__:
                has_stalled = self._world.loop.stalled_s > self._stalled_s  # nobody could read meanwhile
                assert self.story.stops_after is not None or has_stalled, f"{request_id} was read"
            case DetokenizerFailed.__name__:
                assert len(self.token_ids) == (self.story.breaks_at or 0) - 1, f"{request_id} has {self.token_ids}"
                faults.note(Point.TEXT_BREAKS, len(self._world.live) + 1)
            case StepFailed.__name__ | "PluginFailed":
                assert self.may_fail, f"{request_id} failed without a reason: {error}"
            case "QueryOfDeath":
                assert self.num_deaths >= 2, f"{request_id} met {self.num_deaths} deaths: {error}"
            case "RecoveryTimedOut":
                assert self.num_recoveries or self.num_deaths, f"{request_id} lost no worker: {error}"
            case other:
                raise AssertionError(f"{request_id} ended with {other}: {error}")
