"""What the commands return. How it looks is the renderer's business."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # stop, length, ...
    prompt_tokens: int
    output_tokens: int
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
    model: str | None = None
    dtype: str | None = None
    parameters: int | None = None
    context: int | None = None  # tokens of prompt and output together
    free_blocks: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    kv_mib: float | None = None
    load_s: float | None = None
    detail: str  # why the link is not live


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
    workers: tuple[WorkerStatus, ...]
