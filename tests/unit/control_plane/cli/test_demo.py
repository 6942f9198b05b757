"""The parts of the demo that decide whether it succeeded."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from control_plane.cli.demo import Lines, check_counts, children, expected_counts, scrape, still_running, totals
from control_plane.cli.results import Completion
from control_plane.telemetry import MetricsConfig, MetricsServer, PrometheusMetrics
from plugins.metrics import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, TTFT


def completion(prompt_tokens: int, output_tokens: int) -> Completion:
    return Completion(
        text="",
        token_ids=(),
        finish_reason="stop",
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=0,
        first_token_s=0.5,
        total_s=1.5,
    )


def test_the_metrics_must_tell_what_was_streamed() -> None:
    assert expected_counts([completion(10, 20), completion(1, 2)]) == {
        "dihedral_requests_total": 2,
        "dihedral_prompt_tokens_total": 11,
        "dihedral_output_tokens_total": 22,
        "dihedral_time_to_first_token_seconds_count": 2,
    }


def test_samples_are_summed_over_their_labels() -> None:
    page = '# TYPE a counter\na_total{x="1"} 2.0\na_total{x="2"} 3.0\n# TYPE b gauge\nb 7.0\n'

    assert totals(page) == {"a_total": 5.0, "b": 7.0}


@pytest.mark.parametrize(("counted_tokens", "verdict"), [(22, True), (21, False)])
async def test_counts_that_differ_from_what_was_streamed_are_a_failure(counted_tokens: int, verdict: bool) -> None:
    metrics = PrometheusMetrics("control_plane")
    for outcome in ("stop", "length"):
        metrics.count(REQUESTS, 1, outcome)
        metrics.observe(TTFT, 0.1)
    metrics.count(PROMPT_TOKENS, 11)
    metrics.count(OUTPUT_TOKENS, counted_tokens)
    server = MetricsServer(MetricsConfig(port=0), metrics)
    out = io.StringIO()

    expected = expected_counts([completion(10, 20), completion(1, 2)])
    is_counted = await check_counts(Console(file=out, width=120), server.url, expected, wait_s=0)

    server.close()
    assert is_counted is verdict
    assert ("but 22 were streamed" in out.getvalue()) is not verdict


def test_a_proxy_of_the_environment_is_not_asked_for_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    server = MetricsServer(MetricsConfig(port=0), PrometheusMetrics("control_plane"))

    page = scrape(server.url)

    server.close()
    assert totals(page)["dihedral_build_info"] == 1


def test_without_a_terminal_texts_come_as_numbered_whole_lines() -> None:
    out = io.StringIO()
    lines = Lines(Console(file=out, width=200))
    out.truncate(0)
    out.seek(0)

    lines.write(0, "The sky")
    lines.write(1, "Waves\nroll")
    lines.write(0, " is blue " + "very " * 14)
    lines.write(0, "blue.")
    lines.close()

    assert out.getvalue().splitlines() == [
        "[2] Waves",
        "[1] The sky is blue very very very very very very very very very very very very very very",
        "[1] blue.",
        "[2] roll",
    ]


def test_a_process_and_its_children_are_found_while_they_run() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)

    assert child.pid in children(os.getpid())
    assert still_running([child.pid]) == [child.pid]

    child.communicate()
    assert child.pid not in children(os.getpid())
    assert still_running([child.pid]) == []


def test_the_rate_is_that_of_the_tokens_after_the_first() -> None:
    assert completion(10, 21).tokens_per_s == 20.0
    assert completion(10, 1).tokens_per_s == 0.0
