"""Every field of a request with every kind of value: served, or refused by its path; never an error of ours."""

from collections import defaultdict
from typing import Any

import grpc
import pytest

from control_plane.admission.extra_args import ExtraArgs
from plugins.builtin.ngram import NgramRepetitionBreaker
from plugins.errors import InvalidRequest
from plugins.logits_loading import load_processors
from plugins.types import FinishReason, TokenId
from protos.inference.v1.inference_pb2 import GenerateResponse
from protos.status import from_rpc_error
from tests.unit.control_plane.api.every_field import BASE, KINDS, Row, Served, kind_of, paths, rows
from tests.unit.control_plane.api.running import Running, running

NAN = float("nan")
ROWS = rows(Served("small", vocab_size=270, max_model_len=128, has_grammars=False))
ELSEWHERE = {"model": {"NUL"}}  # it is the name of no model, which is another answer than that of a row


async def refusal(run: Running, row: Row) -> tuple[tuple[str, str], ...] | None:
    """What is wrong with a request, by field and reason; None: it was served."""
    run.engine.answer = [([TokenId(3)], FinishReason.LENGTH, None)]
    try:
        async for _ in run.inference.Generate(row.request()):
            pass
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{row}: {error.code()} {error.details()}"
        refused = from_rpc_error(error)
        assert isinstance(refused, InvalidRequest), row
        return tuple((each.field, each.reason) for each in refused.violations)
    return None


async def test_every_row_is_served_or_refused_with_the_path_of_its_field() -> None:
    """Cases B001, B008, B012, B017, B019, B021, B024, over the wire."""
    wrong = []

    async with running() as run:
        for row in ROWS:
            if row.is_unsendable:
                continue
            expected = None if row.refusal is None else (row.refusal,)
            found = await refusal(run, row)
            if found != expected:
                wrong.append(f"{row}: {found} instead of {expected}")

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("row", [row for row in ROWS if row.is_unsendable], ids=str)
def test_what_the_runtime_of_protobuf_refuses_is_never_sent(row: Row) -> None:
    with pytest.raises((TypeError, ValueError)):
        row.request()


@pytest.mark.parametrize("model", ["\x00", "m" * 127, "m" * 128])
async def test_a_name_that_no_model_has_is_told_so(model: str) -> None:
    async with running() as run:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await run.inference.Generate(Row("model", "NUL", BASE | {"model": model}).request()).read()

    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert raised.value.details() == f"model {model!r} is not served here; served: small"


@pytest.mark.parametrize("field", ["model", "request_id", "cache_salt", "text"])
async def test_invalid_utf8_is_refused_by_the_runtime_of_protobuf_before_anybody_reads_it(field: str) -> None:
    """The one mistake of a caller whose status is not ours to choose. The server goes on."""
    right = Row(field, "unset", BASE).request()
    broken = Row(field, "wrong type", {field: "QQQQ"}).request().SerializeToString().replace(b"QQQQ", b"a\xff\xfeb")

    async with running() as run:
        run.engine.answer = [([TokenId(3)], FinishReason.LENGTH, None)]
        send: Any = run.channel.unary_stream(
            "/dihedral.inference.v1.InferenceService/Generate", response_deserializer=GenerateResponse.FromString
        )
        with pytest.raises(grpc.aio.AioRpcError, match="bad UTF-8") as raised:
            await send(broken).read()
        answer = [response async for response in run.inference.Generate(right)]

    assert raised.value.code() is grpc.StatusCode.UNKNOWN
    assert [token_id for response in answer for token_id in response.token_ids] == [3]


def test_every_field_has_its_rows() -> None:
    """A field that is new fails here until `every_field.py` says what becomes of its values."""
    tried = defaultdict(set)
    for row in ROWS:
        tried[row.path].add(row.kind)

    missing = {path: sorted(KINDS[kind_of(path)] - tried[path] - ELSEWHERE.get(path, set())) for path in paths()}

    assert {path: kinds for path, kinds in missing.items() if kinds} == {}
    assert set(tried) == set(paths())
    assert "sampling.top_p" in tried and "sampling.structured_output.choice.texts" in tried


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        ({"no_repeat_ngram_size": 3}, None),
        ({"no_repeat_ngram_size": 0}, ("no_repeat_ngram_size", "SCHEMA_VIOLATION")),
        ({"no_repeat_ngram_size": -1}, ("no_repeat_ngram_size", "SCHEMA_VIOLATION")),
        ({"no_repeat_ngram_size": 2.5}, ("no_repeat_ngram_size", "SCHEMA_VIOLATION")),
        ({"no_repeat_ngram_size": 1e300}, ("no_repeat_ngram_size", "SCHEMA_VIOLATION")),
        ({"no_repeat_ngram_size": NAN}, ("no_repeat_ngram_size", "OUT_OF_RANGE")),
        ({"no_repeat_ngram_size": "3"}, ("no_repeat_ngram_size", "SCHEMA_VIOLATION")),
        ({"no_repeat_ngram_size": True}, ("no_repeat_ngram_size", "SCHEMA_VIOLATION")),
        ({"no_repeat_ngram_size": None}, ("no_repeat_ngram_size", "SCHEMA_VIOLATION")),
        ({"no_repeat_ngram_size": [3]}, ("no_repeat_ngram_size", "SCHEMA_VIOLATION")),
        ({"no_repeat_ngram_size": {"a": 3}}, ("no_repeat_ngram_size", "SCHEMA_VIOLATION")),
        ({"no_repeat_ngram_sizes": 3}, ("no_repeat_ngram_sizes", "UNKNOWN_ARGUMENT")),
    ],
)
async def test_an_argument_of_a_processor_is_refused_by_its_path(
    extra_args: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    row = Row("sampling.extra_args", "wrong type", BASE | {"sampling.extra_args": extra_args})
    processors = ExtraArgs(load_processors((NgramRepetitionBreaker,)))

    async with running(extra_args=processors) as run:
        found = await refusal(run, row)

    assert found == (None if expected is None else ((f"sampling.extra_args.{expected[0]}", expected[1]),))
