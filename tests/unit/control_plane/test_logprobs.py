"""Log-probabilities on their way: each token's with the token, each place of a prompt once and in order."""

from dataclasses import replace
from typing import Any

import pytest

from control_plane.engine.streams import Output, OutputStream
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.errors import WorkerLeaving
from plugins.types import (
    PromptLogprobs,
    Request,
    RequestId,
    Row,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenId,
    TokenLogprobs,
    WorkerId,
)
from tests.fakes import expected_output, told_of_output, told_of_prompt, worker_info
from tests.unit.control_plane.driving import Cluster, StopsAt, asking, outputs

A, B = RequestId("a"), RequestId("b")
W = WorkerId("w")
PROMPT = tuple(range(3, 13))


def telling(name: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 4, **fields: Any) -> Request:
    """A request that asks for everything."""
    sampling = SamplingParams(
        max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=2
    )
    return asking(name, prompt, max_tokens, sampling=replace(sampling, **fields))


def cluster_with(*names: str, **settings: Any) -> Cluster:
    cluster = Cluster(config=SchedulerConfig(prefix_hash_key="a key for these tests", **settings))
    for name in names:
        cluster.attach(name)
    return cluster


@pytest.mark.parametrize("chunk", [7, 16, 99, 100, 101])
def test_a_prompt_is_told_as_a_whole_whatever_its_chunks(chunk: int) -> None:
    """B068: no place is missing or told twice at the edges of chunks."""
    prompt = tuple(range(3, 103))
    cluster = cluster_with(max_chunk_tokens=chunk)
    cluster.attach("w", info=worker_info(max_step_tokens=128))
    cluster.submit(asking("b", (9, 9), max_tokens=30))
    cluster.step_all()
    cluster.submit(telling("a", prompt, 5))

    cluster.finish_all()

    assert cluster.prompt_logprobs[A] == told_of_prompt(prompt)
    assert cluster.logprobs[A] == told_of_output(prompt, expected_output(prompt, 5))
    assert (cluster.logprobs[B], cluster.prompt_logprobs[B]) == ((), ())


def test_a_prompt_that_is_told_about_takes_nothing_from_the_cache_and_leaves_its_blocks_there() -> None:
    cluster = cluster_with("w")
    cluster.submit(asking("before", PROMPT, max_tokens=1))
    cluster.finish_all()
    cluster.submit(telling("a"))
    cluster.finish_all()
    cluster.submit(asking("b", PROMPT, max_tokens=1))
    cluster.finish_all()

    assert cluster.prompt_logprobs[A] == told_of_prompt(PROMPT)
    assert [cluster.ends[RequestId(name)].num_cached_tokens for name in ("before", "a", "b")] == [0, 0, 8]


def test_the_first_of_several_outputs_tells_of_the_prompt_and_the_others_share_it() -> None:
    cluster = cluster_with("w")
    first, *others = outputs("a", 3, PROMPT, 4)
    cluster.workers[W].siblings = {each.request_id for each in others}
    told = replace(first, sampling=replace(first.sampling, logprobs=0, prompt_logprobs=0))
    untold = [replace(each, sampling=replace(each.sampling, logprobs=0)) for each in others]

    cluster.submit_together(told, *untold)
    cluster.finish_all()

    assert cluster.prompt_logprobs[A] == told_of_prompt(PROMPT)
    assert [cluster.ends[each.request_id].num_cached_tokens for each in others] == [9, 9]
    for each in (told, *untold):
        assert cluster.logprobs[each.request_id] == told_of_output(PROMPT, expected_output(PROMPT, 4))


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_places_that_were_told_are_not_told_again_by_another_worker(num_steps: int) -> None:
    prompt = tuple(range(3, 33))
    cluster = cluster_with("w", "v", max_chunk_tokens=8, max_step_tokens=8)
    cluster.submit(telling("a", prompt, 6), asking("b", (9, 9)))
    for _ in range(num_steps):
        cluster.step_all()

    cluster.kill("w", WorkerLeaving("it is restarted"))
    cluster.finish_all()

    assert cluster.prompt_logprobs[A] == told_of_prompt(prompt)
    assert cluster.logprobs[A] == told_of_output(prompt, expected_output(prompt, 6))


def test_places_that_were_told_are_not_told_again_after_a_preemption() -> None:
    cluster = cluster_with()
    cluster.attach("w", info=worker_info(num_blocks=6, max_sequences=3))
    prompts = {RequestId(f"r{number}"): (3, 4, 5 + number) for number in range(3)}
    cluster.submit(*(telling(name, prompt, 14) for name, prompt in prompts.items()))

    cluster.finish_all()

    assert cluster.core.load().num_preemptions > 0
    for name, prompt in prompts.items():
        assert cluster.prompt_logprobs[name] == told_of_prompt(prompt)
        assert cluster.logprobs[name] == told_of_output(prompt, expected_output(prompt, 14))


