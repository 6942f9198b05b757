"""What a client of Generate sees of several outputs, of stops, of messages of several tokens."""

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.text.detokenizer import Detokenizer
from plugins.errors import DetokenizerFailed, StepFailed
from plugins.noise import child_seed
from plugins.types import FinishReason, RequestId, TokenId
from protos.common.v1 import common_pb2
from protos.inference.v1.inference_pb2 import GenerateRequest, GenerateResponse, Usage
from protos.status import from_rpc_error
from tests.unit.control_plane.api.running import Running, running
from tests.unit.control_plane.text.byte_level import byte, merged

HELLO, PARIS, EOS = merged("hello"), merged(" Paris"), TokenId(2)
LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP


def asked(request_id: str = "mine", *, max_queue_time_s: float | None = None, **sampling: object) -> GenerateRequest:
    parameters = common_pb2.SamplingParams(**sampling)  # type: ignore[arg-type]  # names of fields
    return GenerateRequest(text="hello", request_id=request_id, sampling=parameters, max_queue_time_s=max_queue_time_s)


async def started(run: Running, request: GenerateRequest) -> "asyncio.Task[list[GenerateResponse]]":
    """Call, and wait until the engine has the request; the task has all responses."""
    run.engine.submitted.clear()

    async def collect() -> list[GenerateResponse]:
        return [response async for response in run.inference.Generate(request)]

    call = asyncio.create_task(collect())
    await run.engine.submitted.wait()
    return call


def letters(text: str) -> list[TokenId]:
    """A token for each character."""
    return [byte(value) for value in text.encode()]


async def answer(run: Running, request: GenerateRequest, *puts: Sequence[int]) -> list[GenerateResponse]:
    """Have these tokens come one message after another, the last of them with the end at max_tokens."""
    call = await started(run, request)
    for number, token_ids in enumerate(puts, start=1):
        if not run.engine.streams[RequestId("mine")].is_ended:
            run.engine.put("mine", token_ids, FinishReason.LENGTH if number == len(puts) else None)
            await run.engine.taken("mine")  # so that the next ones are not merged with these
    return await call


async def test_several_outputs_come_as_they_are_made_each_with_its_index_and_its_end() -> None:
    async with running() as run:
        run.engine.num_cached_tokens = 1
        call = run.inference.Generate(asked(n=3))
        await run.engine.submitted.wait()
        seen: list[GenerateResponse] = []
        for name, token_ids, finish in (
            ("mine·2", [HELLO], None),
            ("mine", [PARIS], None),
            ("mine·1", [HELLO, HELLO], FinishReason.LENGTH),
            ("mine·2", [EOS], FinishReason.STOP),
            ("mine", [PARIS, EOS], FinishReason.STOP),
        ):
            run.engine.put(name, token_ids, finish)
            response = await call.read()
            assert isinstance(response, GenerateResponse)
            seen.append(response)

        assert await call.read() is grpc.aio.EOF
        assert seen == [
            GenerateResponse(request_id="mine", index=2, token_ids=[HELLO], text="hello"),
            GenerateResponse(index=0, token_ids=[PARIS], text=" Paris"),
            GenerateResponse(index=1, token_ids=[HELLO, HELLO], text="hellohello", finish_reason=LENGTH),
            GenerateResponse(index=2, token_ids=[EOS], finish_reason=STOP),
            GenerateResponse(
                index=0,
                token_ids=[PARIS, EOS],
                text=" Paris",
                finish_reason=STOP,
                usage=Usage(prompt_tokens=1, output_tokens=7, cached_tokens=1),
            ),
        ]
        assert run.engine.cancelled == []


async def test_the_engine_gets_n_requests_with_a_seed_each_and_the_first_one_leads() -> None:
    async with running() as run:
        call = await started(run, asked(n=2, seed=11))
        for name in ("mine", "mine·1"):
            run.engine.put(name, [HELLO], FinishReason.LENGTH)
        await call

        first, second = run.engine.requests.values()
        assert (first.request_id, first.sibling_of, first.sampling.seed) == ("mine", None, child_seed(11, 0))
        assert (second.request_id, second.sibling_of, second.sampling.seed) == ("mine·1", "mine", child_seed(11, 1))


async def test_several_outputs_are_one_request_in_the_figures() -> None:
    async with running() as run:
        call = await started(run, asked(n=2))
        run.engine.put("mine", [HELLO], None)
        run.engine.put("mine·1", [HELLO, EOS], FinishReason.STOP)
        run.engine.put("mine", [HELLO], FinishReason.LENGTH)
        await call

        assert await run.metrics.outcomes() == ["length"]
        assert ("dihedral_prompt_tokens_total", 1, ()) in run.metrics.counts
        assert ("dihedral_request_output_tokens", 4, ()) in run.metrics.observations
        assert [name for name, _, _ in run.metrics.observations].count("dihedral_time_to_first_token_seconds") == 1


