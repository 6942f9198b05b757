"""Starts a serving process: logs, the resolved configuration as one event, metrics over HTTP, then the command."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from control_plane.config import Config
from control_plane.logs import LogConfig, setup_logging
from control_plane.telemetry import MetricsConfig, MetricsServer, PrometheusMetrics

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Invocation:
    """One command line of a serving command."""

    config: Config  # every section, resolved
    sections: Sequence[str]  # those that the command reads
    flags: Mapping[str, object]  # what the command line itself set, by dotted key
    file: Path | None  # what --config named


class Context:
    """What a serving command receives. Fulfils `plugins.commands.CommandContext`."""

    def __init__(self, invocation: Invocation, metrics: PrometheusMetrics, metrics_url: str | None) -> None:
        self.invocation = invocation
        self.metrics_url = metrics_url  # None: metrics are not served
        self._metrics = metrics

    @property
    def metrics(self) -> PrometheusMetrics:
        """The process's metrics."""
        return self._metrics

    def section(self, kind: type[T]) -> T:
        """Return the section of the configuration that this dataclass describes."""
        return self.invocation.config.section(kind)


def launch(invocation: Invocation, plane: str, run: Callable[[Context], int]) -> int:
    """Run a serving command of one plane until it ends; returns its exit code.

    Raises: InvalidConfig: metrics cannot be served where the configuration says.
    """
    config = invocation.config
    setup_logging(config.section(LogConfig), sys.stderr)
    logger.info("config_resolved", extra=config.resolved(invocation.sections))
    metrics = PrometheusMetrics(plane)
    where = config.section(MetricsConfig)
    if not where.enabled:
        return run(Context(invocation, metrics, None))
    server = MetricsServer(where, metrics)
    logger.info("metrics_served", extra={"url": server.url})
    try:
        return run(Context(invocation, metrics, server.url))
    finally:
        server.close()