def test_what_was_sampled_behind_a_stop_is_not_told() -> None:
    cluster = cluster_with("w")
    cluster.submit_together(telling("a", max_tokens=20), watchers=[StopsAt(3)])

    cluster.finish_all()

    assert cluster.logprobs[A] == told_of_output(PROMPT, expected_output(PROMPT, 3))


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    cluster = cluster_with("w")
    cluster.submit(telling("a", (3,), 2))

    cluster.finish_all()

    assert (cluster.prompt_logprobs[A], len(cluster.logprobs[A])) == ((), 2)


ONE = TokenLogprobs((TokenId(3),), (-0.5,), (1,))
TOLD = tuple(ONE for _ in range(9))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": ()}, "has a token without its log-probability for row 0"),
        ({"logprobs": (None,)}, "has a token without its log-probability for row 0"),
        ({"logprobs": (ONE, ONE)}, "tells log-probabilities of 2 tokens, and has 1"),
        ({"prompt_logprobs": ()}, "has a token for row 0, and 0 of 9 places of its prompt were told"),
        ({"prompt_logprobs": (PromptLogprobs(Row(0), 1, TOLD[1:]),)}, "and 8 of 9 places of its prompt were told"),
        ({"prompt_logprobs": (PromptLogprobs(Row(0), 2, TOLD[1:]),)}, r"tells of places \[2, 10\) of row 0's prompt"),
        ({"prompt_logprobs": (PromptLogprobs(Row(0), 0, TOLD),)}, r"tells of places \[0, 9\) of row 0's prompt"),
        ({"prompt_logprobs": (PromptLogprobs(Row(0), 1, (*TOLD, ONE)),)}, r"places \[1, 11\) of row 0's prompt"),
        ({"prompt_logprobs": (PromptLogprobs(Row(1), 1, TOLD),)}, "of the prompt of row 1, which is not its to tell"),
        (
            {"prompt_logprobs": (PromptLogprobs(Row(0), 1, TOLD), PromptLogprobs(Row(0), 1, TOLD))},
            "of the prompt of row 0, which is not its to tell",
        ),
    ],
)
def test_a_worker_that_tells_too_little_or_too_much_is_lost(fields: dict[str, Any], message: str) -> None:
    cluster = cluster_with("w")
    cluster.submit(telling("a"))
    cluster.step()
    right = StepResult(
        seq=1,
        rows=(Row(0),),
        counts=(1,),
        token_ids=(TokenId(3),),
        finishes=(None,),
        logprobs=(ONE,),
        prompt_logprobs=(PromptLogprobs(Row(0), 1, TOLD),),
    )
    cluster.on_their_way[W] = [replace(right, **fields)]

    cluster.step("w")

    ((_, error),) = cluster.lost
    assert error.reason == "PLAN_OUT_OF_ORDER"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(str(error))


def test_what_nobody_asked_for_is_nobodys() -> None:
    cluster = cluster_with("w")
    cluster.submit(asking("a", PROMPT))
    cluster.step()
    cluster.on_their_way[W] = [
        replace(result, logprobs=(ONE,), prompt_logprobs=(PromptLogprobs(Row(0), 1, TOLD),))
        for result in cluster.on_their_way[W][:1]
    ]

    cluster.step("w")

    assert (cluster.outputs[A], cluster.logprobs[A], cluster.prompt_logprobs[A]) == (expected_output(PROMPT, 1), (), ())


class Forgetful(RunAheadScheduler):
    """Says that the first block is cached, whatever is told about."""

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        plan = super().schedule(throttle_prefills)
        return replace(plan, admitted=tuple(replace(each, num_cached_tokens=4) for each in plan.admitted))


def test_a_scheduler_that_skips_places_has_failed_and_no_worker_is_blamed() -> None:
    cluster = Cluster(lambda worker: Forgetful(SchedulerConfig(), worker))
    cluster.attach("w")
    cluster.submit(telling("a"))

    with pytest.raises(Exception, match="admits 'a' with cached tokens of a prompt that is told about"):
        cluster.step()


async def test_log_probabilities_that_were_not_read_are_merged_like_their_tokens() -> None:
    stream = OutputStream()
    stream.put((), None, None, 0.0, prompt_logprobs=TOLD[:2])
    stream.put((TokenId(3),), None, None, 0.0, 0, (ONE,), TOLD[:1])
    stream.put((TokenId(4), TokenId(5)), None, None, 0.0, 0, (None, ONE))
    first = await stream.next()
    stream.put((TokenId(6),), None, None, 0.0)

    assert first == Output(tuple(map(TokenId, (3, 4, 5))), logprobs=(ONE, None, ONE), prompt_logprobs=TOLD[:3])
    assert await stream.next() == Output((TokenId(6),))
