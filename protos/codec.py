"""Turns steps into messages and back: plans and results.

Alone in touching columns of bytes, and in knowing which messages are malformed. How tokens are sampled travels by
`protos/codec_sampling.py`; what a worker is, and its tokenizer, by `protos/codec_info.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np

from plugins.errors import PlanOutOfOrder
from plugins.types import (
    Admission,
    BlockCopy,
    BlockId,
    Chunk,
    FinishReason,
    PromptLogprobs,
    RequestId,
    Row,
    RowFailure,
    StepPlan,
    StepResult,
    TokenId,
    TokenLogprobs,
)
from protos.codec_sampling import decode_sampling, encode_sampling
from protos.worker.v1 import worker_pb2

T = TypeVar("T")

PROTOCOL_VERSION: Final = 2  # of the step stream, told in Hello and Ready; both ends must speak the same
GOES_ON: Final = 0  # in a column of finish reasons: the row has not ended
LAST_VERDICT: Final = FinishReason.LENGTH  # a worker says STOP or LENGTH; the other ends are the control plane's


def encode_plan(plan: StepPlan, epoch: int) -> worker_pb2.StepPlan:
    """Write one plan for the owner of this epoch."""
    counts = [chunk.num_tokens for chunk in plan.chunks]
    growing = [position for position, chunk in enumerate(plan.chunks) if chunk.new_blocks]
    return worker_pb2.StepPlan(
        epoch=epoch,
        seq=plan.seq,
        released_rows_i32=_pack(plan.released_rows),
        copy_sources_i32=_pack([copy.source for copy in plan.block_copies]),
        copy_destinations_i32=_pack([copy.destination for copy in plan.block_copies]),
        admitted=[_encode_admission(admission) for admission in plan.admitted],
        chunk_rows_i32=_pack([chunk.row for chunk in plan.chunks]),
        chunk_num_tokens_i32=_pack_unless_ones(counts),
        growth_chunks_i32=_pack(growing),
        growth_counts_i32=_pack([len(plan.chunks[position].new_blocks) for position in growing]),
        new_blocks_i32=_pack([block for position in growing for block in plan.chunks[position].new_blocks]),
        decode_steps=plan.decode_steps,
    )


def decode_plan(message: worker_pb2.StepPlan) -> tuple[StepPlan, int]:
    """Read one plan and the epoch it belongs to.

    Raises: PlanOutOfOrder: the message is malformed; it names the column and the numbers.
    """
    reader = _Reader(f"plan {message.seq}")
    sources = reader.column("copy_sources_i32", message.copy_sources_i32)
    destinations = reader.column("copy_destinations_i32", message.copy_destinations_i32)
    reader.same_length(copy_sources_i32=sources, copy_destinations_i32=destinations)
    if message.decode_steps < 1:
        raise reader.malformed("decode_steps is 0; the least is 1")
    plan = StepPlan(
        seq=message.seq,
        released_rows=tuple(map(Row, reader.column("released_rows_i32", message.released_rows_i32))),
        block_copies=tuple(
            BlockCopy(BlockId(source), BlockId(destination))
            for source, destination in zip(sources, destinations, strict=True)
        ),
        admitted=tuple(_decode_admission(reader, admission) for admission in message.admitted),
        chunks=_decode_chunks(reader, message),
        decode_steps=message.decode_steps,
    )
    return plan, message.epoch


def encode_result(result: StepResult, epoch: int) -> worker_pb2.StepResult:
    """Write one result for the owner of this epoch."""
    finishes = bytes(GOES_ON if finish is None else finish for finish in result.finishes)
    return worker_pb2.StepResult(
        epoch=epoch,
        seq=result.seq,
        rows_i32=_pack(result.rows),
        counts_i32=_pack_unless_ones(result.counts),
        token_ids_i32=_pack(result.token_ids),
        finishes_u8=finishes if any(finishes) else b"",
        failures=[
            worker_pb2.RowFailure(row=failure.row, reason=failure.reason, message=failure.message)
            for failure in result.failures
        ],
        queue_ns=result.queue_ns,
        compute_ns=result.compute_ns,
        prompt_logprobs=[
            worker_pb2.PromptLogprobs(row=part.row, start=part.start, **_logprob_columns(part.places))
            for part in result.prompt_logprobs
        ],
        **_logprob_columns(result.logprobs),
    )


def decode_result(message: worker_pb2.StepResult) -> tuple[StepResult, int]:
    """Read one result and the epoch it belongs to.

    Raises: PlanOutOfOrder: the message is malformed; it names the column and the numbers.
    """
    reader = _Reader(f"result {message.seq}")
    rows = reader.column("rows_i32", message.rows_i32)
    counts = reader.column("counts_i32", message.counts_i32) or [1] * len(rows)
    token_ids = reader.column("token_ids_i32", message.token_ids_i32)
    finishes = message.finishes_u8 or bytes(len(rows))
    reader.same_length(rows_i32=rows, counts_i32=counts, finishes_u8=finishes)
    reader.total("token_ids_i32", token_ids, counts)
    if max(finishes, default=GOES_ON) > LAST_VERDICT:
        raise reader.malformed(f"finishes_u8 has {max(finishes)}; a worker's last reason is {LAST_VERDICT:d}")
    result = StepResult(
        seq=message.seq,
        rows=tuple(map(Row, rows)),
        counts=tuple(counts),
        token_ids=tuple(map(TokenId, token_ids)),
        finishes=tuple(None if finish == GOES_ON else FinishReason(finish) for finish in finishes),
        failures=tuple(RowFailure(Row(one.row), one.reason, one.message) for one in message.failures),
        logprobs=_decode_logprobs(reader, message),
        prompt_logprobs=tuple(_decode_prompt_logprobs(reader, part) for part in message.prompt_logprobs),
        queue_ns=message.queue_ns,
        compute_ns=message.compute_ns,
    )
    if result.logprobs and len(result.logprobs) != len(token_ids):
        raise reader.malformed(f"logprob_counts_i32 has {len(result.logprobs)} entries for {len(token_ids)} tokens")
    return result, message.epoch


def _encode_admission(admission: Admission) -> worker_pb2.Admission:
    return worker_pb2.Admission(
        row=admission.row,
        request_id=admission.request_id,
        token_ids_i32=_pack(admission.token_ids),
        num_prompt_tokens=admission.num_prompt_tokens,
        sampling=encode_sampling(admission.sampling),
        block_ids_i32=_pack(admission.block_ids),
        num_cached_tokens=admission.num_cached_tokens,
        bad_word_counts_i32=_pack([len(word) for word in admission.sampling.bad_word_ids]),
        bad_word_ids_i32=_pack([token_id for word in admission.sampling.bad_word_ids for token_id in word]),
        grammar=admission.sampling.grammar,
    )


def _decode_admission(reader: "_Reader", message: worker_pb2.Admission) -> Admission:
    token_ids = reader.column("token_ids_i32", message.token_ids_i32)
    if not 1 <= message.num_prompt_tokens <= len(token_ids):
        raise reader.malformed(f"num_prompt_tokens is {message.num_prompt_tokens} of {len(token_ids)} tokens")
    if message.num_cached_tokens >= len(token_ids):
        raise reader.malformed(f"num_cached_tokens is {message.num_cached_tokens} of {len(token_ids)} tokens")
    word_counts = reader.column("bad_word_counts_i32", message.bad_word_counts_i32, least=1)
    word_ids = reader.column("bad_word_ids_i32", message.bad_word_ids_i32)
    reader.total("bad_word_ids_i32", word_ids, word_counts)
    words = tuple(tuple(map(TokenId, word)) for word in _cut(word_ids, word_counts))
    return Admission(
        row=Row(message.row),
        request_id=RequestId(message.request_id),
        token_ids=tuple(map(TokenId, token_ids)),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=replace(decode_sampling(message.sampling), bad_word_ids=words, grammar=message.grammar),
        block_ids=tuple(map(BlockId, reader.column("block_ids_i32", message.block_ids_i32))),
        num_cached_tokens=message.num_cached_tokens,
    )


def _decode_chunks(reader: "_Reader", message: worker_pb2.StepPlan) -> tuple[Chunk, ...]:
    rows = reader.column("chunk_rows_i32", message.chunk_rows_i32)
    counts = reader.column("chunk_num_tokens_i32", message.chunk_num_tokens_i32, least=1) or [1] * len(rows)
    reader.same_length(chunk_rows_i32=rows, chunk_num_tokens_i32=counts)
    growing = reader.column("growth_chunks_i32", message.growth_chunks_i32)
    growth = reader.column("growth_counts_i32", message.growth_counts_i32, least=1)
    blocks = reader.column("new_blocks_i32", message.new_blocks_i32)
    reader.same_length(growth_chunks_i32=growing, growth_counts_i32=growth)
    reader.total("new_blocks_i32", blocks, growth)
    if len(set(growing)) < len(growing) or max(growing, default=-1) >= len(rows):
        raise reader.malformed(f"growth_chunks_i32 names a chunk twice, or one past the {len(rows)} that there are")
    new_blocks: list[tuple[BlockId, ...]] = [()] * len(rows)
    rest = iter(blocks)
    for position, count in zip(growing, growth, strict=True):
        new_blocks[position] = tuple(BlockId(next(rest)) for _ in range(count))
    return tuple(
        Chunk(Row(row), count, blocks_of_row)
        for row, count, blocks_of_row in zip(rows, counts, new_blocks, strict=True)
    )


def _logprob_columns(places: Sequence[TokenLogprobs | None]) -> dict[str, bytes]:
    """Lay log-probabilities side by side. None has no entries."""
    told = [place for place in places if place is not None]
    return {
        "logprob_counts_i32": _pack([0 if place is None else len(place.token_ids) for place in places]),
        "logprob_token_ids_i32": _pack([token_id for place in told for token_id in place.token_ids]),
        "logprobs_f32": np.array([logprob for place in told for logprob in place.logprobs], "<f4").tobytes(),
        "logprob_ranks_i32": _pack([rank for place in told for rank in place.ranks]),
    }


def _decode_logprobs(
    reader: "_Reader", message: worker_pb2.StepResult | worker_pb2.PromptLogprobs
) -> tuple[TokenLogprobs | None, ...]:
    counts = reader.column("logprob_counts_i32", message.logprob_counts_i32)
    token_ids = reader.column("logprob_token_ids_i32", message.logprob_token_ids_i32)
    logprobs = reader.floats("logprobs_f32", message.logprobs_f32)
    ranks = reader.column("logprob_ranks_i32", message.logprob_ranks_i32, least=1)
    reader.total("logprob_token_ids_i32", token_ids, counts)
    reader.same_length(logprob_token_ids_i32=token_ids, logprobs_f32=logprobs, logprob_ranks_i32=ranks)
    cut = zip(_cut(token_ids, counts), _cut(logprobs, counts), _cut(ranks, counts), strict=True)
    return tuple(
        TokenLogprobs(tuple(map(TokenId, ids)), tuple(values), tuple(places)) if ids else None
        for ids, values, places in cut
    )


def _decode_prompt_logprobs(reader: "_Reader", message: worker_pb2.PromptLogprobs) -> PromptLogprobs:
    places = tuple(place for place in _decode_logprobs(reader, message) if place is not None)
    if message.start < 1 or not places:
        raise reader.malformed(f"prompt_logprobs of row {message.row} tells {len(places)} places from {message.start}")
    return PromptLogprobs(Row(message.row), message.start, places)


def _cut(numbers: Sequence[T], counts: Sequence[int]) -> Iterable[Sequence[T]]:
    """Cut a flat column into pieces of so many entries."""
    start = 0
    for count in counts:
        yield numbers[start : start + count]
        start += count


def _pack(numbers: Sequence[int]) -> bytes:
    """Lay numbers side by side, each in [0, 2**31)."""
    return np.array(numbers, "<i4").tobytes()


def _pack_unless_ones(counts: Sequence[int]) -> bytes:
    """Lay counts side by side; one each is said by an empty column, as in a steady decode step."""
    return b"" if all(count == 1 for count in counts) else _pack(counts)


class _Reader:
    """Reads the columns of one message and tells what is wrong with it."""

    def __init__(self, what: str) -> None:
        self._what = what

    def column(self, name: str, data: bytes, least: int = 0) -> list[int]:
        """Read int32 numbers. Raises: PlanOutOfOrder: a torn number, or one below `least`."""
        if len(data) % 4:
            raise self.malformed(f"{name} has {len(data)} bytes, which is no number of int32")
        numbers = np.frombuffer(data, "<i4")
        if len(numbers) and numbers.min() < least:
            raise self.malformed(f"{name} has {numbers.min()}; the least is {least}")
        return list(numbers.tolist())

    def floats(self, name: str, data: bytes) -> list[float]:
        """Read float32 numbers. Raises: PlanOutOfOrder: a torn number."""
        if len(data) % 4:
            raise self.malformed(f"{name} has {len(data)} bytes, which is no number of float32")
        return list(np.frombuffer(data, "<f4").tolist())

    def same_length(self, **columns: Sequence[object]) -> None:
        """Raises: PlanOutOfOrder: columns that belong together differ in length."""
        if len({len(column) for column in columns.values()}) > 1:
            lengths = ", ".join(f"{name} has {len(column)}" for name, column in columns.items())
            raise self.malformed(f"{lengths} entries")

    def total(self, name: str, column: Sequence[object], counts: Sequence[int]) -> None:
        """Raises: PlanOutOfOrder: a flat column does not have as many entries as its counts say."""
        if len(column) != sum(counts):
            raise self.malformed(f"{name} has {len(column)} entries; its counts say {sum(counts)}")

    def malformed(self, why: str) -> PlanOutOfOrder:
        return PlanOutOfOrder(f"malformed {self._what}: {why}")
