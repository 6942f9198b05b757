"""Every value that crosses the wire comes back as it was, in few bytes; a malformed message is told apart."""

import dataclasses
import hashlib
import struct
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import PlanOutOfOrder, WorkerLost
from plugins.types import (
    Admission,
    BlockCopy,
    BlockId,
    Chunk,
    FinishReason,
    LogprobsMode,
    ModelInfo,
    PromptLogprobs,
    RequestId,
    Row,
    RowFailure,
    SamplingLimits,
    SamplingParams,
    StepPlan,
    StepResult,
    StructuredOutput,
    TokenId,
    TokenizerBundle,
    TokenLogprobs,
    WorkerInfo,
)
from protos.codec import decode_plan, decode_result, encode_plan, encode_result
from protos.codec_info import (
    TOKENIZER_CHUNK_BYTES,
    decode_model_info,
    decode_tokenizer,
    decode_worker_info,
    encode_model_info,
    encode_tokenizer,
    encode_worker_info,
)
from protos.codec_sampling import decode_sampling, encode_sampling
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2

T = typing.TypeVar("T")

EPOCHS = st.integers(0, 2**64 - 1)
INT32 = st.integers(0, 2**31 - 1)
POSITIVE = st.integers(1, 2**31 - 1)
FLOAT32 = st.floats(0, width=32, allow_infinity=False)
UINT64 = st.integers(0, 2**64 - 1)


