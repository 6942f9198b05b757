"""The catalogue of metrics: every number that either plane exports is a line here.

Says names, meaning and buckets; how they are counted and scraped is the business of `control_plane/telemetry.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

# A decode step takes 3 ms on a fast GPU and 30 ms on a slow CPU: both must fall into the middle of the scale.
STEP_BUCKETS = (0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25,
                0.5, 1.0, 2.5, 5.0, 10.0)  # fmt: skip
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
                   10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the catalogue."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str  # dihedral_..., with its unit: _seconds, _bytes, _ratio, _total for counters
    help: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] = ()  # upper bounds, for histograms


BUILD_INFO = Metric("gauge", "dihedral_build_info", "Always 1; labels tell what runs.", ("version", "plane"))
REQUESTS = Metric(
    "counter", "dihedral_requests_total", "Requests that ended, by outcome: stop, length, or a status.", ("outcome",)
)
RUNNING = Metric("gauge", "dihedral_running_requests", "Requests that hold a row on a worker.")
WAITING = Metric("gauge", "dihedral_waiting_requests", "Requests that wait for a row.")
KV_USAGE = Metric("gauge", "dihedral_kv_cache_usage_ratio", "Share of KV blocks in use, 0 to 1.")
KV_BLOCKS = Metric("gauge", "dihedral_kv_cache_blocks", "KV blocks of all connected workers.")
KV_CACHED_BLOCKS = Metric("gauge", "dihedral_kv_cache_cached_blocks", "KV blocks that a prompt's prefix could hit.")
PREFIX_TOKENS = Metric(
    "counter", "dihedral_prefix_cache_lookup_tokens_total", "Prompt tokens looked up in the prefix cache, once each."
)
PREFIX_HITS = Metric(
    "counter", "dihedral_prefix_cache_hit_tokens_total", "Prompt tokens that the prefix cache had, so nobody computed."
)
KV_BLOCK_SIZE = Metric("gauge", "dihedral_kv_cache_block_size_tokens", "Tokens per KV block.", ("worker",))
PREEMPTIONS = Metric(
    "counter", "dihedral_preemptions_total", "Sequences that lost their blocks to another, and are computed again."
)
PROMPT_TOKENS = Metric("counter", "dihedral_prompt_tokens_total", "Prompt tokens of admitted requests.")
OUTPUT_TOKENS = Metric("counter", "dihedral_output_tokens_total", "Tokens that workers sampled for requests at hand.")
TTFT = Metric(
    "histogram",
    "dihedral_time_to_first_token_seconds",
    "From arrival to the first token.",
    buckets=LATENCY_BUCKETS,
)
INTER_TOKEN = Metric(
    "histogram", "dihedral_inter_token_latency_seconds", "Between a request's tokens.", buckets=STEP_BUCKETS
)
REQUEST_LATENCY = Metric(
    "histogram", "dihedral_request_latency_seconds", "From arrival to the end.", ("outcome",), LATENCY_BUCKETS
)
REQUEST_PROMPT_TOKENS = Metric(
    "histogram", "dihedral_request_prompt_tokens", "Prompt length of a request.", buckets=TOKEN_BUCKETS
)
REQUEST_OUTPUT_TOKENS = Metric(
    "histogram", "dihedral_request_output_tokens", "Output length of a request.", buckets=TOKEN_BUCKETS
)
STEP_ROUND_TRIP = Metric(
    "histogram",
    "dihedral_step_round_trip_seconds",
    "From handing a plan out to its result, queueing behind the running step included.",
    buckets=STEP_BUCKETS,
)
STEP_TOKENS = Metric("histogram", "dihedral_step_tokens", "Tokens that a plan computes.", buckets=BATCH_BUCKETS)
WORKER_LINK = Metric("gauge", "dihedral_worker_link_up", "1 while the step stream to the worker is live.", ("worker",))
WORKER_STEP = Metric(
    "histogram", "dihedral_worker_step_seconds", "Computing one plan on the worker.", buckets=STEP_BUCKETS
)
WORKER_QUEUE = Metric(
    "histogram",
    "dihedral_worker_plan_queue_seconds",
    "A plan's wait on the worker before its step starts.",
    buckets=STEP_BUCKETS,
)
WORKER_TOKENS = Metric("counter", "dihedral_worker_tokens_total", "Tokens computed on the worker.", ("kind",))
WORKER_ROW_FAILURES = Metric(
    "counter",
    "dihedral_worker_row_failures_total",
    "Sequences that the worker could not compute, by reason.",
    ("reason",),
)
WORKER_ROWS = Metric("gauge", "dihedral_worker_rows", "Rows of the worker that hold a sequence.")
WORKER_LOAD = Metric("gauge", "dihedral_worker_model_load_seconds", "How long the model took to load.")
WORKER_KV_BYTES = Metric("gauge", "dihedral_worker_kv_cache_bytes", "Memory of all KV blocks.")

CONTROL_PLANE_METRICS = (
    BUILD_INFO,
    REQUESTS,
    RUNNING,
    WAITING,
    KV_USAGE,
    KV_BLOCKS,
    KV_CACHED_BLOCKS,
    PREFIX_TOKENS,
    PREFIX_HITS,
    KV_BLOCK_SIZE,
    PREEMPTIONS,
    PROMPT_TOKENS,
    OUTPUT_TOKENS,
    TTFT,
    INTER_TOKEN,
    REQUEST_LATENCY,
    REQUEST_PROMPT_TOKENS,
    REQUEST_OUTPUT_TOKENS,
    STEP_ROUND_TRIP,
    STEP_TOKENS,
    WORKER_LINK,
)
WORKER_METRICS = (
    BUILD_INFO,
    WORKER_STEP,
    WORKER_QUEUE,
    WORKER_TOKENS,
    WORKER_ROW_FAILURES,
    WORKER_ROWS,
    WORKER_LOAD,
    WORKER_KV_BYTES,
)
CATALOGUE = tuple(dict.fromkeys(CONTROL_PLANE_METRICS + WORKER_METRICS))


class Metrics(Protocol):
    """Counts. Label values come in the order of the metric's labels."""

    def count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        """Add to a counter."""

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge."""

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Put one value into a histogram."""

    def remove(self, metric: Metric, *labels: str) -> None:
        """Export these labels of a metric no longer; what they label is gone. Nothing happens if they were not."""


class NoMetrics:
    """Counts nothing: for use in process, where nobody scrapes."""

    def count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        return None

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        return None

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        return None

    def remove(self, metric: Metric, *labels: str) -> None:
        return None