async def test_outputs_that_all_stop_are_a_request_that_stopped() -> None:
    async with running() as run:
        call = await started(run, asked(n=2))
        for name in ("mine", "mine·1"):
            run.engine.put(name, [EOS], FinishReason.STOP)
        await call

        assert await run.metrics.outcomes() == ["stop"]


async def test_time_between_tokens_is_that_between_tokens_of_one_output() -> None:
    # The clock is read at the start of the server, at arrival, at each delivery and at the end.
    async with running(clock=[0.0, 10.0, 10.5, 10.75, 11.0, 12.0, 12.0]) as run:
        call = run.inference.Generate(asked(n=2))
        await run.engine.submitted.wait()
        for name, finish in (("mine", None), ("mine·1", None), ("mine", FinishReason.LENGTH)):
            run.engine.put(name, [HELLO], finish)
            await call.read()
        run.engine.put("mine·1", [HELLO], FinishReason.LENGTH)
        await call.read()
        await run.metrics.outcomes()

        gaps = [value for name, value, _ in run.metrics.observations if name == "dihedral_inter_token_latency_seconds"]
        assert gaps == [0.5, 1.25]


async def test_the_error_of_one_output_ends_the_call_and_the_others() -> None:
    async with running() as run:
        call = run.inference.Generate(asked(n=3))
        await run.engine.submitted.wait()
        run.engine.put("mine·1", [HELLO], FinishReason.FAILED, StepFailed("NAN_LOGITS", "the scores are no numbers"))

        response = await call.read()

        assert response == GenerateResponse(request_id="mine", index=1, token_ids=[HELLO], text="hello")
        assert (await call.code(), await call.details()) == (grpc.StatusCode.INTERNAL, "the scores are no numbers")
        await run.engine.cancel_seen.wait()
        assert run.engine.cancelled == ["mine"]
        assert all(stream.is_ended for stream in run.engine.streams.values())
        assert await run.metrics.outcomes() == ["internal"]


async def test_dropping_the_call_cancels_all_outputs() -> None:
    """Case B046: a caller of several outputs goes away."""
    async with running() as run:
        call = run.inference.Generate(asked(n=4))
        await run.engine.submitted.wait()
        run.engine.put("mine·3", [HELLO])
        await call.read()

        call.cancel()
        await run.engine.cancel_seen.wait()

        assert run.engine.cancelled == ["mine"]
        assert all(stream.is_ended for stream in run.engine.streams.values())
        assert await run.metrics.outcomes() == ["cancelled"]


async def test_many_outputs_at_once_keep_their_own_order() -> None:
    async with running() as run:
        call = await started(run, asked(n=16))
        for number in range(10):
            for name in run.engine.streams:
                run.engine.put(name, [byte(ord("a") + number)], FinishReason.LENGTH if number == 9 else None)
            await asyncio.sleep(0)

        responses = await call

        for index in range(16):
            assert "".join(each.text for each in responses if each.index == index) == "abcdefghij"
        assert [bool(each.request_id) for each in responses] == [True] + [False] * (len(responses) - 1)
        assert [each.HasField("usage") for each in responses] == [False] * (len(responses) - 1) + [True]
        assert responses[-1].usage.output_tokens == 160


async def test_a_stop_string_is_told_and_no_part_of_it_is_sent() -> None:
    """Case B032: the start of a stop string is held back until it is known to be none."""
    async with running() as run:
        responses = await answer(run, asked(stop=["DEFGHI", "C D"]), *([each] for each in letters("ABC DEF GHI")))

        assert [response.text for response in responses] == ["A", "B", "", "", ""]
        assert [token_id for response in responses for token_id in response.token_ids] == letters("ABC D")
        assert responses[-1].stop_string == "C D"
        assert responses[-1].finish_reason == STOP
        assert responses[-1].usage.output_tokens == 5
        assert await run.metrics.outcomes() == ["stop"]


async def test_the_text_keeps_the_stop_string_if_that_is_asked_for() -> None:
    async with running() as run:
        responses = await answer(run, asked(stop=["C D"], include_stop_str_in_output=True), letters("ABC DEF"))

        assert "".join(response.text for response in responses) == "ABC D"


@pytest.mark.parametrize(
    ("last", "finish", "told"),
    [
        pytest.param([EOS], FinishReason.STOP, None, id="the model's end"),
        pytest.param([9], FinishReason.STOP, 9, id="a stop token"),
        pytest.param([], FinishReason.LENGTH, None, id="max_tokens"),
    ],
)
async def test_a_tail_that_was_held_back_comes_with_the_end(
    last: list[int], finish: FinishReason, told: int | None
) -> None:
    """Case B034: text that could have become a stop string is delivered when the output ends without it."""
    async with running() as run:
        call = await started(run, asked(stop=["STOP"], stop_token_ids=[9]))
        run.engine.put("mine", letters("xSTO"))
        await run.engine.taken("mine")
        run.engine.put("mine", last, finish)

        responses = await call

        assert "".join(response.text for response in responses) == "xSTO"
        assert responses[-1].text == "STO"
        assert responses[-1].usage.output_tokens == 4 + len(last)
        assert not responses[-1].HasField("stop_string")
        assert (responses[-1].stop_token_id if responses[-1].HasField("stop_token_id") else None) == told


