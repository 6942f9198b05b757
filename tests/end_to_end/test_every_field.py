"""Every field with every kind of value, against a real worker: nothing admitted fails, and no neighbour notices."""

import asyncio

import grpc

from plugins.errors import InvalidRequest
from protos.inference.v1.inference_pb2 import GetModelRequest
from protos.status import from_rpc_error
from tests.end_to_end.cells import serving
from tests.end_to_end.clients import Client, load, questions
from tests.unit.control_plane.api.every_field import Row, Served, rows

MODEL = ("--load-format=dummy", "--dtype=float32", "--max-model-len=256", "--worker.kv-cache-gib=0.05")
ALL = (*MODEL, "--worker.threads=1", "--admission.max-n=128")
NUM_AT_ONCE = 8
NUM_NEIGHBOURS = 4


async def judge(client: Client, row: Row) -> str | None:
    """Send one request; tell what is wrong with the answer, None: nothing."""
    expected = None if row.refusal is None else (row.refusal,)
    found = None
    try:
        async for _ in client.inference.Generate(row.request()):
            pass
    except grpc.aio.AioRpcError as error:
        refused = from_rpc_error(error)
        if not isinstance(refused, InvalidRequest):
            return f"{row}: {error.code()} {error.details()}"
        found = tuple((each.field, each.reason) for each in refused.violations)
    return None if found == expected else f"{row}: {found} instead of {expected}"


async def test_every_row_is_served_or_refused_and_no_neighbour_s_tokens_change() -> None:
    """Cases B001, B008, B012, B017, B019, B024: whatever is sent, others read on as if nobody had."""
    async with serving(model=ALL) as (_, client):
        model = (await client.inference.GetModel(GetModelRequest())).model
        served = Served(model.name, model.vocab_size, model.max_model_len, has_grammars=True)
        sent = [row for row in rows(served) if not row.is_unsendable]
        places = asyncio.Semaphore(NUM_AT_ONCE)

        async def ask(row: Row) -> str | None:
            async with places:
                return await judge(client, row)

        async with load(client, questions(NUM_NEIGHBOURS, max_tokens=40)) as neighbours:
            wrong = [each for each in await asyncio.gather(*map(ask, sent)) if each is not None]
            await neighbours.moved()

        await client.holds(num_running=0, num_waiting=0)

    assert not wrong, "\n".join(wrong)
    assert neighbours.num_answers >= NUM_NEIGHBOURS
