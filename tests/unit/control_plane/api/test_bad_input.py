"""Bad input gets a clear answer, and the next call works."""

import time
from collections.abc import Callable

import grpc
import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.api.config import ServerConfig
from plugins.errors import DuplicateRequest, InvalidRequest, UnknownModel
from plugins.types import FinishReason, RequestId, TokenId
from protos.common.v1.common_pb2 import SamplingParams
from protos.inference.v1.inference_pb2 import (
    CancelRequest,
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    GetModelRequest,
    ListModelsRequest,
    TokenIds,
    TokenizeRequest,
)
from protos.status import from_rpc_error
from tests.unit.control_plane.admission.models import served_model
from tests.unit.control_plane.api.running import Running, running
from tests.unit.control_plane.text.byte_level import bundle, byte

NAN, INFINITY = float("nan"), float("inf")


def sampling(**fields: float) -> GenerateRequest:
    return GenerateRequest(text="a", sampling=SamplingParams(**fields))  # type: ignore[arg-type]  # names of number fields


def chat(*messages: tuple[str, str]) -> GenerateRequest:
    return GenerateRequest(chat=Chat(messages=[ChatMessage(role=role, content=text) for role, text in messages]))


async def answer(run: Running, request: GenerateRequest) -> grpc.aio.AioRpcError:
    """The status of a request that is refused, after which another one is served."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in run.inference.Generate(request):
            pass
    await probe(run)
    return raised.value


async def probe(run: Running) -> None:
    """A good request gets its answer."""
    run.engine.answer = [([TokenId(2)], FinishReason.STOP, None)]
    responses = [response async for response in run.inference.Generate(GenerateRequest(text="a", model="small"))]
    assert [response.usage.output_tokens for response in responses] == [1]


@pytest.mark.parametrize(
    ("request_message", "field", "reason"),
    [
        pytest.param(GenerateRequest(), "input", "REQUIRED", id="no input"),
        pytest.param(GenerateRequest(text=""), "text", "EMPTY_PROMPT", id="an empty text"),
        pytest.param(GenerateRequest(tokens=TokenIds()), "tokens.ids", "EMPTY_PROMPT", id="no tokens"),
        pytest.param(GenerateRequest(chat=Chat()), "chat.messages", "EMPTY_PROMPT", id="no messages"),
        pytest.param(chat(*[("", "")] * 128), "chat.messages", "PROMPT_TOO_LONG", id="more messages than tokens"),
        pytest.param(chat(("", "a")), "chat.messages[0].role", "INVALID_ROLE", id="an empty role"),
        pytest.param(GenerateRequest(text="a" * 128), "text", "PROMPT_TOO_LONG", id="a prompt that is too long"),
        pytest.param(GenerateRequest(text="a" * 20_000), "text", "PROMPT_TOO_LONG", id="one far too long"),
        pytest.param(
            GenerateRequest(tokens=TokenIds(ids=[3, 270])), "tokens.ids", "TOKEN_OUT_OF_VOCABULARY", id="a wrong token"
        ),
        pytest.param(
            GenerateRequest(tokens=TokenIds(ids=[2**32 - 1])), "tokens.ids", "TOKEN_OUT_OF_VOCABULARY", id="2**32 - 1"
        ),
        pytest.param(GenerateRequest(text="a", request_id="a" * 129), "request_id", "TOO_LONG", id="a long id"),
        pytest.param(GenerateRequest(text="a", request_id="a\n"), "request_id", "NOT_PRINTABLE_ASCII", id="an odd id"),
        pytest.param(GenerateRequest(text="a", model="m" * 1_000_000), "model", "TOO_LONG", id="a long model name"),
        pytest.param(sampling(max_tokens=0), "sampling.max_tokens", "OUT_OF_RANGE", id="max_tokens 0"),
        pytest.param(sampling(temperature=NAN), "sampling.temperature", "OUT_OF_RANGE", id="temperature NaN"),
        pytest.param(sampling(temperature=INFINITY), "sampling.temperature", "OUT_OF_RANGE", id="temperature infinite"),
        pytest.param(sampling(temperature=-1), "sampling.temperature", "OUT_OF_RANGE", id="temperature negative"),
        pytest.param(sampling(temperature=101), "sampling.temperature", "OUT_OF_RANGE", id="temperature too high"),
        pytest.param(sampling(top_p=0), "sampling.top_p", "OUT_OF_RANGE", id="top_p 0"),
        pytest.param(sampling(top_p=1.5), "sampling.top_p", "OUT_OF_RANGE", id="top_p above 1"),
        pytest.param(sampling(top_p=NAN), "sampling.top_p", "OUT_OF_RANGE", id="top_p NaN"),
        pytest.param(sampling(min_p=-0.5), "sampling.min_p", "OUT_OF_RANGE", id="min_p negative"),
        pytest.param(sampling(min_p=1.5), "sampling.min_p", "OUT_OF_RANGE", id="min_p above 1"),
        pytest.param(
            GenerateRequest(text="a", sampling=SamplingParams(stop_token_ids=[270])),
            "sampling.stop_token_ids",
            "TOKEN_OUT_OF_VOCABULARY",
            id="a wrong stop token",
        ),
        pytest.param(
            GenerateRequest(text="a", sampling=SamplingParams(stop_token_ids=[270] * 129)),
            "sampling.stop_token_ids",
            "TOO_MANY",
            id="too many stop tokens",
        ),
    ],
)  # fmt: skip
async def test_a_wrong_field_is_named_and_the_next_call_works(
    request_message: GenerateRequest, field: str, reason: str
) -> None:
    async with running() as run:
        error = await answer(run, request_message)

        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        refused = from_rpc_error(error)
        assert isinstance(refused, InvalidRequest)
        assert [(violation.field, violation.reason) for violation in refused.violations] == [(field, reason)]
        assert (await run.metrics.outcomes(2))[0] == "invalid_argument"


async def test_all_wrong_fields_are_told_together() -> None:
    async with running() as run:
        error = await answer(run, GenerateRequest(text="", sampling=SamplingParams(max_tokens=0, top_p=2, min_p=2)))

        refused = from_rpc_error(error)
        assert isinstance(refused, InvalidRequest)
        assert [violation.field for violation in refused.violations] == [
            "sampling.max_tokens",
            "sampling.top_p",
            "sampling.min_p",
            "text",
        ]


async def test_a_text_above_the_configured_bytes_is_refused() -> None:
    async with running(admission=AdmissionConfig(max_prompt_bytes=100)) as run:
        error = await answer(run, GenerateRequest(text="a" * 101))

        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "has 101 bytes; admission.max_prompt_bytes allows 100" in (error.details() or "")


async def test_a_request_that_the_kv_cache_can_never_hold_is_refused_with_the_numbers() -> None:
    async with running(served_model(num_blocks=2)) as run:
        error = await answer(run, GenerateRequest(text="a" * 32))

        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "the prompt has 32 tokens; the whole KV cache holds 32 (2 blocks of 16)" in (error.details() or "")


async def test_a_conversation_for_a_model_without_a_template_is_refused() -> None:
    async with running(served_model(tokenizer=bundle(chat_template=""))) as run:
        error = await answer(run, chat(("user", "a")))

        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "chat.messages: the model has no chat template; send text or tokens"


async def test_an_unknown_model_is_not_found_and_the_served_ones_are_named() -> None:
    async with running(served_model(), served_model("other")) as run:
        error = await answer(run, GenerateRequest(text="a", model="gpt"))

        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert isinstance(from_rpc_error(error), UnknownModel)
        assert error.details() == "model 'gpt' is not served here; served: other, small"


async def test_a_model_must_be_named_when_there_are_several() -> None:
    async with running(served_model(), served_model("other")) as run:
        error = await answer(run, GenerateRequest(text="a"))

        assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_an_id_in_use_is_refused() -> None:
    async with running() as run:
        run.engine.refusal = DuplicateRequest("a")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in run.inference.Generate(GenerateRequest(text="a", request_id="a")):
                pass
        run.engine.refusal = None

        await probe(run)

        assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert await run.metrics.outcomes(2) == ["already_exists", "stop"]


async def test_a_message_of_50_megabytes_is_refused_by_the_transport() -> None:
    async with running() as run:
        error = await answer(run, GenerateRequest(text="a" * 50_000_000))

        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await run.metrics.outcomes() == ["stop"]


async def test_the_largest_message_is_configured() -> None:
    async with running(
        config=ServerConfig(port=0, max_message_mib=1), admission=AdmissionConfig(max_prompt_bytes=99)
    ) as run:
        small = await answer(run, GenerateRequest(text="a" * 1_000_000))
        large = await answer(run, GenerateRequest(text="a" * 1_100_000))

        assert small.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_bytes_that_are_no_message_are_refused() -> None:
    async with running() as run:
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
        call = run.channel.unary_stream("/dihedral.inference.v1.InferenceService/Generate")

        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call(b"\xff\xff\xff\xff"):
                pass

        await probe(run)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        pytest.param(
            lambda run: run.inference.Tokenize(TokenizeRequest()),
            grpc.StatusCode.INVALID_ARGUMENT,
            id="nothing to tokenize",
        ),
        pytest.param(
            lambda run: run.inference.Tokenize(TokenizeRequest(model="gpt", text="a")),
            grpc.StatusCode.NOT_FOUND,
            id="tokenize with an unknown model",
        ),
        pytest.param(
            lambda run: run.inference.Detokenize(DetokenizeRequest(token_ids=[270])),
            grpc.StatusCode.INVALID_ARGUMENT,
            id="detokenize a wrong token",
        ),
        pytest.param(
            lambda run: run.inference.GetModel(GetModelRequest(model="gpt")),
            grpc.StatusCode.NOT_FOUND,
            id="no such model",
        ),
    ],
)
async def test_the_other_calls_refuse_what_is_wrong(
    call: Callable[[Running], grpc.aio.UnaryUnaryCall[object, object]], code: grpc.StatusCode
) -> None:
    async with running() as run:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(run)

        assert raised.value.code() is code


async def test_tokenize_and_detokenize_say_what_generate_would_do() -> None:
    async with running() as run:
        text = await run.inference.Tokenize(TokenizeRequest(text="a<|im_end|>"))
        conversation = await run.inference.Tokenize(
            TokenizeRequest(chat=Chat(messages=[ChatMessage(role="user", content="a")]))
        )
        back = await run.inference.Detokenize(DetokenizeRequest(token_ids=[1, *text.token_ids]))

        assert text.token_ids == [byte(value) for value in b"a<|im_end|>"]
        assert conversation.token_ids[:7] == [1, *(byte(value) for value in b"user\na")]
        assert back.text == "a<|im_end|>"


async def test_models_are_listed_and_described() -> None:
    async with running(served_model(), served_model("other", max_model_len=64)) as run:
        listed = await run.inference.ListModels(ListModelsRequest())
        described = await run.inference.GetModel(GetModelRequest(model="other"))

        assert [model.name for model in listed.models] == ["other", "small"]
        assert (described.model.name, described.model.max_model_len, described.model.vocab_size) == ("other", 64, 270)
        assert described.model.eos_token_ids == [2]


async def test_cancelling_what_is_not_there_succeeds() -> None:
    async with running() as run:
        await run.inference.Cancel(CancelRequest(request_ids=["unknown", ""]))

        await probe(run)


async def test_a_prompt_that_fills_the_context_is_refused_at_once_and_one_below_gets_its_token() -> None:
    """Case B014: a prompt longer than the context hangs its client."""
    async with running(served_model(max_model_len=512)) as run:
        run.engine.answer = [([TokenId(2)], FinishReason.LENGTH, None)]
        fits = GenerateRequest(text="a" * 511, sampling=SamplingParams(max_tokens=1))
        (response,) = [response async for response in run.inference.Generate(fits)]
        started = time.monotonic()
        errors = [await answer(run, GenerateRequest(text="a" * length)) for length in (512, 513, 20_000)]

        assert response.usage.output_tokens == 1
        assert [error.code() for error in errors] == [grpc.StatusCode.INVALID_ARGUMENT] * 3
        assert "the prompt has 512 tokens; this model's context of 512 tokens" in (errors[0].details() or "")
        assert "the prompt has 20000 tokens; this model's context of 512 tokens" in (errors[2].details() or "")
        assert time.monotonic() - started < 3 * 0.2


async def test_no_request_is_admitted_for_more_tokens_than_the_kv_cache_holds() -> None:
    """Case B056: 8 blocks of 16 tokens."""
    async with running(served_model(max_model_len=512, num_blocks=8)) as run:
        run.engine.answer = [([TokenId(2)], FinishReason.LENGTH, None)]
        greedy = GenerateRequest(
            text="a" * 100, request_id="a", sampling=SamplingParams(max_tokens=100, ignore_eos=True)
        )
        async for _ in run.inference.Generate(greedy):
            pass

        error = await answer(run, GenerateRequest(text="a" * 128))

        assert run.engine.requests[RequestId("a")].sampling.max_tokens == 28
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