async def test_a_stop_token_has_no_text_unless_that_is_asked_for() -> None:
    async with running() as run:
        texts = []
        for keeps in (False, True):
            call = await started(run, asked(stop_token_ids=[PARIS], include_stop_str_in_output=keeps))
            run.engine.put("mine", [HELLO, PARIS], FinishReason.STOP)
            (response,) = await call
            texts.append((response.text, response.stop_token_id))

        assert texts == [("hello", PARIS), ("hello Paris", PARIS)]


async def test_only_requests_with_stop_strings_are_watched() -> None:
    async with running() as run:
        for name, stop in (("without", []), ("with", ["x"])):
            call = await started(run, asked(name, stop=stop))
            run.engine.put(name, [HELLO], FinishReason.LENGTH)
            await call

        assert run.engine.watchers[RequestId("without")] is None
        assert run.engine.watchers[RequestId("with")] is not None


async def test_an_emoji_of_several_tokens_comes_whole() -> None:
    """Case B027: no delta has a replacement character."""
    text = "👩\u200d👩\u200d👧 ok ďábel 한국어 🇫🇷"
    async with running() as run:
        responses = await answer(run, asked(), *([each] for each in letters(text)))

        assert "".join(response.text for response in responses) == text
        assert not any("\ufffd" in response.text for response in responses)


@pytest.mark.parametrize("text", [" Paris is", "Paris", "  two spaces", "\n\n x"])
async def test_a_first_space_is_kept(text: str) -> None:
    """Case B038: streamed, at once, and as the ids decode."""
    async with running() as run:
        streamed = await answer(run, asked(), *([each] for each in letters(text)))
        whole = await answer(run, asked(), letters(text))

        assert "".join(response.text for response in streamed) == text
        assert "".join(response.text for response in whole) == text


async def test_special_tokens_have_text_if_that_is_asked_for() -> None:
    async with running() as run:
        texts = [
            "".join(
                each.text for each in await answer(run, asked(skip_special_tokens=skip), [HELLO, TokenId(1), HELLO])
            )
            for skip in (True, False)
        ]

        assert texts == ["hellohello", "hello<|im_start|>hello"]


async def test_without_detokenize_there_are_tokens_and_no_text() -> None:
    async with running() as run:
        responses = await answer(run, asked(detokenize=False), [HELLO], [HELLO])

        assert [(list(response.token_ids), response.text) for response in responses] == [([HELLO], ""), ([HELLO], "")]


async def test_a_response_has_as_many_tokens_as_the_interval_but_for_the_last() -> None:
    async with running() as run:
        puts = [[each] for each in letters("abcdefgh")]
        responses = await answer(run, asked(stream_interval=3), *puts)

        assert [response.text for response in responses] == ["abc", "def", "gh"]
        assert [len(response.token_ids) for response in responses] == [3, 3, 2]
        assert responses[-1].usage.output_tokens == 8


async def test_what_an_interval_held_back_comes_before_the_error() -> None:
    async with running() as run:
        call = run.inference.Generate(asked(stream_interval=10))
        await run.engine.submitted.wait()
        run.engine.put("mine", [HELLO])
        await run.engine.taken("mine")
        run.engine.put("mine", [HELLO], FinishReason.FAILED, StepFailed("NAN_LOGITS", "the scores are no numbers"))

        response = await call.read()

        assert response == GenerateResponse(request_id="mine", token_ids=[HELLO, HELLO], text="hellohello")
        assert await call.code() is grpc.StatusCode.INTERNAL


async def test_tokens_that_cannot_be_turned_into_text_end_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B030: the tokenizer raises amid an output."""

    def raise_at_9(self: Detokenizer, token_ids: Sequence[TokenId]) -> str:
        if 9 in token_ids:
            raise ValueError("invalid prefix: secret")
        return "x" * len(token_ids)

    monkeypatch.setattr(Detokenizer, "push", raise_at_9)
    async with running() as run:
        broken, other = await started(run, asked("broken")), await started(run, asked("other"))
        for name in ("broken", "other"):
            run.engine.put(name, [HELLO])
        run.engine.put("broken", [9])
        run.engine.put("other", [HELLO], FinishReason.LENGTH)

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await broken
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert raised.value.details() == "the output could not be turned into text: the tokenizer raised ValueError"
        assert isinstance(from_rpc_error(raised.value), DetokenizerFailed)
        assert run.engine.cancelled == ["broken"]
        assert "".join(response.text for response in await other) == "xx"


async def test_the_caller_may_shorten_its_wait_and_not_lengthen_it() -> None:
    async with running(admission=AdmissionConfig(max_queue_s=30.0)) as run:
        for limit_s in (None, 5.0, 60.0):
            call = await started(run, asked(max_queue_time_s=limit_s))
            run.engine.put("mine", [HELLO], FinishReason.LENGTH)
            await call

        assert run.engine.max_queues == [30.0, 5.0, 30.0]
