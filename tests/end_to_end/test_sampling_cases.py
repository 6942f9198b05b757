"""Sampling parameters from admission to the worker's tokens, in one process: what is admitted does what it says."""

import logging
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from control_plane.engine.completions import Completion
from control_plane.engine.local import LocalEngine
from plugins.errors import InvalidRequest
from plugins.types import FinishReason, SamplingParams, TokenId

PROMPT = [3] * 20
EOS = TokenId(257)
VOCAB_SIZE = 272


def local_engine(dtype: str = "float32", max_model_len: int = 128) -> LocalEngine:
    return LocalEngine(
        load_format="dummy", dtype=dtype, threads=1, max_model_len=max_model_len, kv_cache_gib=0.05, max_sequences=8
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with local_engine() as made:
        yield made


def complete(engine: LocalEngine, prompt: list[int] | None = None, **sampling: Any) -> Completion:
    (completion,) = engine.generate([PROMPT if prompt is None else prompt], SamplingParams(**sampling))
    return completion


def tokens(engine: LocalEngine, **sampling: Any) -> tuple[TokenId, ...]:
    """16 tokens, of one seed."""
    return complete(engine, seed=1, max_tokens=16, ignore_eos=True, **sampling).token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_smallest_temperatures_are_greedy(dtype: str) -> None:
    """Case B004: a temperature of 1e-4 overflowed. The last two are the least 32-bit and 64-bit numbers above 0."""
    with local_engine(dtype) as engine:
        greedy = tokens(engine, temperature=0.0)
        cold = {
            temperature: tokens(engine, temperature=temperature) for temperature in (1e-4, 1e-6, 1e-30, 1.4e-45, 5e-324)
        }
        cool = tokens(engine, temperature=1e-2)

    assert cold == dict.fromkeys(cold, greedy)
    assert len(greedy) == len(cool) == 16


def test_a_top_k_of_nothing_and_of_everything_are_the_same_and_1_is_greedy(engine: LocalEngine) -> None:
    """Case B005: 0 and -1 meant different things in different places."""
    unset = tokens(engine, temperature=0.8)

    assert [tokens(engine, temperature=0.8, top_k=top_k) for top_k in (0, VOCAB_SIZE, VOCAB_SIZE + 1)] == [unset] * 3
    assert tokens(engine, temperature=0.8, top_k=1) == tokens(engine, temperature=0.0) != unset
    for top_k in (-1, -2):
        with pytest.raises(InvalidRequest, match="sampling.top_k: is -"):
            tokens(engine, top_k=top_k)


def test_a_bias_makes_the_last_token_of_the_vocabulary_the_likeliest(engine: LocalEngine) -> None:
    """Case B008: V - 1 is an id like any other, V is refused by name."""
    assert tokens(engine, temperature=0.0, logit_bias={VOCAB_SIZE - 1: 100.0}) == (VOCAB_SIZE - 1,) * 16
    with pytest.raises(InvalidRequest, match=f"sampling.logit_bias: token {VOCAB_SIZE} is not in the vocabulary"):
        tokens(engine, logit_bias={VOCAB_SIZE: 5.0})


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([-1], "token -1 at index 0"),
        ([VOCAB_SIZE], f"token {VOCAB_SIZE} at index 0"),
        ([0, 1, -5], "token -5 at index 2"),
        ([2**31 - 1], "token 2147483647 at index 0"),
    ],
)
def test_absurd_prompts_never_reach_the_worker(
    engine: LocalEngine, caplog: pytest.LogCaptureFixture, level: int, prompt: list[int], message: str
) -> None:
    """Case B012: [-1] passed a check of the upper bound alone; elsewhere it broke the log."""
    while engine.has_work():  # plans of the test before that are still in flight
        engine.step()

    with caplog.at_level(level), pytest.raises(InvalidRequest, match=f"tokens.ids: {message} is not in the vocabulary"):
        engine.add_request("absurd", prompt)

    assert not engine.has_work()


@pytest.mark.parametrize(("min_tokens", "finish"), [(4, FinishReason.LENGTH), (3, FinishReason.STOP)])
def test_min_tokens_are_had_however_likely_the_end_is(
    engine: LocalEngine, min_tokens: int, finish: FinishReason
) -> None:
    """Case B017: (4, 4) gives exactly 4 tokens, none of them the end; after 3 the end comes at once."""
    completion = complete(engine, min_tokens=min_tokens, max_tokens=4, temperature=0.0, logit_bias={EOS: 100.0})

    assert len(completion.token_ids) == 4
    assert EOS not in completion.token_ids[:min_tokens]
    assert completion.finish is finish


@pytest.mark.parametrize("word", [" ", "\t", "\x00", "\u200b", "+"])
def test_a_bad_word_that_is_admitted_is_held_back(engine: LocalEngine, word: str) -> None:
    """Case B019: the worker looks for tokens, of which an odd character has some too."""
    likeliest = {TokenId(byte): 100.0 for byte in word.encode()}

    text = complete(engine, max_tokens=16, temperature=0.0, bad_words=(word,), logit_bias=likeliest).text

    assert word not in text


def test_at_the_caps_of_log_probabilities_memory_does_not_grow() -> None:
    """Case B021: 500 tokens of prompt and 400 of output, with the most log-probabilities that may be asked for."""
    with local_engine(max_model_len=1024) as engine:
        complete(engine, max_tokens=2, logprobs=1, prompt_logprobs=1)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        completion = complete(
            engine, [3] * 500, max_tokens=400, logprobs=20, prompt_logprobs=20, ignore_eos=True, seed=1
        )
        growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib

    assert [len(each.token_ids) for each in completion.logprobs] == [21] * 400
    assert [len(each.token_ids) for each in completion.prompt_logprobs] == [21] * 499
    assert growth_kib < 200 * 1024


def test_a_stop_string_never_leaves_an_empty_answer(engine: LocalEngine) -> None:
    """Case B024: an empty stop string matched at once."""
    for stop in ([""], ["", "END"]):
        with pytest.raises(InvalidRequest, match="sampling.stop: text at index 0|1 is empty"):
            complete(engine, max_tokens=8, stop=stop)
    assert tokens(engine, stop=[]) == tokens(engine)


@pytest.mark.parametrize("max_tokens", [None, 10_000])
def test_an_output_without_a_limit_fills_the_context(engine: LocalEngine, max_tokens: int | None) -> None:
    """Case B026: 20 tokens in a context of 128 leave room for 108."""
    completion = complete(engine, max_tokens=max_tokens, ignore_eos=True)

    assert (len(completion.token_ids), completion.finish) == (108, FinishReason.LENGTH)
