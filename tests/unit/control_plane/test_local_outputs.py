"""What requests of the engine in process may ask for, with the tiny random model of the worker's own loader."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.submission import ChatMessage
from control_plane.engine.completions import Completion
from control_plane.engine.local import LocalEngine
from control_plane.scheduling.config import SchedulerConfig
from control_plane.text.detokenizer import Detokenizer
from plugins.errors import DetokenizerFailed, InvalidRequest
from plugins.noise import child_seed
from plugins.types import FinishReason, LogprobsMode, RequestId, SamplingParams, TokenId

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
PROMPT = list(range(3, 103))


def make_engine(max_waiting: int = 64, max_step_tokens: int = 64, **worker: Any) -> LocalEngine:
    tiny: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "num_blocks": 64}
    return LocalEngine(
        scheduler=SchedulerConfig(max_step_tokens=max_step_tokens, max_sequences=4),
        admission=AdmissionConfig(max_waiting=max_waiting),
        **tiny | worker,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with make_engine() as made:
        yield made


def with_fields(sampling: SamplingParams, **changed: Any) -> SamplingParams:
    fields = {name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__}
    return SamplingParams(**fields | changed)


def complete(engine: LocalEngine, prompt: str | Sequence[int], sampling: SamplingParams) -> Completion:
    (completion,) = engine.generate([prompt], sampling)
    return completion


def test_n_outputs_are_those_of_n_requests_with_the_child_seeds(engine: LocalEngine) -> None:
    alone = [complete(engine, "hello", with_fields(SEEDED, seed=child_seed(5, index))).token_ids for index in range(4)]

    together = complete(engine, "hello", with_fields(SEEDED, n=4))

    assert [together.token_ids, *(other.token_ids for other in together.others)] == alone
    assert len(set(alone)) == 4
    assert [other.others for other in together.others] == [()] * 3
    assert [other.finish for other in together.others] == [FinishReason.LENGTH] * 3


def test_each_output_has_a_name_of_its_own_and_all_are_cancelled_under_the_first(engine: LocalEngine) -> None:
    engine.add_request("a", "hello", with_fields(SEEDED, n=3, max_tokens=2))
    names = {delivery.request_id for _ in iter(engine.has_work, False) for delivery in engine.step()}

    request_id = engine.add_request("b", "hello", with_fields(SEEDED, n=3))
    engine.cancel(request_id)
    ends = [(delivery.request_id, delivery.finish) for delivery in engine.step()]

    assert names == {"a", "a·1", "a·2"}
    assert ends == [(name, FinishReason.CANCELLED) for name in ("b", "b·1", "b·2")]


def test_more_outputs_than_may_wait_come_one_prompt_after_the_other() -> None:
    with make_engine(max_waiting=3) as engine:
        completions = engine.generate(["hello", "hello", "x"], with_fields(SEEDED, n=4))

    assert [len(completion.others) for completion in completions] == [3, 3, 3]
    assert completions[0].token_ids == completions[1].token_ids


def test_a_stop_string_ends_tokens_and_text(engine: LocalEngine) -> None:
    letters = with_fields(SEEDED, allowed_token_ids=engine.model.text.encode("abcdefghijklmnopqrstuvwxyz"))
    whole = complete(engine, "hello", letters)
    stop = whole.text[3:5]

    cut = complete(engine, "hello", with_fields(letters, stop=(stop,)))
    kept = complete(engine, "hello", with_fields(letters, stop=(stop,), include_stop_str_in_output=True))

    assert len(whole.text) == 8
    assert (cut.token_ids, cut.finish, cut.stop_string) == (whole.token_ids[:5], FinishReason.STOP, stop)
    assert (cut.text, kept.text) == (whole.text[:3], whole.text[:5])


def test_a_stop_token_has_no_text(engine: LocalEngine) -> None:
    whole = complete(engine, "hello", GREEDY)
    stop = whole.token_ids[2]

    cut = complete(engine, "hello", with_fields(GREEDY, stop_token_ids=(stop,)))

    assert (cut.token_ids, cut.finish, cut.stop_string) == (whole.token_ids[:3], FinishReason.STOP, None)
    assert cut.text == engine.model.text.decode(whole.token_ids[:2])


def test_without_detokenize_there_is_no_text(engine: LocalEngine) -> None:
    completion = complete(engine, "hello", with_fields(GREEDY, detokenize=False))

    assert (len(completion.token_ids), completion.text) == (8, "")


def test_tokens_without_text_end_their_output_alone(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B030: the tokenizer raises amid an output, with and without stop strings."""
    push = Detokenizer.push

    def raise_at_bad(self: Detokenizer, token_ids: Sequence[TokenId]) -> str:
        if bad in token_ids:
            raise ValueError("invalid prefix")
        return push(self, token_ids)

    bad = complete(engine, "hello", GREEDY).token_ids[3]
    monkeypatch.setattr(Detokenizer, "push", raise_at_bad)

    broken = complete(engine, "hello", GREEDY)
    watched, fine = engine.generate(["hello", "x"], with_fields(GREEDY, stop=("never",), n=1))

    assert (broken.finish, type(broken.error)) == (FinishReason.FAILED, DetokenizerFailed)
    assert (watched.finish, type(watched.error)) == (FinishReason.FAILED, DetokenizerFailed)
    assert (fine.finish, len(fine.token_ids)) == (FinishReason.LENGTH, 8)


