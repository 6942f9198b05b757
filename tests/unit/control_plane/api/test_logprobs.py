"""What a client of Generate is told of tokens besides themselves: log-probabilities, and the prompt."""

import asyncio
from collections.abc import Sequence

from plugins.types import FinishReason, TokenId, TokenLogprobs
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from protos.inference.v1.inference_pb2 import GenerateRequest, GenerateResponse, PromptPart
from tests.unit.control_plane.admission.models import served_model
from tests.unit.control_plane.api.running import Running, running
from tests.unit.control_plane.text.byte_level import merged

HELLO, PARIS = merged("hello"), merged(" Paris")
LENGTH = common_pb2.FINISH_REASON_LENGTH


def asked(prompt: Sequence[int] = (5, 6, 7), *, echo: bool = False, **sampling: object) -> GenerateRequest:
    parameters = common_pb2.SamplingParams(**sampling)  # type: ignore[arg-type]  # names of fields
    tokens = inference_pb2.TokenIds(ids=prompt)
    return GenerateRequest(tokens=tokens, request_id="mine", sampling=parameters, echo=echo)


async def started(run: Running, request: GenerateRequest) -> "asyncio.Task[list[GenerateResponse]]":
    """Call, and wait until the engine has the request; the task has all responses."""
    run.engine.submitted.clear()

    async def collect() -> list[GenerateResponse]:
        return [response async for response in run.inference.Generate(request)]

    call = asyncio.create_task(collect())
    await run.engine.submitted.wait()
    return call


def place(token_id: int, num_others: int = 1) -> TokenLogprobs:
    """What is told of one token: it has rank 2, the others come behind it."""
    others = range(num_others)
    return TokenLogprobs(
        token_ids=(TokenId(token_id), *map(TokenId, others)),
        logprobs=(-1.5, *(-0.5 * (other + 1) for other in others)),
        ranks=(2, *(other + 1 for other in others)),
    )


def told(token_id: int) -> inference_pb2.TokenLogprobs:
    """`place(token_id)` as a message."""
    return inference_pb2.TokenLogprobs(token_ids=[token_id, 0], logprobs=[-1.5, -0.5], ranks=[2, 1])


async def test_each_token_comes_with_its_log_probabilities() -> None:
    async with running() as run:
        call = await started(run, asked(logprobs=1))
        run.engine.put("mine", [HELLO], logprobs=[place(HELLO)])
        await run.engine.taken("mine")
        run.engine.put("mine", [PARIS, HELLO], FinishReason.LENGTH, logprobs=[place(PARIS), place(HELLO)])

        first, second = await call

        assert list(first.logprobs) == [told(HELLO)]
        assert list(second.logprobs) == [told(PARIS), told(HELLO)]


async def test_an_interval_holds_tokens_back_with_their_log_probabilities() -> None:
    async with running() as run:
        call = await started(run, asked(logprobs=1, stream_interval=2))
        for number in range(3):
            run.engine.put("mine", [40 + number], FinishReason.LENGTH if number == 2 else None, None, [place(number)])
            await run.engine.taken("mine")

        first, second = await call

        assert (list(first.token_ids), list(first.logprobs)) == ([40, 41], [told(0), told(1)])
        assert (list(second.token_ids), list(second.logprobs)) == ([42], [told(2)])


async def test_what_nobody_read_for_long_comes_in_messages_of_256_tokens() -> None:
    async with running(served_model(max_model_len=1000)) as run:
        call = await started(run, asked(logprobs=20))
        run.engine.put("mine", [HELLO] * 600, FinishReason.LENGTH, logprobs=[place(HELLO, 20)] * 600)

        responses = await call

        assert [len(response.token_ids) for response in responses] == [256, 256, 88]
        assert [len(response.logprobs) for response in responses] == [256, 256, 88]
        assert [response.finish_reason for response in responses] == [0, 0, LENGTH]
        assert "".join(response.text for response in responses) == "hello" * 600
        assert responses[-1].usage.output_tokens == 600


async def test_what_is_told_of_very_many_tokens_each_comes_in_small_messages() -> None:
    async with running() as run:
        call = await started(run, asked(logprobs=1))
        run.engine.put("mine", [HELLO] * 5, FinishReason.LENGTH, logprobs=[place(HELLO, 30_000)] * 5)

        responses = await call

        assert [len(response.logprobs) for response in responses] == [2, 2, 1]
        assert max(response.ByteSize() for response in responses) < 2**20


async def test_the_prompt_is_told_before_the_first_token_in_pieces() -> None:
    """Case B021: a long prompt is told in messages far below their limit."""
    async with running(served_model(max_model_len=1000)) as run:
        call = await started(run, asked([5] * 500, prompt_logprobs=1))
        run.engine.put("mine", [], prompt_logprobs=[place(number) for number in range(1, 300)])
        await run.engine.taken("mine")
        run.engine.put(
            "mine", [HELLO], FinishReason.LENGTH, prompt_logprobs=[place(number) for number in range(300, 500)]
        )

        *parts, last = await call

        assert [(part.prompt.start, len(part.prompt.logprobs)) for part in parts] == [(1, 256), (257, 43), (300, 200)]
        assert [each.token_ids[0] for part in parts for each in part.prompt.logprobs] == list(range(1, 500))
        assert [part.request_id for part in parts] == ["mine", "", ""]
        assert (last.text, last.HasField("prompt")) == ("hello", False)


async def test_echo_tells_the_prompt_first_and_once() -> None:
    async with running() as run:
        call = await started(run, asked([HELLO, PARIS], echo=True, n=2))
        run.engine.put("mine·1", [HELLO], FinishReason.LENGTH)
        await run.engine.taken("mine·1")
        run.engine.put("mine", [PARIS], FinishReason.LENGTH)

        responses = await call

        assert [each.prompt for each in responses if each.HasField("prompt")] == [
            PromptPart(token_ids=[HELLO, PARIS], text="hello Paris")
        ]
        assert [(each.index, each.text) for each in responses if not each.HasField("prompt")] == [
            (1, "hello"),
            (0, " Paris"),
        ]


async def test_echo_without_detokenize_has_no_text() -> None:
    async with running() as run:
        call = await started(run, asked([HELLO], echo=True, detokenize=False))
        run.engine.put("mine", [PARIS], FinishReason.LENGTH)

        first, _ = await call

        assert first == GenerateResponse(request_id="mine", prompt=PromptPart(token_ids=[HELLO]))


async def test_echo_has_the_text_of_special_tokens_if_that_is_asked_for() -> None:
    async with running() as run:
        texts = []
        for skip in (True, False):
            call = await started(run, asked([HELLO, 1], echo=True, skip_special_tokens=skip))
            run.engine.put("mine", [PARIS], FinishReason.LENGTH)
            texts.append((await call)[0].prompt.text)

        assert texts == ["hello", "hello<|im_start|>"]


async def test_a_long_prompt_is_echoed_in_pieces_that_are_the_whole() -> None:
    async with running(served_model(max_model_len=100_000, num_blocks=10_000)) as run:
        call = await started(run, asked([HELLO] * 70_000, echo=True))
        run.engine.put("mine", [PARIS], FinishReason.LENGTH)

        *parts, _ = await call

        assert [len(part.prompt.text) for part in parts] == [65_536, 65_536, 65_536, 65_536, 65_536, 22_320]
        assert "".join(part.prompt.text for part in parts) == "hello" * 70_000
        assert [token_id for part in parts for token_id in part.prompt.token_ids] == [HELLO] * 70_000