def drawn(cls: type[T], **narrower: st.SearchStrategy[typing.Any]) -> st.SearchStrategy[T]:
    """Draw every field of a dataclass, by its type unless it is narrowed here: a field added later is drawn too."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # T is a dataclass
    unknown = set(narrower) - set(fields)
    if unknown:
        raise ValueError(f"{cls.__name__} has no fields {unknown}")
    return st.builds(
        cls, **{name: narrower[name] if name in narrower else by_type(hint) for name, hint in fields.items()}
    )


def by_type(hint: object) -> st.SearchStrategy[typing.Any]:
    if isinstance(hint, typing.NewType):
        return by_type(hint.__supertype__)
    if dataclasses.is_dataclass(hint):
        return drawn(typing.cast(type[typing.Any], hint))
    if typing.get_origin(hint) is tuple:
        return st.lists(by_type(typing.get_args(hint)[0]), max_size=6).map(tuple)
    if type(None) in typing.get_args(hint):
        return st.one_of(*[st.none() if arg is type(None) else by_type(arg) for arg in typing.get_args(hint)])
    simple: dict[object, st.SearchStrategy[typing.Any]] = {
        int: INT32, float: FLOAT32, str: st.text(), bool: st.booleans(), bytes: st.binary(),
        FinishReason: st.sampled_from(FinishReason), LogprobsMode: st.sampled_from(LogprobsMode),
    }  # fmt: skip
    return simple[hint]


WIRE_TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | WIRE_TEXT,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(WIRE_TEXT, each, max_size=3),
    max_leaves=6,
)
STRUCTURED = st.one_of(
    st.builds(StructuredOutput, json_schema=WIRE_TEXT),
    st.builds(StructuredOutput, json_object=st.just(True)),
    st.builds(StructuredOutput, regex=WIRE_TEXT),
    st.builds(StructuredOutput, choice=st.lists(WIRE_TEXT, min_size=1, max_size=3).map(tuple)),
    st.builds(StructuredOutput, grammar=WIRE_TEXT),
    st.just(StructuredOutput()),
)
GIVEN_SAMPLINGS = {
    "seed": st.none() | UINT64,
    "logit_bias": st.dictionaries(INT32.map(TokenId), FLOAT32, max_size=3),
    "extra_args": st.dictionaries(WIRE_TEXT, JSON, max_size=3),
    "structured_output": st.none() | STRUCTURED,
}
PUBLIC_SAMPLINGS = drawn(SamplingParams, **GIVEN_SAMPLINGS, bad_word_ids=st.just(()), grammar=st.just(""))
SAMPLINGS = drawn(
    SamplingParams,
    **GIVEN_SAMPLINGS,
    bad_word_ids=st.lists(st.lists(INT32.map(TokenId), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)


@st.composite
def token_logprobs(draw: st.DrawFn) -> TokenLogprobs:
    num_told = draw(st.integers(1, 4))
    return TokenLogprobs(
        tuple(draw(st.lists(INT32.map(TokenId), min_size=num_told, max_size=num_told))),
        tuple(draw(st.lists(st.floats(width=32, allow_nan=False), min_size=num_told, max_size=num_told))),
        tuple(draw(st.lists(POSITIVE, min_size=num_told, max_size=num_told))),
    )


PROMPT_LOGPROBS = drawn(
    PromptLogprobs, start=POSITIVE, places=st.lists(token_logprobs(), min_size=1, max_size=3).map(tuple)
)


@st.composite
def admissions(draw: st.DrawFn) -> Admission:
    tokens = draw(st.lists(INT32.map(TokenId), min_size=1, max_size=20).map(tuple))
    return draw(
        drawn(
            Admission,
            token_ids=st.just(tokens),
            num_prompt_tokens=st.integers(1, len(tokens)),
            num_cached_tokens=st.integers(0, len(tokens) - 1),
            sampling=SAMPLINGS,
        )
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    num_rows = draw(st.integers(0, 8))
    counts = draw(st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows))
    finishes = st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH])
    return draw(
        drawn(
            StepResult,
            seq=UINT64,
            rows=st.lists(INT32, min_size=num_rows, max_size=num_rows).map(tuple),
            counts=st.just(tuple(counts)),
            token_ids=st.lists(INT32, min_size=sum(counts), max_size=sum(counts)).map(tuple),
            finishes=st.lists(finishes, min_size=num_rows, max_size=num_rows).map(tuple),
            logprobs=st.just(())
            | st.lists(st.none() | token_logprobs(), min_size=sum(counts), max_size=sum(counts)).map(tuple),
            prompt_logprobs=st.lists(PROMPT_LOGPROBS, max_size=2).map(tuple),
            queue_ns=UINT64,
            compute_ns=UINT64,
        )
    )


PLANS = drawn(
    StepPlan,
    seq=UINT64,
    admitted=st.lists(admissions(), max_size=3).map(tuple),
    chunks=st.lists(drawn(Chunk, num_tokens=st.just(1) | POSITIVE), max_size=6).map(tuple),
    decode_steps=POSITIVE,
)
MODELS = drawn(
    ModelInfo, default_sampling=PUBLIC_SAMPLINGS, vocab_size=POSITIVE, max_model_len=POSITIVE, num_parameters=UINT64
)
WORKERS = drawn(
    WorkerInfo,
    model=MODELS,
    num_blocks=POSITIVE,
    block_size=POSITIVE,
    max_sequences=POSITIVE,
    max_step_tokens=POSITIVE,
    kv_bytes=UINT64,
    load_s=st.floats(0, allow_infinity=False),
)


@given(PUBLIC_SAMPLINGS)
def test_sampling_parameters_come_back_as_they_were(sampling: SamplingParams) -> None:
    assert decode_sampling(_over_the_wire(encode_sampling(sampling))) == sampling


@given(PLANS, EPOCHS)
@settings(deadline=None)
def test_a_plan_comes_back_as_it_was_with_its_epoch(plan: StepPlan, epoch: int) -> None:
    assert decode_plan(_over_the_wire(encode_plan(plan, epoch))) == (plan, epoch)


@given(results(), EPOCHS)
@settings(deadline=None)
def test_a_result_comes_back_as_it_was_with_its_epoch(result: StepResult, epoch: int) -> None:
    assert decode_result(_over_the_wire(encode_result(result, epoch))) == (result, epoch)


@given(WORKERS)
def test_what_a_worker_is_comes_back_as_it_was(info: WorkerInfo) -> None:
    assert decode_worker_info(_over_the_wire(encode_worker_info(info))) == info


@given(MODELS)
def test_what_a_model_is_comes_back_as_it_was(model: ModelInfo) -> None:
    assert decode_model_info(_over_the_wire(encode_model_info(model))) == model


@given(drawn(TokenizerBundle))
def test_a_tokenizer_comes_back_as_it_was(bundle: TokenizerBundle) -> None:
    assert decode_tokenizer([_over_the_wire(message) for message in encode_tokenizer(bundle)]) == bundle


def test_the_drawn_plans_reach_every_kind_of_value() -> None:
    drawn_types = {type_of_field for cls in (StepPlan, StepResult, WorkerInfo) for type_of_field in _dataclasses(cls)}

    assert drawn_types == {
        StepPlan, BlockCopy, Admission, SamplingParams, StructuredOutput, Chunk, StepResult, RowFailure,
        TokenLogprobs, PromptLogprobs, WorkerInfo, ModelInfo, SamplingLimits,
    }  # fmt: skip


def test_a_steady_decode_step_of_256_sequences_takes_less_than_2_kib() -> None:
    plan = StepPlan(seq=10**6, chunks=tuple(Chunk(Row(row), 1) for row in range(256)))

    assert len(encode_plan(plan, epoch=3).SerializeToString()) < 2048


def test_so_does_one_in_which_16_of_them_grow_by_a_block() -> None:
    chunks = [Chunk(Row(row), 1, (BlockId(10_000 + row),) if row % 16 == 0 else ()) for row in range(256)]

    assert len(encode_plan(StepPlan(seq=10**6, chunks=tuple(chunks)), epoch=3).SerializeToString()) < 2048


def test_columns_are_little_endian_int32_side_by_side() -> None:
    message = encode_plan(StepPlan(seq=1, released_rows=(Row(1), Row(258))), epoch=1)

    assert message.released_rows_i32 == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_an_unset_sampling_field_takes_the_default_that_is_given() -> None:
    defaults = SamplingParams(max_tokens=9, temperature=0.5, top_k=40, stop_token_ids=(TokenId(2),), ignore_eos=True)

    assert decode_sampling(common_pb2.SamplingParams(), defaults) == defaults


def test_a_sampling_field_set_to_zero_is_not_unset() -> None:
    message = common_pb2.SamplingParams(max_tokens=0, temperature=0, top_p=0, seed=0)

    assert decode_sampling(message) == SamplingParams(max_tokens=0, temperature=0.0, top_p=0.0, seed=0)


def test_a_temperature_is_rounded_to_32_bits_by_its_first_message_and_never_again() -> None:
    once = decode_sampling(_over_the_wire(encode_sampling(SamplingParams(temperature=0.7))))
    twice = decode_sampling(_over_the_wire(encode_sampling(once)))

    assert (once.temperature, twice.temperature) == (0.699999988079071, 0.699999988079071)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"released_rows_i32": [b"abc"]}, "released_rows_i32 has 3 bytes, which is no number of int32"),
        ({"released_rows_i32": [-1]}, "released_rows_i32 has -1; the least is 0"),
        ({"chunk_num_tokens_i32": [1, 0]}, "chunk_num_tokens_i32 has 0; the least is 1"),
        ({"chunk_num_tokens_i32": [1]}, "chunk_rows_i32 has 2, chunk_num_tokens_i32 has 1 entries"),
        ({"copy_sources_i32": [1]}, "copy_sources_i32 has 1, copy_destinations_i32 has 0 entries"),
        ({"new_blocks_i32": [7]}, "new_blocks_i32 has 1 entries; its counts say 2"),
        ({"growth_counts_i32": [1, 1]}, "growth_chunks_i32 has 1, growth_counts_i32 has 2 entries"),
        ({"growth_counts_i32": [-2]}, "growth_counts_i32 has -2; the least is 1"),
        ({"growth_chunks_i32": [2]}, "growth_chunks_i32 names a chunk twice, or one past the 2 that there are"),
        (
            {"growth_chunks_i32": [1, 1], "growth_counts_i32": [1, 1]},
            "growth_chunks_i32 names a chunk twice, or one past the 2 that there are",
        ),
        ({"decode_steps": 0}, "decode_steps is 0; the least is 1"),
    ],
)
def test_a_malformed_plan_is_refused_with_the_column_and_the_numbers(
    fields: dict[str, int | list[int | bytes]], message: str
) -> None:
    chunks = (Chunk(Row(0), 2, (BlockId(4), BlockId(5))), Chunk(Row(1), 1))
    encoded = encode_plan(StepPlan(seq=7, chunks=chunks), epoch=1)
    _set(encoded, **{name: _column(value) if isinstance(value, list) else value for name, value in fields.items()})

    with pytest.raises(PlanOutOfOrder) as refused:
        decode_plan(encoded)

    assert str(refused.value) == f"malformed plan 7: {message}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_prompt_tokens": 0}, "num_prompt_tokens is 0 of 2 tokens"),
        ({"num_prompt_tokens": 3}, "num_prompt_tokens is 3 of 2 tokens"),
        ({"num_cached_tokens": 2}, "num_cached_tokens is 2 of 2 tokens"),
        ({"block_ids_i32": b"x"}, "block_ids_i32 has 1 bytes, which is no number of int32"),
    ],
)
def test_a_malformed_admission_is_refused_with_the_field_and_the_numbers(
    fields: dict[str, int | bytes], message: str
) -> None:
    admission = Admission(
        row=Row(0),
        request_id=RequestId("a"),
        token_ids=(TokenId(5), TokenId(6)),
        num_prompt_tokens=2,
        sampling=SamplingParams(),
        block_ids=(BlockId(3),),
        num_cached_tokens=0,
    )
    encoded = encode_plan(StepPlan(seq=7, admitted=(admission,)), epoch=1)
    _set(encoded.admitted[0], **fields)

    with pytest.raises(PlanOutOfOrder) as refused:
        decode_plan(encoded)

    assert str(refused.value) == f"malformed plan 7: {message}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows_i32": b"\x00"}, "rows_i32 has 1 bytes, which is no number of int32"),
        ({"counts_i32": b"\x01\0\0\0"}, "rows_i32 has 2, counts_i32 has 1, finishes_u8 has 2 entries"),
        ({"counts_i32": b"\xff\xff\xff\xff\x03\0\0\0"}, "counts_i32 has -1; the least is 0"),
        ({"token_ids_i32": b""}, "token_ids_i32 has 0 entries; its counts say 2"),
        ({"finishes_u8": b"\x01"}, "rows_i32 has 2, counts_i32 has 2, finishes_u8 has 1 entries"),
        ({"finishes_u8": b"\x01\x63"}, "finishes_u8 has 99; a worker's last reason is 2"),
        ({"finishes_u8": b"\x01\x05"}, "finishes_u8 has 5; a worker's last reason is 2"),
    ],
)
def test_a_malformed_result_is_refused_with_the_column_and_the_numbers(fields: dict[str, bytes], message: str) -> None:
    result = StepResult(
        seq=7, rows=(Row(0), Row(1)), counts=(1, 1), token_ids=(TokenId(5), TokenId(6)), finishes=(None, None)
    )
    encoded = encode_result(result, epoch=1)
    _set(encoded, **fields)

    with pytest.raises(PlanOutOfOrder) as refused:
        decode_result(encoded)

    assert str(refused.value) == f"malformed result 7: {message}"


@given(
    st.builds(
        worker_pb2.StepPlan,
        released_rows_i32=st.binary(max_size=9),
        copy_sources_i32=st.binary(max_size=9),
        copy_destinations_i32=st.binary(max_size=9),
        chunk_rows_i32=st.binary(max_size=9),
        chunk_num_tokens_i32=st.binary(max_size=9),
        growth_chunks_i32=st.binary(max_size=9),
        growth_counts_i32=st.binary(max_size=9),
        new_blocks_i32=st.binary(max_size=9),
        decode_steps=st.integers(0, 3),
    )
)
def test_bytes_without_meaning_raise_nothing_but_our_own_error(message: worker_pb2.StepPlan) -> None:
    try:
        plan, _ = decode_plan(message)
    except PlanOutOfOrder as error:
        assert str(error).startswith("malformed plan 0: ")
    else:
        assert all(chunk.num_tokens >= 1 and min(chunk.new_blocks, default=0) >= 0 for chunk in plan.chunks)


def test_a_worker_that_describes_itself_without_sizes_is_refused() -> None:
    with pytest.raises(
        WorkerLost, match="with 0 for num_blocks, max_sequences, max_step_tokens, model.vocab_size, model"
    ):
        decode_worker_info(worker_pb2.WorkerInfo(block_size=16))


def test_a_tokenizer_travels_in_pieces_of_256_kib_and_its_header_once() -> None:
    bundle = _bundle(b"x" * (600 * 1024))

    messages = list(encode_tokenizer(bundle))

    assert [len(message.data) for message in messages] == [262144, 262144, 90112]
    assert [message.HasField("header") for message in messages] == [True, False, False]
    assert messages[0].header.num_bytes == 614400
    assert messages[0].header.sha256 == hashlib.sha256(b"x" * 614400).hexdigest()
    assert TOKENIZER_CHUNK_BYTES == 262144


def test_a_tokenizer_with_a_piece_missing_or_changed_is_refused() -> None:
    messages = list(encode_tokenizer(_bundle(b"x" * 300_000)))
    changed = [messages[0], worker_pb2.GetTokenizerResponse(data=b"y" * (300_000 - TOKENIZER_CHUNK_BYTES))]

    with pytest.raises(WorkerLost, match="its tokenizer came with 262144 of 300000 bytes"):
        decode_tokenizer(messages[:1])
    with pytest.raises(WorkerLost, match="its tokenizer came without a header"):
        decode_tokenizer(messages[1:])
    with pytest.raises(WorkerLost, match="its tokenizer is damaged: sha256"):
        decode_tokenizer(changed)


def _bundle(data: bytes) -> TokenizerBundle:
    return TokenizerBundle(tokenizer_json=data, chat_template="", bos_token="", eos_token="</s>", add_bos=False)


M = typing.TypeVar("M", worker_pb2.StepPlan, worker_pb2.StepResult, worker_pb2.WorkerInfo, worker_pb2.Admission,
                    worker_pb2.GetTokenizerResponse, common_pb2.SamplingParams, common_pb2.ModelInfo)  # fmt: skip


def _over_the_wire(message: M) -> M:
    return type(message).FromString(message.SerializeToString())


def _set(message: M, **fields: typing.Any) -> None:
    for name, value in fields.items():
        setattr(message, name, value)


def _column(entries: list[int | bytes]) -> bytes:
    return b"".join(entry if isinstance(entry, bytes) else struct.pack("<i", entry) for entry in entries)


def _dataclasses(cls: type) -> set[type]:
    """The dataclass and all that its fields hold."""
    found = {cls}
    for hint in typing.get_type_hints(cls).values():
        for part in (hint, *typing.get_args(hint)):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                found |= _dataclasses(part)
    return found
