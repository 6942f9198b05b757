"""Prompts without tokens, or with next to none, get the same answer each time, and stop nobody else."""

import grpc

from plugins.errors import InvalidRequest
from plugins.types import FinishReason, TokenId
from protos.inference.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, TokenIds
from protos.status import from_rpc_error
from tests.unit.control_plane.api.running import Running, running

NUM_TIMES = 50
ANSWERS = {
    "text": (GenerateRequest(text=""), ("text", "EMPTY_PROMPT")),
    "tokens": (GenerateRequest(tokens=TokenIds()), ("tokens.ids", "EMPTY_PROMPT")),
    "zero width": (GenerateRequest(text="\u200b"), None),  # the bytes of a character are tokens
    "chat": (GenerateRequest(chat=Chat(messages=[ChatMessage(role="user")])), None),  # its template has tokens
    "normal": (GenerateRequest(text="hello"), None),
}


async def answer(run: Running, request: GenerateRequest) -> tuple[str, str] | None:
    """What is wrong with a request; None: it was served."""
    try:
        responses = [response async for response in run.inference.Generate(request)]
    except grpc.aio.AioRpcError as error:
        refused = from_rpc_error(error)
        assert isinstance(refused, InvalidRequest)
        (violation,) = refused.violations
        return violation.field, violation.reason
    assert responses[-1].usage.output_tokens == 1
    return None


async def test_an_empty_prompt_is_refused_each_time_and_normal_calls_go_on() -> None:
    """Case B013: an empty prompt stopped the engine, and every later call failed or hung."""
    async with running() as run:
        run.engine.answer = [([TokenId(3)], FinishReason.LENGTH, None)]

        found = [{name: await answer(run, request) for name, (request, _) in ANSWERS.items()} for _ in range(NUM_TIMES)]

    assert found == [{name: expected for name, (_, expected) in ANSWERS.items()}] * NUM_TIMES
