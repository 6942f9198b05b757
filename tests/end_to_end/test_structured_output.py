"""Grammars in real processes: bombs harm nobody, wrong ones are told at once, and a killed worker changes no token."""

import asyncio
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import grpc
import jsonschema
from grpc_health.v1 import health_pb2

from control_plane.cli.demo import children
from plugins.errors import InvalidRequest
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from protos.status import from_rpc_error
from tests.end_to_end.cells import serving
from tests.end_to_end.clients import Client, ask, load, questions
from tests.end_to_end.processes import ended, watch

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{200,300}$"},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 50},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


def held(seed: int = 1, max_tokens: int = 1000, **constraint: Any) -> inference_pb2.GenerateRequest:
    """A drawn output that is to be held to a constraint."""
    sampling = common_pb2.SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0,
        seed=seed,
        structured_output=common_pb2.StructuredOutput(**constraint),
    )
    return inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[5, 6, 7]), sampling=sampling)


async def refusal(client: Client, request: inference_pb2.GenerateRequest) -> str:
    """Ask, and tell the reason of the violation, or how the answer ended."""
    try:
        answer = await client.answer(request)
    except grpc.aio.AioRpcError as error:
        refused = from_rpc_error(error)
        assert isinstance(refused, InvalidRequest), refused
        return refused.violations[0].reason
    return answer.finish


async def timed(asking: Awaitable[str]) -> tuple[str, float]:
    started_s = time.monotonic()
    return await asking, time.monotonic() - started_s


def slow(number: int) -> inference_pb2.GenerateRequest:
    """A schema that takes seconds and hundreds of MB to read, of which no two are alike."""
    return held(json_schema=json.dumps({"type": "integer", "multipleOf": 999_983 + 2 * number}))


async def test_what_is_no_grammar_is_told_at_once_and_every_other_request_goes_on() -> None:
    """B093, B095: regex, grammar and schema that nobody can read; none of them ends anything."""
    wrong: dict[str, list[Any]] = {
        "regex": ["[", "(?P<", "*a", "\\", ""],
        "grammar": ["start: b", "", "not a grammar"],
        "json_schema": ["not json", '{"type": "not-a-type"}', "", "null", "false", '{"enum": ["' + "x" * 5_000_000],
        "json_object": [False],
        "choice": [common_pb2.Choice(), common_pb2.Choice(texts=[""])],
    }
    requests = [held(**{kind: value}) for kind, values in wrong.items() for value in values]
    async with serving() as (_, client):
        answer = await client.answer(ask([5, 6, 7], 20))
        await refusal(client, held(regex="("))  # the first one starts a process

        refusals = [await timed(refusal(client, request)) for request in requests]
        again = await client.answer(ask([5, 6, 7], 20))
        [worker] = await client.idle_workers()

    reasons = Counter(reason for reason, _ in refusals)
    assert reasons.keys() == {"INVALID_GRAMMAR", "EMPTY", "REQUIRED", "TOO_LARGE"}
    assert sorted(took_s for _, took_s in refusals)[len(requests) // 2] < 0.2
    assert again == answer
    assert worker.num_free_blocks == worker.num_blocks


async def test_schemas_that_take_long_to_read_are_refused_in_time_while_others_stream_on() -> None:
    """B097: eight at once beside four streams; each is answered within 5 s, and health within 0.5 s."""
    async with serving() as (_, client), load(client, questions(4, 200)) as clients:
        reading = asyncio.gather(*(timed(refusal(client, slow(number))) for number in range(8)))
        answered_s: list[float] = []
        while not reading.done():
            started_s = time.monotonic()
            await client.health.Check(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
            answered_s.append(time.monotonic() - started_s)
            await asyncio.sleep(0.1)
        await clients.moved()
        refusals = await reading

    assert [reason for reason, _ in refusals] == ["GRAMMAR_TOO_COMPLEX"] * 8
    assert max(took_s for _, took_s in refusals) < 5.0
    assert len(answered_s) > 5
    assert max(answered_s) < 0.5


async def test_callers_that_leave_make_room_for_grammars_of_others() -> None:
    """B097: forty slow schemas are asked for, and everybody goes away."""
    async with serving() as (_, client):
        leaving = [asyncio.create_task(refusal(client, slow(number))) for number in range(40)]
        await asyncio.sleep(0.5)

        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        finish, took_s = await timed(refusal(client, held(regex="[ab]{3}")))

    assert finish == "FINISH_REASON_STOP"
    assert took_s < 8.0  # 32 s, if they were all read


async def test_a_worker_that_is_killed_in_the_middle_of_a_value_changes_no_token_of_it() -> None:
    request = held(json_schema=json.dumps(SCHEMA))
    async with serving() as (server, client):
        worker_pid = server.worker_pid()  # while it is the only child
        undisturbed = await client.answer(request)
        num_messages = itertools.count(1)

        def kill_once() -> None:
            if next(num_messages) == 100:
                os.kill(worker_pid, signal.SIGKILL)

        answer = await client.answer(request, kill_once)

    assert answer == undisturbed
    assert answer.finish == "FINISH_REASON_STOP"
    jsonschema.validate(json.loads(answer.text), SCHEMA)


async def test_nothing_is_left_of_the_processes_that_read_grammars() -> None:
    async with serving() as (server, client):
        worker_pid = server.worker_pid()
        await refusal(client, held(regex="[ab]{3}"))
        reading = [pid for pid in children(server.process.pid) if pid != worker_pid]
        watched = [watch(pid) for pid in reading]

        server.process.kill()
        await server.process.wait()
        for process in watched:
            await ended(process)

    assert len(reading) == 1
