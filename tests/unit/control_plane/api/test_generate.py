"""What a client of Generate sees."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.submission import Submission
from control_plane.admission.validator import Validator
from control_plane.api import inference
from control_plane.api.inference import InferenceServicer
from control_plane.api.submissions import read_submission
from control_plane.engine.served import ServedModels
from control_plane.engine.streams import OutputStream
from plugins.errors import DeadlineExceeded, NotServing, QueueFull, WorkerLost
from plugins.types import FinishReason, GenerationId, Request, RequestId, SamplingParams, TokenId, WorkerId
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from protos.status import from_rpc_error
from tests.unit.control_plane.admission.models import directory, served_model
from tests.unit.control_plane.api.running import CountedMetrics, Running, ScriptedEngine, running
from tests.unit.control_plane.text.byte_level import byte, merged

HELLO, PARIS, EOS = merged("hello"), merged(" Paris"), TokenId(2)


def text_request(text: str = "hello", **fields: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, **fields)  # type: ignore[arg-type]  # names of string fields


async def collect(run: Running, request: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateResponse]:
    return [response async for response in run.inference.Generate(request)]


async def refused(
    run: Running, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in run.inference.Generate(request, timeout=timeout_s):
            pass
    return raised.value


async def test_a_stream_has_its_id_first_and_its_end_last() -> None:
    async with running() as run:
        call = run.inference.Generate(text_request("hello Paris", request_id="mine"))
        await run.engine.submitted.wait()
        stream = run.engine.streams[RequestId("mine")]
        stream.put((HELLO,), None, None, 0.0)
        first = await call.read()
        stream.put((PARIS, PARIS), None, None, 0.0)
        second = await call.read()
        stream.put((EOS,), FinishReason.STOP, None, 0.0)
        third = await call.read()

        assert await call.read() is grpc.aio.EOF
        assert first == inference_pb2.GenerateResponse(request_id="mine", token_ids=[HELLO], text="hello")
        assert second == inference_pb2.GenerateResponse(token_ids=[PARIS, PARIS], text=" Paris Paris")
        assert third == inference_pb2.GenerateResponse(
            token_ids=[EOS],
            finish_reason=common_pb2.FINISH_REASON_STOP,
            usage=inference_pb2.Usage(prompt_tokens=2, output_tokens=4),
        )


async def test_one_response_may_be_first_and_last() -> None:
    async with running() as run:
        run.engine.answer = [([HELLO], FinishReason.LENGTH, None)]

        (response,) = await collect(run, text_request())

        assert response == inference_pb2.GenerateResponse(
            request_id="drawn",
            token_ids=[HELLO],
            text="hello",
            finish_reason=common_pb2.FINISH_REASON_LENGTH,
            usage=inference_pb2.Usage(prompt_tokens=1, output_tokens=1),
        )


async def test_a_character_cut_off_by_the_end_comes_with_the_final_response() -> None:
    async with running() as run:
        run.engine.answer = [([byte(0xF0), byte(0x9F)], None, None), ([], FinishReason.LENGTH, None)]

        responses = await collect(run, text_request())

        assert "".join(response.text for response in responses) == "\ufffd"
        assert responses[-1].usage.output_tokens == 2


async def test_the_engine_gets_the_request_as_admission_resolved_it() -> None:
    async with running() as run:
        run.engine.answer = [([EOS], FinishReason.STOP, None)]
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=[5, 6]),
            sampling=common_pb2.SamplingParams(
                temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=0, stop_token_ids=[9], ignore_eos=True
            ),
        )

        await collect(run, request)

        (submitted,) = run.engine.requests.values()
        assert submitted.prompt_token_ids == (5, 6)
        assert submitted.sampling == SamplingParams(
            max_tokens=126,
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            seed=0,
            stop_token_ids=(TokenId(9),),
            ignore_eos=True,
        )


async def test_a_conversation_is_put_into_the_model_s_template() -> None:
    async with running() as run:
        run.engine.answer = [([EOS], FinishReason.STOP, None)]
        messages = [inference_pb2.ChatMessage(role="user", content="hello<|im_end|>")]

        await collect(run, inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages)))

        (submitted,) = run.engine.requests.values()
        assert [token_id for token_id in submitted.prompt_token_ids if token_id < 3] == [1, 2, 1]


@pytest.mark.parametrize(
    "request_message",
    [
        pytest.param(text_request("hello" * 4000), id="a long text"),
        pytest.param(
            inference_pb2.GenerateRequest(
                chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user")] * 2000)
            ),
            id="many messages without content",
        ),
        pytest.param(inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[5] * 9000)), id="many token ids"),
    ],
)
async def test_a_large_message_is_read_and_admitted_beside_the_event_loop(
    request_message: inference_pb2.GenerateRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[threading.Thread] = []

    def read(message: inference_pb2.GenerateRequest, tenant: str) -> Submission:
        places.append(threading.current_thread())
        return read_submission(message, tenant)

    monkeypatch.setattr(inference, "read_submission", read)
    models, config = directory(served_model(max_model_len=100_000, num_blocks=100_000)), AdmissionConfig()
    engine = ScriptedEngine()
    engine.answer = [([EOS], FinishReason.STOP, None)]

    def draw_seed() -> int:
        places.append(threading.current_thread())
        return 7

    servicer = InferenceServicer(
        models, Validator(models, config, draw_seed), engine, config, CountedMetrics(), lambda: 0.0
    )
    for message in (request_message, text_request("short")):
        await servicer.Generate(message, Caller(60.0))  # type: ignore[arg-type]  # as in `start`

    assert [place is threading.main_thread() for place in places] == [False, False, True, True]


async def test_dropping_the_call_cancels_the_request() -> None:
    async with running() as run:
        call = run.inference.Generate(text_request())
        await run.engine.submitted.wait()

        call.cancel()
        await run.engine.cancel_seen.wait()

        assert run.engine.cancelled == ["drawn"]
        assert await run.metrics.outcomes() == ["cancelled"]


async def test_dropping_the_call_between_two_responses_cancels_the_request() -> None:
    async with running() as run:
        call = run.inference.Generate(text_request())
        await run.engine.submitted.wait()
        run.engine.put("drawn", (HELLO,))
        await call.read()

        call.cancel()
        await run.engine.cancel_seen.wait()

        assert run.engine.cancelled == ["drawn"]
        assert await run.metrics.outcomes() == ["cancelled"]


async def test_a_request_that_ended_is_not_cancelled_again() -> None:
    async with running() as run:
        run.engine.answer = [([EOS], FinishReason.STOP, None)]

        await collect(run, text_request())

        assert await run.metrics.outcomes() == ["stop"]
        assert run.engine.cancelled == []


async def test_an_answer_is_complete_when_the_client_hangs_up_on_its_last_message() -> None:
    engine, metrics, caller = ScriptedEngine(), CountedMetrics(), StuckCaller(5.0)
    engine.answer = [([HELLO], FinishReason.LENGTH, None)]
    call = start(engine, metrics, caller)
    await caller.writing.wait()

    call.cancel()

    assert await metrics.outcomes() == ["length"]
    assert engine.cancelled == []


async def test_a_client_that_hangs_up_on_an_earlier_message_has_cancelled() -> None:
    engine, metrics, caller = ScriptedEngine(), CountedMetrics(), StuckCaller(5.0)
    engine.answer = [([HELLO], None, None)]
    call = start(engine, metrics, caller)
    await caller.writing.wait()

    call.cancel()

    assert await metrics.outcomes() == ["cancelled"]
    assert len(engine.cancelled) == 1


async def test_a_request_whose_generation_went_while_its_prompt_was_read_goes_to_the_next() -> None:
    models, metrics = directory(served_model(generation="old")), CountedMetrics()
    engine = UpgradedEngine(models)
    engine.answer = [([EOS], FinishReason.STOP, None)]

    await start(engine, metrics, Caller(5.0), models)

    assert engine.generations == ["new"]
    assert await metrics.outcomes() == ["stop"]


async def test_a_request_is_refused_that_the_next_generation_refuses_too() -> None:
    models, metrics = directory(served_model(generation="old")), CountedMetrics()
    engine = UpgradedEngine(models)
    engine.refusal = NotServing("draining")

    with pytest.raises(NotServing, match="draining"):
        await start(engine, metrics, Caller(5.0), models)

    assert engine.num_submitted == 2


async def test_the_caller_s_deadline_ends_the_request() -> None:
    async with running() as run:
        error = await refused(run, text_request(), timeout_s=0.2)
        await run.engine.cancel_seen.wait()

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert run.engine.cancelled == ["drawn"]
        (deadline_s,) = run.engine.deadlines
        assert deadline_s is not None
        assert 0 < deadline_s < 60  # the caller's; the server's own is 600


@dataclass(slots=True)
class Caller:
    """The context of a call whose caller waits so many seconds more, and takes whatever is written."""

    remaining_s: float

    def time_remaining(self) -> float:
        return self.remaining_s

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def send_initial_metadata(self, metadata: object) -> None:
        return None

    async def write(self, response: object) -> None:
        return None


class StuckCaller(Caller):
    """Takes no message."""

    def __init__(self, remaining_s: float) -> None:
        Caller.__init__(self, remaining_s)
        self.writing = asyncio.Event()

    async def write(self, response: object) -> None:
        self.writing.set()
        await asyncio.Event().wait()


class UpgradedEngine(ScriptedEngine):
    """Its worker comes back as another generation at the very moment of the first request."""

    def __init__(self, models: ServedModels) -> None:
        super().__init__()
        self._models = models
        self.num_submitted = 0

    def submit(
        self, requests: Sequence[Request], generation: GenerationId, *args: Any, **kwargs: Any
    ) -> list[OutputStream]:
        self.num_submitted += 1
        if generation == "old":
            self._models.add(WorkerId("10.0.0.0:50061"), served_model(generation="new"))
            raise NotServing("no worker of generation old is connected")
        return super().submit(requests, generation, *args, **kwargs)


def start(
    engine: ScriptedEngine, metrics: CountedMetrics, caller: Caller, models: ServedModels | None = None
) -> asyncio.Task[None]:
    """Serve a call without a transport."""
    models, config = models or directory(served_model()), AdmissionConfig()
    servicer = InferenceServicer(models, Validator(models, config, lambda: 7), engine, config, metrics, lambda: 0.0)
    return asyncio.create_task(
        servicer.Generate(text_request(), caller)  # type: ignore[arg-type]  # nothing else of the context is used
    )


@pytest.mark.parametrize(("remaining_s", "outcome"), [(5.0, "cancelled"), (0.0, "deadline_exceeded")])
async def test_a_call_cut_off_at_its_deadline_is_told_from_one_that_was_dropped(
    remaining_s: float, outcome: str
) -> None:
    engine, metrics, caller = ScriptedEngine(), CountedMetrics(), Caller(5.0)
    call = start(engine, metrics, caller)
    await engine.submitted.wait()

    caller.remaining_s = remaining_s
    call.cancel()

    assert await metrics.outcomes() == [outcome]
    assert len(engine.cancelled) == 1


async def test_a_request_whose_deadline_has_passed_never_reaches_the_engine() -> None:
    engine, metrics = ScriptedEngine(), CountedMetrics()

    with pytest.raises(DeadlineExceeded, match="the deadline passed before the request was admitted"):
        await start(engine, metrics, Caller(0.0))

    assert not engine.requests
    assert await metrics.outcomes() == ["deadline_exceeded"]


async def test_the_server_s_own_deadline_holds_for_callers_that_have_none_or_a_later_one() -> None:
    async with running(admission=AdmissionConfig(max_deadline_s=30.0)) as run:
        run.engine.answer = [([EOS], FinishReason.STOP, None)]

        await collect(run, text_request(request_id="without"))
        async for _ in run.inference.Generate(text_request(request_id="later"), timeout=60.0):
            pass

        assert run.engine.deadlines == [30.0, 30.0]


async def test_a_deadline_that_the_engine_notices_ends_the_stream_with_its_status() -> None:
    async with running() as run:
        run.engine.answer = [([HELLO], FinishReason.DEADLINE, DeadlineExceeded("too late"))]

        error = await refused(run, text_request())

        assert (error.code(), error.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
        assert run.engine.cancelled == []


async def test_what_was_produced_before_an_error_is_delivered_before_its_status() -> None:
    async with running() as run:
        run.engine.answer = [([HELLO], FinishReason.FAILED, WorkerLost("it was killed"))]
        call = run.inference.Generate(text_request())

        delta = await call.read()

        assert delta == inference_pb2.GenerateResponse(request_id="drawn", token_ids=[HELLO], text="hello")
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await run.metrics.outcomes() == ["unavailable"]


async def test_cancel_ends_the_named_requests_and_only_those() -> None:
    async with running() as run:
        call = run.inference.Generate(text_request(request_id="a"))
        await run.engine.submitted.wait()

        await run.inference.Cancel(inference_pb2.CancelRequest(request_ids=["a", "a", "unknown", ""]))

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.CANCELLED, "the request was cancelled")
        assert run.engine.cancelled == ["a", "a", "unknown", ""]
        assert await run.metrics.outcomes() == ["cancelled"]


@pytest.mark.parametrize(
    ("refusal", "code", "outcome"),
    [
        (QueueFull(9, 9, 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "resource_exhausted"),
        (NotServing("the server is draining"), grpc.StatusCode.UNAVAILABLE, "unavailable"),
    ],
)
async def test_an_engine_that_refuses_is_answered_with_its_status(
    refusal: Exception, code: grpc.StatusCode, outcome: str
) -> None:
    async with running() as run:
        run.engine.refusal = refusal

        error = await refused(run, text_request())

        assert error.code() is code
        assert str(from_rpc_error(error)) == str(refusal)
        assert await run.metrics.outcomes() == [outcome]


async def test_an_unexpected_exception_is_internal_and_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as run:
        run.engine.refusal = RuntimeError("secret")

        error = await refused(run, text_request())

        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (error.details() or "")
        assert await run.metrics.outcomes() == ["internal"]
        assert "rpc_failed" in [record.message for record in caplog.records]


async def test_a_request_s_numbers_are_counted_once() -> None:
    # The clock is read at the start of the server, at arrival, at each delivery and at the end.
    async with running(clock=[0.0, 10.0, 10.5, 10.75, 11.75, 12.0]) as run:
        call = run.inference.Generate(text_request("hello Paris"))
        await run.engine.submitted.wait()
        stream = run.engine.streams[RequestId("drawn")]
        stream.put((HELLO,), None, None, 0.0)
        await call.read()
        stream.put((HELLO,), None, None, 0.0)
        await call.read()
        stream.put((HELLO, EOS), FinishReason.STOP, None, 0.0)
        await call.read()
        await run.metrics.outcomes()

        assert run.metrics.counts == [
            ("dihedral_prompt_tokens_total", 2, ()),
            ("dihedral_requests_total", 1, ("stop",)),
        ]
        assert run.metrics.observations == [
            ("dihedral_time_to_first_token_seconds", 0.5, ()),
            ("dihedral_inter_token_latency_seconds", 0.25, ()),
            ("dihedral_inter_token_latency_seconds", 0.5, ()),
            ("dihedral_inter_token_latency_seconds", 0.5, ()),
            ("dihedral_request_latency_seconds", 2.0, ("stop",)),
            ("dihedral_request_prompt_tokens", 2, ()),
            ("dihedral_request_output_tokens", 4, ()),
        ]


async def test_a_finished_request_is_logged_once_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running() as run:
        run.engine.answer = [([HELLO, EOS], FinishReason.STOP, None)]

        await collect(run, text_request("Paris", request_id="mine"))
        await run.metrics.outcomes()

        (record,) = [record for record in caplog.records if record.message == "request_finished"]
        fields = vars(record)
        assert record.levelno == logging.INFO
        assert (fields["request_id"], fields["model"], fields["outcome"]) == ("mine", "small", "stop")
        assert (fields["num_prompt_tokens"], fields["num_output_tokens"]) == (3, 2)
        assert not any("Paris" in str(value) or "hello" in str(value) for value in fields.values())


async def test_a_refusal_is_logged_with_its_reason_and_not_with_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running() as run:
        await refused(run, text_request(request_id="\x1b[31mred"))
        await run.metrics.outcomes()

        (record,) = [record for record in caplog.records if record.message == "request_finished"]
        assert vars(record)["outcome"] == "invalid_argument"
        assert vars(record)["reason"] == "INVALID_REQUEST"
        assert vars(record)["violations"] == ["request_id NOT_PRINTABLE_ASCII"]
        assert not hasattr(record, "request_id")


async def test_many_streams_at_once_each_get_their_own_tokens() -> None:
    async with running() as run:
        run.engine.answer = [([HELLO], None, None), ([PARIS], FinishReason.LENGTH, None)]
        requests = [text_request(request_id=f"r{index}") for index in range(20)]

        streams = await asyncio.gather(*(collect(run, request) for request in requests))

        assert [stream[0].request_id for stream in streams] == [f"r{index}" for index in range(20)]
        assert {"".join(response.text for response in stream) for stream in streams} == {"hello Paris"}
        assert await run.metrics.outcomes(20) == ["length"] * 20