@pytest.mark.parametrize("mode", LogprobsMode)
def test_a_token_among_the_likeliest_is_told_there_alike(engine: LocalEngine, mode: LogprobsMode) -> None:
    sampling = with_fields(SEEDED, logprobs=5, logprobs_mode=mode, max_tokens=20, temperature=0.7, top_k=3)
    completion = complete(engine, "hello", sampling)

    assert [place.token_ids[0] for place in completion.logprobs] == list(completion.token_ids)
    for place in completion.logprobs:
        assert place.ranks[1:] == (1, 2, 3, 4, 5)
        assert list(place.logprobs[1:]) == sorted(place.logprobs[1:], reverse=True)
        assert all(value <= 0 for value in place.logprobs)
        if place.ranks[0] <= 5:
            assert place.token_ids[place.ranks[0]] == place.token_ids[0]
            assert place.logprobs[place.ranks[0]] == place.logprobs[0]
        if mode is LogprobsMode.PROCESSED:
            assert sum(math.exp(value) for value in place.logprobs[1:4]) == pytest.approx(1.0, abs=1e-5)
            assert place.logprobs[4:] == (-math.inf, -math.inf)


def test_without_others_each_token_is_told_alone(engine: LocalEngine) -> None:
    completion = complete(engine, "hello", with_fields(GREEDY, logprobs=0))

    assert [place.token_ids for place in completion.logprobs] == [(each,) for each in completion.token_ids]
    assert [place.ranks for place in completion.logprobs] == [(1,)] * 8


def test_a_prompt_is_told_alike_however_it_is_cut_into_chunks() -> None:
    sampling = with_fields(GREEDY, prompt_logprobs=3)
    with make_engine(max_step_tokens=16) as engine:
        chunked = complete(engine, PROMPT, sampling)
        again = complete(engine, PROMPT, sampling)  # its blocks are cached by now, and not read
    with make_engine(max_step_tokens=256) as engine:
        whole = complete(engine, PROMPT, sampling)

    assert [place.token_ids[0] for place in whole.prompt_logprobs] == PROMPT[1:]
    assert chunked.prompt_logprobs == whole.prompt_logprobs
    assert again.prompt_logprobs == whole.prompt_logprobs
    assert chunked.token_ids == whole.token_ids


def test_a_prompt_is_told_with_the_first_of_several_outputs(engine: LocalEngine) -> None:
    completion = complete(engine, "hello", with_fields(SEEDED, n=2, prompt_logprobs=0))

    assert completion.prompt_logprobs
    assert completion.others[0].prompt_logprobs == ()


def test_a_conversation_is_answered(engine: LocalEngine) -> None:
    conversation = [ChatMessage(role="user", content="hello")]
    prompt = engine.model.text.encode_chat([{"role": "user", "content": "hello"}])

    (completion,) = engine.chat([conversation], GREEDY)

    assert completion.token_ids == complete(engine, prompt, GREEDY).token_ids


def test_what_is_wrong_with_a_request_is_told_with_every_field(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequest) as raised:
        engine.add_request("", "hello", with_fields(GREEDY, top_p=2.0, stop=("",), min_tokens=9))

    assert [violation.field for violation in raised.value.violations] == [
        "sampling.top_p",
        "sampling.stop",
        "sampling.min_tokens",
    ]


def test_a_name_with_the_mark_of_further_outputs_is_nobody_s_to_give(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.add_request(RequestId("a·1"), "hello", GREEDY)
