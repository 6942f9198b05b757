"""An output that its text ends: cut where it stops, told once, and out of the way as any other."""

from collections.abc import Sequence

import pytest

from control_plane.engine.lane import Lane
from control_plane.engine.live import Live
from control_plane.engine.stopping import cut_at_stops
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.synchronous import SynchronousScheduler
from plugins.errors import DetokenizerFailed, WorkerLeaving
from plugins.types import (
    FinishReason,
    GenerationId,
    RequestId,
    Row,
    SamplingParams,
    StepResult,
    TokenId,
    TokenLogprobs,
    WorkerId,
)
from tests.fakes import expected_output, worker_info
from tests.unit.control_plane.driving import Cluster, StopsAt, asking, outputs

A, B = RequestId("a"), RequestId("b")
W = WorkerId("w")
PROMPT = range(3, 8)


class Raises:
    """A StopWatcher whose tokenizer chokes on the n-th token."""

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    def push(self, token_ids: Sequence[TokenId], is_stopped: bool = False) -> int | None:
        self._num_left -= len(token_ids)
        if self._num_left <= 0:
            raise ValueError("invalid prefix")
        return None


def cluster_with(*names: str) -> Cluster:
    cluster = Cluster(config=SchedulerConfig(prefix_hash_key="a key for these tests"))
    for name in names:
        cluster.attach(name)
    return cluster


def test_an_output_ends_with_the_token_that_its_watcher_names_and_its_neighbour_goes_on() -> None:
    cluster, watcher = cluster_with("w"), StopsAt(3)
    cluster.submit_together(asking("a", PROMPT, max_tokens=50), watchers=[watcher])
    cluster.submit(asking("b", (9, 9), max_tokens=6))

    cluster.finish_all()

    assert cluster.outputs == {A: expected_output(PROMPT, 3), B: expected_output((9, 9), 6)}
    assert (cluster.ends[A].finish, cluster.ends[A].error) == (FinishReason.STOP, None)
    assert cluster.ends[B].finish is FinishReason.LENGTH
    assert tuple(watcher.token_ids) == expected_output(PROMPT, 3)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_stop_with_the_first_token_or_with_the_last_one_that_may_be_is_a_stop(num_tokens: int) -> None:
    cluster = cluster_with("w")
    cluster.submit_together(asking("a", PROMPT, max_tokens=4), watchers=[StopsAt(num_tokens)])

    cluster.finish_all()

    assert cluster.outputs[A] == expected_output(PROMPT, num_tokens)
    assert cluster.ends[A].finish is FinishReason.STOP


def test_what_the_worker_samples_behind_a_stop_is_neither_told_nor_cached() -> None:
    """The plan in flight computes the token of the stop, and would fill the second block of four with it."""
    cluster = cluster_with("w")
    cluster.core.record_kv_events(True)
    cluster.submit_together(asking("a", PROMPT, max_tokens=50), watchers=[StopsAt(3)])

    cluster.finish_all()
    cluster.step_all()

    load = cluster.core.load()
    assert cluster.outputs[A] == expected_output(PROMPT, 3)
    assert (load.num_cached_blocks, load.num_free_blocks, load.num_running) == (1, 64, 0)


def test_the_end_that_a_worker_finds_is_told_to_the_watcher() -> None:
    cluster, watcher = cluster_with("w"), StopsAt(None)
    cluster.workers[W].eos_after[A] = 2
    sampling = SamplingParams(max_tokens=9, seed=0, temperature=0.0)
    cluster.submit_together(asking("a", PROMPT, sampling=sampling), watchers=[watcher])

    cluster.finish_all()

    assert (len(watcher.token_ids), watcher.is_stopped) == (2, True)
    assert cluster.ends[A].finish is FinishReason.STOP


def test_a_watcher_that_raises_ends_its_own_request_and_no_other() -> None:
    """B030: seven streams beside the one whose fifth token has no text."""
    cluster = cluster_with("w")
    others = [RequestId(f"r{number}") for number in range(7)]
    cluster.submit_together(asking("a", PROMPT, max_tokens=50), watchers=[Raises(5)])
    for number, name in enumerate(others):
        cluster.submit_together(asking(name, (9, 3 + number), max_tokens=12), watchers=[StopsAt(None)])

    cluster.finish_all()

    end = cluster.ends[A]
    assert (end.finish, type(end.error)) == (FinishReason.FAILED, DetokenizerFailed)
    assert str(end.error) == "the output could not be turned into text: the tokenizer raised ValueError"
    assert cluster.outputs[A] == expected_output(PROMPT, 4)
    assert [cluster.outputs[name] for name in others] == [expected_output((9, 3 + n), 12) for n in range(7)]
    assert cluster.core.load().num_free_blocks == 64


def test_a_watcher_reads_each_token_once_whatever_becomes_of_the_worker() -> None:
    cluster, watcher = cluster_with("w", "v"), StopsAt(9)
    cluster.submit_together(asking("a", PROMPT, max_tokens=50), watchers=[watcher])
    for _ in range(4):
        cluster.step_all()

    cluster.kill("w", WorkerLeaving("it is restarted"))
    cluster.finish_all()

    assert cluster.placed() == {"a": "v"}
    assert tuple(watcher.token_ids) == cluster.outputs[A] == expected_output(PROMPT, 9)
    assert cluster.ends[A].finish is FinishReason.STOP


