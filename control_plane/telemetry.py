"""Counts the metrics of the catalogue and serves them to Prometheus.

Knows names and types through `plugins/metrics.py`; when something is counted is its owner's business.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from threading import Thread
from typing import TypeVar
from wsgiref.simple_server import WSGIServer

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from plugins.errors import InvalidConfig, InvariantBroken
from plugins.metrics import BUILD_INFO, CONTROL_PLANE_METRICS, WORKER_METRICS, Metric

T = TypeVar("T")

PLANES = {"control_plane": CONTROL_PLANE_METRICS, "worker": WORKER_METRICS}
DEFAULT_PORTS = {"control_plane": 9464, "worker": 9465}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    enabled: bool = True  # serve metrics over HTTP
    host: str = "127.0.0.1"  # where metrics are served
    port: int | None = None  # None: 9464, on a worker 9465; 0: any free port

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port <= 65535:
            raise InvalidConfig(f"metrics.port must be in [0, 65535], is {self.port}")


class PrometheusMetrics:
    """The metrics of one process, in a registry of their own. May be called from any thread.

    Invariant: what is exported under `dihedral_` is the plane's part of the catalogue, no more and no less.
    """

    def __init__(self, plane: str) -> None:
        """`plane` is a key of PLANES. Metrics without labels are exported from the start, as 0."""
        # Without this each counter and histogram exports a `_created` gauge besides.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library left it untyped
        self.plane = plane
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in PLANES[plane]:
            self._add(metric)
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        prometheus_client.GCCollector(registry=self.registry)
        self.set(BUILD_INFO, 1, version("dihedral"), plane)

    def count(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        """Add to a counter. Raises: InvariantBroken: it is not in this plane's catalogue."""
        counter = _find(self._counters, metric, self.plane)
        (counter.labels(*labels) if labels else counter).inc(amount)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge. Raises: InvariantBroken: it is not in this plane's catalogue."""
        gauge = _find(self._gauges, metric, self.plane)
        (gauge.labels(*labels) if labels else gauge).set(value)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Put one value into a histogram. Raises: InvariantBroken: it is not in this plane's catalogue."""
        histogram = _find(self._histograms, metric, self.plane)
        (histogram.labels(*labels) if labels else histogram).observe(value)

    def remove(self, metric: Metric, *labels: str) -> None:
        """Export these labels of a metric no longer. Raises: InvariantBroken: it is not in this plane's catalogue."""
        families: dict[str, Counter | Gauge | Histogram] = {**self._counters, **self._gauges, **self._histograms}
        with suppress(KeyError):  # they were never told, or are removed already
            _find(families, metric, self.plane).remove(*labels)

    def _add(self, metric: Metric) -> None:
        match metric.kind:
            case "counter":
                self._counters[metric.name] = Counter(metric.name, metric.help, metric.labels, registry=self.registry)
            case "gauge":
                self._gauges[metric.name] = Gauge(metric.name, metric.help, metric.labels, registry=self.registry)
            case "histogram":
                self._histograms[metric.name] = Histogram(
                    metric.name, metric.help, metric.labels, registry=self.registry, buckets=_bounds(metric.buckets)
                )


def _bounds(buckets: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(bound) for bound in buckets)


def _find(table: Mapping[str, T], metric: Metric, plane: str) -> T:
    try:
        return table[metric.name]  # by name: hashing a whole Metric costs more than counting
    except KeyError:
        raise InvariantBroken(f"{metric.kind} {metric.name} is not in the catalogue of the {plane}") from None


class MetricsServer:
    """Serves one process's metrics over HTTP, in a thread of its own. Scrapes are not logged.

    Raises: InvalidConfig: the address cannot be used; the message names it and the remedy.
    """

    def __init__(self, config: MetricsConfig, metrics: PrometheusMetrics) -> None:
        port = DEFAULT_PORTS[metrics.plane] if config.port is None else config.port
        self._server: WSGIServer
        self._thread: Thread
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, config.host, metrics.registry)
        except OSError as error:
            raise InvalidConfig(
                f"metrics cannot be served at {config.host}:{port} ({error.strerror or error}); choose another "
                "metrics.port (0 takes any free one) or metrics.host, or set metrics.enabled to false"
            ) from error
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
