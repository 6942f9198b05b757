"""The exported metrics: equal to the catalogue, named by Prometheus practice, served over HTTP."""

import re
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.telemetry import MetricsConfig, MetricsServer, PrometheusMetrics
from plugins.errors import InvalidConfig, InvariantBroken
from plugins.metrics import (
    CATALOGUE,
    CONTROL_PLANE_METRICS,
    INTER_TOKEN,
    OUTPUT_TOKENS,
    REQUESTS,
    RUNNING,
    STEP_BUCKETS,
    WORKER_LINK,
    WORKER_METRICS,
    WORKER_ROWS,
    Metric,
)

BASE_UNITS = ("_seconds", "_bytes", "_ratio", "_tokens", "_requests", "_blocks", "_rows", "_info", "_up")


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
    return body.decode()


def served(metrics: PrometheusMetrics) -> str:
    server = MetricsServer(MetricsConfig(port=0), metrics)
    try:
        return scrape(server.url)
    finally:
        server.close()


@pytest.mark.parametrize(("plane", "catalogue"), [("control_plane", CONTROL_PLANE_METRICS), ("worker", WORKER_METRICS)])
def test_what_a_plane_exports_is_its_part_of_the_catalogue(plane: str, catalogue: tuple[Metric, ...]) -> None:
    families = text_string_to_metric_families(served(PrometheusMetrics(plane)))
    exported = {
        (family.name + ("_total" if family.type == "counter" else ""), family.type, family.documentation)
        for family in families
        if family.name.startswith("dihedral_")
    }

    assert exported == {(metric.name, metric.kind, metric.help) for metric in catalogue}


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_metric_is_named_by_prometheus_practice(metric: Metric) -> None:
    assert re.fullmatch(r"dihedral_[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.removesuffix("_total").endswith(BASE_UNITS) or metric.kind == "counter"
    assert not re.search(r"_(ms|milliseconds|us|percent|mb|kb|mib|gib)(_|$)", metric.name)
    assert metric.help.endswith(".")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert not {"request_id", "prompt", "user", "le"} & set(metric.labels)


def test_no_two_metrics_share_a_name() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)


def test_the_buckets_of_a_step_resolve_three_milliseconds() -> None:
    assert len([bound for bound in STEP_BUCKETS if bound <= 0.006]) >= 5


def test_counts_values_and_observations_are_exported() -> None:
    metrics = PrometheusMetrics("control_plane")

    metrics.count(REQUESTS, 1, "stop")
    metrics.count(REQUESTS, 1, "stop")
    metrics.count(OUTPUT_TOKENS, 17)
    metrics.set(RUNNING, 3)
    metrics.observe(INTER_TOKEN, 0.0035)

    lines = served(metrics).splitlines()
    assert 'dihedral_requests_total{outcome="stop"} 2.0' in lines
    assert "dihedral_output_tokens_total 17.0" in lines
    assert "dihedral_running_requests 3.0" in lines
    assert 'dihedral_inter_token_latency_seconds_bucket{le="0.003"} 0.0' in lines
    assert 'dihedral_inter_token_latency_seconds_bucket{le="0.004"} 1.0' in lines


def test_what_is_removed_is_exported_no_longer_until_it_is_told_again() -> None:
    metrics = PrometheusMetrics("control_plane")
    for worker_id in ("10.0.0.1:1", "10.0.0.2:1"):
        metrics.set(WORKER_LINK, 1, worker_id)

    for _ in range(2):
        metrics.remove(WORKER_LINK, "10.0.0.1:1")
    removed = served(metrics)
    metrics.set(WORKER_LINK, 0, "10.0.0.1:1")

    assert "10.0.0.1:1" not in removed
    assert 'dihedral_worker_link_up{worker="10.0.0.2:1"} 1.0' in removed
    assert 'dihedral_worker_link_up{worker="10.0.0.1:1"} 0.0' in served(metrics)


def test_build_info_tells_version_and_plane() -> None:
    text = served(PrometheusMetrics("worker"))

    assert re.search(r'^dihedral_build_info\{plane="worker",version="\d+\.\d+\.\d+"\} 1\.0$', text, re.MULTILINE)


def test_the_process_itself_is_measured() -> None:
    text = served(PrometheusMetrics("control_plane"))

    assert "process_resident_memory_bytes " in text
    assert "python_info{" in text


def test_two_processes_worth_of_metrics_do_not_share_numbers() -> None:
    first, second = PrometheusMetrics("worker"), PrometheusMetrics("worker")

    first.set(WORKER_ROWS, 5)

    assert "dihedral_worker_rows 0.0" in served(second)


def test_a_metric_of_the_other_plane_is_a_bug() -> None:
    with pytest.raises(
        InvariantBroken, match="gauge dihedral_worker_rows is not in the catalogue of the control_plane"
    ):
        PrometheusMetrics("control_plane").set(WORKER_ROWS, 1)


def test_a_port_in_use_is_refused_with_address_and_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(InvalidConfig) as caught:
            MetricsServer(MetricsConfig(port=port), PrometheusMetrics("worker"))

    assert str(caught.value) == (
        f"metrics cannot be served at 127.0.0.1:{port} (Address already in use); choose another metrics.port "
        "(0 takes any free one) or metrics.host, or set metrics.enabled to false"
    )


def test_a_closed_server_frees_its_port() -> None:
    server = MetricsServer(MetricsConfig(port=0), PrometheusMetrics("worker"))
    port = int(server.url.split(":")[2].split("/")[0])

    server.close()

    socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"metrics.port must be in \[0, 65535\], is 70000"):
        MetricsConfig(port=70000)
