"""Constraints that are empty, endless or bombs, as a caller sends them: answered in time, while others stream on."""

import asyncio
import json
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import pytest
from grpc_health.v1 import health_pb2

from control_plane.admission.grammar_child import NICENESS
from control_plane.admission.long_work import NUM_SLOW_THREADS
from plugins.errors import InvalidRequest
from protos.common.v1.common_pb2 import Choice, SamplingParams, StructuredOutput
from protos.inference.v1.inference_pb2 import GenerateRequest, TokenIds
from protos.status import from_rpc_error
from tests.end_to_end.cells import REFERENCE, serving
from tests.end_to_end.clients import Client, questions

REAL: Final = ("--dtype=float32", "--max-model-len=512", "--worker.kv-cache-gib=0.2", "--worker.threads=1")
LIMIT_S: Final = 5.0  # docs/structured_output.md: eight at once
SERVED: Final = {"FINISH_REASON_STOP", "FINISH_REASON_LENGTH"}
COMPLEX: Final = {"GRAMMAR_TOO_COMPLEX"}
TREE: Final = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "additionalProperties": False,
        }
    },
}

logger = logging.getLogger(__name__)


def alternatives(depth: int) -> str:
    """`oneOf` within `oneOf`, so deep: as long as 2**depth."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"oneOf": [schema, {"type": "array", "items": schema}]}
    return json.dumps(schema)


def held(output: StructuredOutput, max_tokens: int = 30) -> GenerateRequest:
    """A drawn output that is to be held to a constraint."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=1, structured_output=output)
    return GenerateRequest(tokens=TokenIds(ids=[5, 6, 7]), sampling=sampling)


async def outcome(client: Client, output: StructuredOutput) -> tuple[str, float]:
    """Ask, and tell the reason of the refusal, or how the answer ended; and how long that took."""
    started_s = time.monotonic()
    try:
        told = (await client.answer(held(output))).finish
    except grpc.aio.AioRpcError as error:
        refused = from_rpc_error(error)
        assert isinstance(refused, InvalidRequest), refused
        (violation,) = refused.violations
        assert violation.field.startswith("sampling.structured_output")
        told = violation.reason
    return told, time.monotonic() - started_s


def share(values: Sequence[float], part: float) -> float:
    """The value that so large a part of them does not exceed."""
    return sorted(values)[int(part * (len(values) - 1))]


@asynccontextmanager
async def busy_processes(number: int) -> AsyncIterator[None]:
    """As many processes as try grammars at once, and as nice: what the machine's load alone costs the streams."""
    program = f"import os; os.nice({NICENESS})\nwhile True: pass"
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-c", program) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            await process.wait()


async def healths(client: Client, work: "asyncio.Future[Any]") -> list[float]:
    """How long each answer of the health service takes while some work goes on, in seconds."""
    took_s: list[float] = []
    while not work.done():
        started_s = time.monotonic()
        await client.health.Check(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
        took_s.append(time.monotonic() - started_s)
        await asyncio.sleep(0.1)
    return took_s


class Readers:
    """Ask for the same streams again and again, and write down what they read and how long they wait for each token."""

    def __init__(self, client: Client, num_streams: int) -> None:
        self.answers: list[set[tuple[int, ...]]] = [set() for _ in range(num_streams)]
        self.gaps_s: list[float] = []  # between two tokens of one stream
        self._client = client
        self._least = 0
        self._are_enough = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._read(request, answers))
            for request, answers in zip(questions(num_streams, 40), self.answers, strict=True)
        ]

    async def gaps(self, least: int) -> list[float]:
        """Wait for so many gaps; take all that there are."""
        self._least = least
        self._are_enough.clear()
        await self._are_enough.wait()
        taken, self.gaps_s = self.gaps_s, []
        return taken

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, request: GenerateRequest, answers: set[tuple[int, ...]]) -> None:
        while True:
            read_s = math.inf

            def note() -> None:
                nonlocal read_s
                now_s = time.monotonic()
                self.gaps_s += [now_s - read_s] if read_s < now_s else []
                read_s = now_s
                if len(self.gaps_s) >= self._least:
                    self._are_enough.set()

            answers.add((await self._client.answer(request, note)).token_ids)