def test_a_watcher_reads_each_token_once_when_its_request_is_preempted() -> None:
    info = worker_info(num_blocks=6, max_sequences=3)
    cluster = cluster_with()
    cluster.attach("w", info=info)
    watchers = [StopsAt(9), StopsAt(9), StopsAt(9)]
    for number, watcher in enumerate(watchers):
        prompt = (3, 4, 5 + number)
        cluster.submit_together(asking(f"r{number}", prompt, max_tokens=14), watchers=[watcher])

    cluster.finish_all()

    assert len([each for _, plan in cluster.plans for each in plan.admitted]) > 3
    for number, watcher in enumerate(watchers):
        assert tuple(watcher.token_ids) == expected_output((3, 4, 5 + number), 9)


def test_a_cancel_around_a_stop_ends_each_request_exactly_once() -> None:
    """B043, with stop strings: 200 requests, each cancelled before, in or after the step that brings its stop."""
    cluster = cluster_with("w")
    for number in range(200):
        cluster.submit_together(asking(f"r{number}", (3 + number % 50,), max_tokens=9), watchers=[StopsAt(3)])
    turn = 0
    while cluster.core.has_work():
        turn += 1
        for name in [name for name, tokens in cluster.outputs.items() if len(tokens) >= 2][turn % 3 :: 3]:
            cluster.core.cancel(name)
        cluster.step_all()

    assert {end.finish for end in cluster.ends.values()} == {FinishReason.STOP, FinishReason.CANCELLED}
    assert len(cluster.ends) == 200
    for name, end in cluster.ends.items():
        assert (len(cluster.outputs[name]) == 3) == (end.finish is FinishReason.STOP)
    assert cluster.core.load().num_free_blocks == 64


def test_a_name_is_used_again_while_the_plan_behind_a_stop_is_on_its_way() -> None:
    cluster = cluster_with("w")
    cluster.submit_together(asking("a", PROMPT, max_tokens=50), watchers=[StopsAt(2)])
    for _ in range(4):
        cluster.step_all()
    first = cluster.ends.pop(A), cluster.outputs.pop(A)

    again = StopsAt(4)
    cluster.submit_together(asking("a", (9, 9), max_tokens=50), watchers=[again])
    cluster.finish_all()

    assert (first[0].finish, first[1]) == (FinishReason.STOP, expected_output(PROMPT, 2))
    assert tuple(again.token_ids) == cluster.outputs[A] == expected_output((9, 9), 4)


def test_outputs_of_one_request_stop_each_in_its_own_place() -> None:
    """B046, with stop strings: four outputs end after 1, 5, 20 and 50 tokens, and every block comes back."""
    cluster = cluster_with("w")
    cluster.submit_together(*outputs("a", 4, PROMPT, 60), watchers=[StopsAt(1), StopsAt(5), StopsAt(20), StopsAt(50)])

    cluster.finish_all()

    assert [len(cluster.outputs[RequestId(name)]) for name in ("a", "a·1", "a·2", "a·3")] == [1, 5, 20, 50]
    assert {end.finish for end in cluster.ends.values()} == {FinishReason.STOP}
    assert cluster.core.load().num_free_blocks == 64


def test_a_scheduler_that_waits_for_each_result_is_told_of_stops_too() -> None:
    cluster = Cluster(lambda worker: SynchronousScheduler(SchedulerConfig(), worker))
    cluster.attach("w")
    cluster.submit_together(asking("a", PROMPT, max_tokens=50), watchers=[StopsAt(7)])

    cluster.finish_all()

    assert cluster.outputs[A] == expected_output(PROMPT, 7)


def test_tokens_behind_a_stop_in_the_same_result_are_cut_with_their_log_probabilities() -> None:
    def told(token_id: int) -> TokenLogprobs:
        return TokenLogprobs((TokenId(token_id),), (-0.5,), (1,))

    def live(name: str, watcher: StopsAt | None) -> Live:
        return Live(asking(name), GenerationId("g"), watcher, lane=Lane(W, None))

    result = StepResult(
        seq=1,
        rows=(Row(0), Row(1), Row(2)),
        counts=(3, 1, 2),
        token_ids=tuple(map(TokenId, (3, 4, 5, 6, 7, 8))),
        finishes=(FinishReason.LENGTH, None, FinishReason.LENGTH),
        logprobs=tuple(map(told, (3, 4, 5, 6, 7, 8))),
    )
    owners = {Row(0): live("a", StopsAt(2)), Row(1): live("b", None), Row(2): live("c", StopsAt(None))}

    cut = cut_at_stops(result, owners)

    assert cut.result == StepResult(
        seq=1,
        rows=(Row(0), Row(1), Row(2)),
        counts=(2, 1, 2),
        token_ids=tuple(map(TokenId, (3, 4, 6, 7, 8))),
        finishes=(FinishReason.STOP, None, FinishReason.LENGTH),
        logprobs=tuple(map(told, (3, 4, 6, 7, 8))),
    )
    assert cut.broken == ()


def test_a_watcher_that_names_a_token_that_is_not_there_has_failed() -> None:
    owner = Live(asking("a"), GenerationId("g"), StopsAt(0), lane=Lane(W, None))
    result = StepResult(seq=1, rows=(Row(0),), counts=(1,), token_ids=(TokenId(3),), finishes=(None,))

    cut = cut_at_stops(result, {Row(0): owner})

    assert cut.result is result
    assert [(live, str(error.__cause__)) for live, error in cut.broken] == [
        (owner, "an output ends after 0 of 1 tokens")
    ]
