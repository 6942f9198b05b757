"""The engine in process, with the tiny random model of the worker's own loader."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.local import LocalEngine
from control_plane.engine.outputs import Delivery
from control_plane.scheduling.config import SchedulerConfig
from plugins.errors import DuplicateRequest, EngineClosed, InvalidConfig, InvalidRequest, QueueFull
from plugins.types import FinishReason, RequestId, SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def make_engine(max_waiting: int = 64, **worker: Any) -> LocalEngine:
    tiny: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "num_blocks": 64}
    return LocalEngine(
        scheduler=SchedulerConfig(max_step_tokens=64, max_sequences=4),
        admission=AdmissionConfig(max_waiting=max_waiting),
        **tiny | worker,
    )


def test_prompts_completed_together_say_what_they_say_alone() -> None:
    prompts: list[str | Sequence[int]] = ["hello", "a longer prompt than the first", [1, 2, 3], "x"]
    with make_engine() as engine:
        alone = [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]

        together = engine.generate(prompts, GREEDY)

    assert [completion.token_ids for completion in together] == alone
    assert [completion.finish for completion in together] == [FinishReason.LENGTH] * 4
    assert [len(completion.token_ids) for completion in together] == [6] * 4


def test_more_prompts_than_may_wait_are_completed_in_order() -> None:
    with make_engine(max_waiting=2) as engine:
        completions = engine.generate([[number] for number in range(10)], GREEDY)

        assert [completion.token_ids[:1] for completion in completions] == [
            engine.generate([[number]], GREEDY)[0].token_ids[:1] for number in range(10)
        ]


def test_a_prompt_that_is_refused_leaves_nothing_behind() -> None:
    with make_engine() as engine:
        with pytest.raises(InvalidRequest, match="the prompt has no tokens"):
            engine.generate(["hello", ""], GREEDY)

        (completion,) = engine.generate(["hello"], GREEDY)

        assert completion.finish is FinishReason.LENGTH
        assert len(completion.token_ids) == 6


def test_prompts_are_completed_beside_a_request_that_runs() -> None:
    with make_engine() as engine:
        engine.add_request("other", "hello", SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))

        (completion,) = engine.generate(["hello"], GREEDY)

        assert len(completion.token_ids) == 6
        assert engine.has_work()


def test_a_request_is_driven_step_by_step() -> None:
    with make_engine() as engine:
        engine.add_request("0", "foo", SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        deliveries: list[Delivery] = []
        while engine.has_work():
            deliveries += engine.step()

    assert [(delivery.request_id, len(delivery.token_ids), delivery.finish) for delivery in deliveries] == [
        ("0", 1, None),
        ("0", 1, FinishReason.LENGTH),
    ]


def test_an_interrupted_step_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Future[object], timeout: float | None = None) -> object:
        raise KeyboardInterrupt

    with make_engine() as engine:
        expected = engine.generate(["foo"], GREEDY)[0].token_ids
        engine.add_request("0", "foo", GREEDY)
        engine.step()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Future, "result", interrupted)
            engine.step()
        deliveries: list[Delivery] = []
        while engine.has_work():
            deliveries += engine.step()

    assert sum((delivery.token_ids for delivery in deliveries), ()) == expected


def test_a_cancelled_request_says_so_in_its_last_delivery() -> None:
    with make_engine() as engine:
        request_id = engine.add_request("", "foo", GREEDY)
        engine.cancel(request_id)
        engine.cancel(RequestId("nobody"))

        (delivery,) = engine.step()

    assert (delivery.request_id, delivery.finish) == (request_id, FinishReason.CANCELLED)


def test_bad_requests_are_refused_as_over_the_wire() -> None:
    with make_engine(max_waiting=1) as engine:
        with pytest.raises(InvalidRequest, match="max_tokens"):
            engine.add_request("a", "foo", SamplingParams(max_tokens=0))
        for prompt in ([1.5], [True], ["1"], b"foo"):
            with pytest.raises(InvalidRequest, match="must be a text or whole numbers"):
                engine.add_request("a", prompt, GREEDY)  # type: ignore[arg-type]  # what a caller without types may do
        with pytest.raises(InvalidRequest, match="must be a list of prompts"):
            engine.generate("foo", GREEDY)
        engine.add_request("a", "foo", GREEDY)
        with pytest.raises(DuplicateRequest):
            engine.add_request("a", "foo", GREEDY)
        with pytest.raises(QueueFull):
            engine.add_request("b", "foo", GREEDY)


def test_it_works_for_a_caller_who_has_an_event_loop() -> None:
    async def notebook() -> int:
        with make_engine() as engine:
            return len(engine.generate(["hello"], GREEDY)[0].token_ids)

    assert asyncio.run(notebook()) == 6


def test_closing_twice_is_closing_once_and_a_closed_engine_says_so() -> None:
    engine = make_engine()
    engine.close()
    engine.close()

    with pytest.raises(EngineClosed, match="the engine is closed; make another one"):
        engine.add_request("a", "foo", GREEDY)
    with pytest.raises(EngineClosed, match="the engine is closed; make another one"):
        engine.step()


@pytest.mark.parametrize(
    ("worker", "told"),
    [({"modle": "x"}, r"modle.*model"), ({"threads": "many"}, "threads"), ({"threads": 0}, "threads")],
)
def test_a_wrong_key_is_named_with_its_nearest_and_a_wrong_value_with_its_key(
    worker: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidConfig, match=told):
        LocalEngine(scheduler=None, admission=None, **worker)
