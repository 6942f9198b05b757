"""What the commands return. How it looks is the renderer's business."""

from dataclasses import dataclass, field

from control_plane.cli.render import JSON_ONLY


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is told of one token at one place."""

    token_id: int
    logprob: float | None  # None: it cannot be, its logarithm is -inf
    rank: int  # 1 is the likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One of several outputs of a prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # stop, length, ...
    stopped_by: str | int | None = None  # the stop string or stop token that ended it, if the request named it
    logprobs: tuple[tuple[Candidate, ...], ...] = ()  # of each token, if asked for: itself, then others


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # stop, length, ...
    stopped_by: str | int | None = None  # as of an `Output`
    logprobs: tuple[tuple[Candidate, ...], ...] = ()
    others: tuple[Output, ...] = ()  # the outputs after the first, if there are several
    prompt: str = ""  # with echo
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[tuple[Candidate, ...], ...] = ()  # of its places from 1 on, if asked for
    prompt_tokens: int
    output_tokens: int  # of all outputs
    cached_tokens: int  # prompt tokens that needed no computing
    first_token_s: float  # from the call to the first token, as the client saw it
    total_s: float  # from the call to the end

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second after the first one; 0 for a single token."""
        decoding_s = self.total_s - self.first_token_s
        return (self.output_tokens - 1) / decoding_s if self.output_tokens > 1 and decoding_s > 0 else 0.0

    @property
    def summary(self) -> str:
        """One line of figures."""
        return (
            f"{self.output_tokens} tokens ({self.finish_reason}), first after {self.first_token_s:.2f} s, "
            f"{self.tokens_per_s:.1f} tokens/s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker, as the control plane sees it. What is None is not known before the worker has described itself."""

    worker: str
    link: str
    intake: str
    generation: str | None = None  # short, without the model's name
    num_running: int | None = None
    num_waiting: int | None = None
    free_blocks: int | None = None
    cached_blocks: int | None = None  # that a prompt could hit
    hit_rate: str | None = None  # prompt tokens found in the prefix cache, of those that were looked up
    detail: str  # why the link is not live, or that it leaves
    generation_id: str | None = field(default=None, metadata=JSON_ONLY)
    model: str | None = field(default=None, metadata=JSON_ONLY)
    num_blocks: int | None = field(default=None, metadata=JSON_ONLY)
    kv_mib: float | None = field(default=None, metadata=JSON_ONLY)
    load_s: float | None = field(default=None, metadata=JSON_ONLY)
    num_preemptions: int | None = field(default=None, metadata=JSON_ONLY)
    prefix_tokens: int | None = field(default=None, metadata=JSON_ONLY)
    prefix_hits: int | None = field(default=None, metadata=JSON_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStatus:
    """Workers that may stand in for one another, and what they agree in."""

    generation: str
    state: str  # newest; draining: new requests go to the newest one of its model, or all its workers leave
    differs: str  # from the newest one: its own value -> the newest one's
    live_workers: str  # such as 1 of 2
    num_blocks: int  # of all of them
    model: str
    dtype: str
    parameters: int
    context: int  # tokens of prompt and output together
    block_size: int
    kv_cache_dtype: str
    weights_version: str
    plugins: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A control plane and its workers."""

    address: str
    readiness: str
    version: str
    uptime_s: float
    intake: str
    num_running: int
    num_waiting: int
    max_waiting: int
    num_waiting_tokens: int
    max_waiting_tokens: int
    workers: tuple[WorkerStatus, ...]
    generations: tuple[GenerationStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIntake:
    """Whether one worker gets new requests."""

    worker: str
    intake: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeStatus:
    """What new requests meet, after a command that changed it."""

    server_intake: str  # of the whole server
    workers: tuple[WorkerIntake, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset:
    """Whose cached prompts were forgotten."""

    reset: str
