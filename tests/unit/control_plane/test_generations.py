"""Which workers may stand in for one another, and which of their generations is the newest."""

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from control_plane.engine.generations import Generations
from plugins.types import SamplingLimits, SamplingParams, TokenId, WorkerId, WorkerInfo
from tests.fakes import worker_info

A, B, C = WorkerId("10.0.0.1:1"), WorkerId("10.0.0.2:1"), WorkerId("10.0.0.3:1")
OLD = replace(worker_info(name="m"), weights_version="aaaa", plugins=("alpha==1",))
NEW = replace(OLD, weights_version="bbbb", plugins=("alpha==1", "beta==2"))


def test_workers_that_agree_are_of_one_generation_named_after_their_model() -> None:
    generations = Generations()

    first = generations.join(A, OLD)
    second = generations.join(B, OLD)

    assert first == second
    assert first.startswith("m-")
    assert len(first) == len("m-") + 8


def test_what_a_process_happens_to_be_opens_no_generation() -> None:
    generations = Generations()
    first = generations.join(A, OLD)

    second = generations.join(B, replace(OLD, incarnation="another", load_s=9.0, kv_bytes=7, num_blocks=4096))

    assert second == first


@pytest.mark.parametrize(
    ("info", "difference"),
    [
        (replace(OLD, weights_version="bbbb"), "weights_version: aaaa -> bbbb"),
        (replace(OLD, kv_cache_dtype="bfloat16"), "kv_cache_dtype: float32 -> bfloat16"),
        (replace(OLD, block_size=8), "block_size: 4 -> 8"),
        (replace(OLD, plugins=()), "plugins: alpha==1 -> none"),
        (replace(OLD, tokenizer_sha256="12ab"), "tokenizer_sha256: unknown -> 12ab"),
        (replace(OLD, max_sequences=9), "max_sequences: 8 -> 9"),
        (replace(OLD, max_step_tokens=64), "max_step_tokens: 32 -> 64"),
        (replace(OLD, num_blocks=16), "max_request_tokens: 256 -> 64"),
        (replace(OLD, model=replace(OLD.model, dtype="bfloat16")), "dtype: float32 -> bfloat16"),
        (replace(OLD, logits_processors=("a:B",)), "logits_processors: none -> a:B"),
        (replace(OLD, has_grammars=True), "has_grammars: false -> true"),
        (
            replace(OLD, model=replace(OLD.model, default_sampling=SamplingParams(temperature=0.5, top_k=40))),
            "default_sampling: none -> temperature=0.5, top_k=40",
        ),
        (replace(OLD, model=replace(OLD.model, eos_token_ids=(TokenId(5),))), "eos_token_ids: 2 -> 5"),
    ],
)
def test_a_worker_that_differs_opens_a_generation_and_the_difference_is_told(info: WorkerInfo, difference: str) -> None:
    generations = Generations()
    old = generations.join(A, OLD)

    new = generations.join(B, info)

    assert generations.changes(old, info) == generations.differences(old, new) == (difference,)
    assert generations.newest("m") == new
    assert generations.ordinal(new) > generations.ordinal(old)


def test_a_worker_with_smaller_buffers_opens_a_generation() -> None:
    generations = Generations()
    old = generations.join(A, OLD)

    new = generations.join(B, replace(OLD, sampling_limits=SamplingLimits(max_logprobs=5)))

    (difference,) = generations.differences(old, new)
    assert difference.startswith("sampling_limits: max_stop_token_ids=128, ")
    assert "max_logprobs=20, max_logprob_token_ids=128 -> " in difference
    assert difference.endswith("max_logprobs=5, max_logprob_token_ids=128")


def test_a_worker_differs_in_nothing_from_its_own_generation() -> None:
    generations = Generations()

    assert generations.changes(generations.join(A, OLD), OLD) == ()


def test_every_difference_is_told() -> None:
    generations = Generations()

    old = generations.join(A, OLD)

    assert generations.changes(old, NEW) == ("weights_version: aaaa -> bbbb", "plugins: alpha==1 -> alpha==1, beta==2")


def test_an_older_generation_stays_older_when_one_of_its_workers_joins_again() -> None:
    generations = Generations()
    generations.join(A, OLD)
    new = generations.join(B, NEW)

    generations.join(C, OLD)
    generations.join(A, OLD)

    assert generations.newest("m") == new


def test_a_worker_that_comes_back_as_another_is_in_the_other_generation_alone() -> None:
    generations = Generations()
    old = generations.join(A, OLD)

    new = generations.join(A, NEW)

    assert generations.generation(A) == new
    assert generations.differences(old, new) == generations.changes(old, NEW) == ()  # the old one is forgotten
    assert generations.ordinal(old) == 0


def test_a_generation_that_was_forgotten_comes_back_under_its_name_as_the_newest() -> None:
    generations = Generations()
    old = generations.join(A, OLD)
    generations.join(B, NEW)
    generations.leave(A)
    generations.leave(A)

    again = generations.join(C, OLD)

    assert again == old
    assert generations.newest("m") == old


def test_each_model_has_generations_of_its_own() -> None:
    generations = Generations()
    first = generations.join(A, OLD)
    other = generations.join(B, worker_info(name="n"))

    assert (generations.newest("m"), generations.newest("n"), generations.newest("x")) == (first, other, None)


class GenerationsMachine(RuleBasedStateMachine):
    """Workers come, change and go; what is remembered is what they were last."""

    def __init__(self) -> None:
        super().__init__()
        self.generations = Generations()
        self.known: dict[WorkerId, WorkerInfo] = {}

    @rule(worker_id=st.sampled_from([A, B, C]), info=st.sampled_from([OLD, NEW, worker_info(name="n")]))
    def join(self, worker_id: WorkerId, info: WorkerInfo) -> None:
        self.generations.join(worker_id, info)
        self.known[worker_id] = info

    @rule(worker_id=st.sampled_from([A, B, C]))
    def leave(self, worker_id: WorkerId) -> None:
        self.generations.leave(worker_id)
        self.known.pop(worker_id, None)

    @invariant()
    def agreeing_workers_share_a_generation_and_no_others_do(self) -> None:
        for one, info in self.known.items():
            for other, other_info in self.known.items():
                together = self.generations.generation(one) == self.generations.generation(other)
                assert together == (info == other_info)

    @invariant()
    def a_model_has_a_newest_generation_while_it_has_a_worker(self) -> None:
        for name in ("m", "n"):
            is_known = any(info.model.name == name for info in self.known.values())
            assert (self.generations.newest(name) is not None) == is_known


TestGenerationsMachine = GenerationsMachine.TestCase
