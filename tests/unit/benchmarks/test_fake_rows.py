"""The worker that computes nothing: which rows sample, and when they end."""

from benchmarks.fake_rows import FakeRows, Work
from plugins.types import (
    Admission,
    BlockId,
    Chunk,
    FinishReason,
    RequestId,
    Row,
    SamplingParams,
    StepPlan,
    TokenId,
)


def admission(row: int, num_tokens: int, num_prompt_tokens: int, max_tokens: int, num_cached: int = 0) -> Admission:
    return Admission(
        row=Row(row),
        request_id=RequestId(f"r{row}"),
        token_ids=tuple(map(TokenId, range(num_tokens))),
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(max_tokens=max_tokens),
        block_ids=(BlockId(0),),
        num_cached_tokens=num_cached,
    )


def rows() -> FakeRows:
    return FakeRows(lambda _request_id, index: TokenId(100 + index))


def test_a_row_samples_when_a_chunk_reaches_the_end_of_its_tokens() -> None:
    worker = rows()

    first, first_work = worker.execute(
        StepPlan(seq=1, admitted=(admission(3, 10, 10, max_tokens=2),), chunks=(Chunk(Row(3), 6),))
    )
    second, second_work = worker.execute(StepPlan(seq=2, chunks=(Chunk(Row(3), 4),)))
    third, third_work = worker.execute(StepPlan(seq=3, chunks=(Chunk(Row(3), 1),)))

    assert (first.rows, first.token_ids) == ((), ())
    assert (second.rows, second.token_ids, second.finishes) == ((3,), (100,), (None,))
    assert (third.rows, third.token_ids, third.finishes) == ((3,), (101,), (FinishReason.LENGTH,))
    assert (first_work, second_work, third_work) == (Work(6, 0, 6), Work(4, 0, 10), Work(0, 1, 11))


def test_a_row_that_has_ended_is_reported_with_no_token_until_it_is_released() -> None:
    worker = rows()
    worker.execute(StepPlan(seq=1, admitted=(admission(0, 4, 4, max_tokens=1),), chunks=(Chunk(Row(0), 4),)))

    late, _ = worker.execute(StepPlan(seq=2, chunks=(Chunk(Row(0), 1),)))
    again, _ = worker.execute(
        StepPlan(
            seq=3,
            released_rows=(Row(0),),
            admitted=(admission(0, 4, 4, max_tokens=1),),
            chunks=(Chunk(Row(0), 4),),
        )
    )

    assert (late.rows, late.counts, late.token_ids) == ((0,), (0,), ())
    assert (again.rows, again.counts, again.token_ids) == ((0,), (1,), (100,))


def test_a_row_that_comes_back_counts_the_output_it_had_and_skips_cached_tokens() -> None:
    worker = rows()

    result, work = worker.execute(
        StepPlan(seq=1, admitted=(admission(0, 12, 10, max_tokens=3, num_cached=8),), chunks=(Chunk(Row(0), 4),))
    )

    assert (result.token_ids, result.finishes) == ((102,), (FinishReason.LENGTH,))
    assert work == Work(4, 0, 12)