async def test_an_empty_constraint_is_refused_and_one_that_allows_anything_is_served() -> None:
    """B095: each has a meaning that docs/structured_output.md tells."""
    asked = [
        (StructuredOutput(json_schema=""), {"EMPTY"}),
        (StructuredOutput(json_schema="{}"), SERVED),
        (StructuredOutput(json_schema="true"), SERVED),
        (StructuredOutput(json_schema="false"), {"INVALID_GRAMMAR"}),
        (StructuredOutput(json_schema="null"), {"INVALID_GRAMMAR"}),
        (StructuredOutput(regex=""), {"EMPTY"}),
        (StructuredOutput(choice=Choice()), {"REQUIRED"}),
        (StructuredOutput(choice=Choice(texts=[""])), {"EMPTY"}),
        (StructuredOutput(grammar=""), {"EMPTY"}),
        (StructuredOutput(json_object=False), {"REQUIRED"}),
        (StructuredOutput(), {"REQUIRED"}),
    ]
    async with serving() as (_, client):
        outcomes = [(await outcome(client, output))[0] for output, _ in asked]
        [worker] = await client.idle_workers()

    assert [told in expected for told, (_, expected) in zip(outcomes, asked, strict=True)] == [True] * 11, outcomes
    assert worker.num_free_blocks == worker.num_blocks


@pytest.mark.parametrize(
    ("model", "regex_told"),
    [
        pytest.param(REFERENCE, SERVED | COMPLEX, id="272 tokens"),  # few ways to cut a text: time decides
        pytest.param(REAL, COMPLEX, id="49,152 tokens", marks=pytest.mark.long),
    ],
)
async def test_bombs_are_answered_within_the_limit_and_neighbours_stream_on(
    model: tuple[str, ...], regex_told: set[str]
) -> None:
    """B097: eight at once beside four streams. `(a|aa)+b` repeated is none: no automaton is made of it beforehand."""
    every_letter = {"allOf": [{"type": "string", "pattern": f"^.*{letter}.*$"} for letter in "abcdefghijkl"]}
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    bombs = [
        (StructuredOutput(regex="(.{1,1000}){1,1000}z"), regex_told),
        (StructuredOutput(regex="(x{1,200}){1,200}"), regex_told),
        (StructuredOutput(json_schema=json.dumps(every_letter)), COMPLEX),
        (StructuredOutput(json_schema=json.dumps(endless)), COMPLEX),
        (StructuredOutput(json_schema='{"type": "integer", "multipleOf": 999983}'), COMPLEX),
        (StructuredOutput(json_schema="[" * 60_000), COMPLEX),
        (StructuredOutput(json_schema=alternatives(8)), {"UNSUPPORTED_KEYWORD"}),
        (StructuredOutput(json_schema=alternatives(14)), {"TOO_LARGE"}),
    ]
    others = [
        StructuredOutput(regex="(a|aa)+b" * 50),
        StructuredOutput(json_schema=json.dumps(TREE)),
    ]
    async with serving(model=model) as (_, client):
        readers = Readers(client, 4)
        before_s = share(await readers.gaps(least=500), 0.99)
        async with busy_processes(NUM_SLOW_THREADS):
            busy_health_s = await healths(client, asyncio.create_task(asyncio.sleep(3)))
            busy_s = share(await readers.gaps(least=100), 0.99)
        await readers.gaps(least=100)

        asking = asyncio.gather(*(outcome(client, output) for output, _ in bombs))
        health_s = await healths(client, asking)
        during_s = share(await readers.gaps(least=100), 0.99)
        outcomes = await asking
        served = [await outcome(client, output) for output in others]
        await readers.end()

    logger.info(
        "p99 between tokens: %.3f s, beside busy processes %.3f s, beside bombs %.3f s", before_s, busy_s, during_s
    )
    assert [told in expected for (told, _), (_, expected) in zip(outcomes, bombs, strict=True)] == [True] * 8, outcomes
    assert max(took_s for _, took_s in outcomes) < LIMIT_S
    assert {told for told, _ in served} <= SERVED, served
    assert during_s < max(2 * before_s, 2 * busy_s, 0.1)  # a token takes 5 ms, which any other process may double
    assert share(health_s, 0.9) < max(2 * share(busy_health_s, 0.9), 0.1)
    assert max(health_s) < max(2 * max(busy_health_s), 0.5)
    assert [len(answers) for answers in readers.answers] == [1] * 4
