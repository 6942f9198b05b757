"""The logits processor, line by line, as whoever writes one meets it in process: its calls, its rows, its failures."""

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from control_plane.engine.local import LocalEngine
from control_plane.scheduling.config import SchedulerConfig
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.factory import build_runner
from gpu_worker.kv.cache import KVCache
from gpu_worker.models.registry import Model
from gpu_worker.runner.inputs import StepInputs
from gpu_worker.runner.model_runner import ModelRunner
from plugins.errors import InvalidConfig, InvalidRequest, PluginFailed
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.logits_loading import load_processors
from plugins.types import FinishReason, RequestId, Row, SamplingParams, TokenId
from tests.unit.gpu_worker.tiny import CONFIG, OUTPUTS, PROMPTS, admission, chunk, loaded_model, plan, run, tokens_of

HERE = "tests.contract.test_processor_hook"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Force(LogitsProcessor):
    """Makes every token after the first `after` ones of the output the token `force`. It reads its history."""

    extra_arg_names: ClassVar[Sequence[str] | None] = ("force", "after")

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        self.states = req_states
        self.forces: dict[int, tuple[int, int]] = {}  # of the rows that are accepted

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self.forces.pop(req_idx, None)
        args = sampling_params.extra_args
        if "force" in args:
            self.forces[req_idx] = (args["force"], args.get("after", 0))
        return req_idx in self.forces

    def apply_staged_writes(self) -> None: ...

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        for row, req_idx in enumerate(ctx.expanded_idx_mapping.tolist()):
            token_id, after = self.forces.get(req_idx, (0, 1 << 30))
            if int(self.states.total_len[req_idx] - self.states.prompt_len[req_idx]) >= after:
                logits[row] = float("-inf")
                logits[row, token_id] = 0.0
        return logits


@contextmanager
def local_engine(*processors: type[Any] | str, **keys: Any) -> Iterator[LocalEngine]:
    keys = {"num_blocks": 64, "max_model_len": 512} | keys
    with LocalEngine(load_format="dummy", dtype="float32", threads=1, logits_processors=processors, **keys) as engine:
        yield engine


def asking(sampling: SamplingParams = GREEDY, **extra_args: Any) -> SamplingParams:
    return replace(sampling, extra_args=extra_args)


# -- when it is called --------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A model that writes down when it runs."""

    model: Model
    calls: list[str]

    def forward(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        self.calls.append("forward")
        return self.model.forward(inputs, cache)

    def head(self, hidden_RE: Tensor) -> Tensor:
        return self.model.head(hidden_RE)


class Witness(LogitsProcessor):
    """Accepts every row, changes nothing, and writes down what it is told and what it can read then."""

    extra_arg_names: ClassVar[Sequence[str] | None] = ()
    calls: ClassVar[list[str]] = []
    fails: ClassVar[bool] = False

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        self._states = req_states
        self._new: list[Row] = []

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self.calls.append(f"add_request {req_idx}")
        self._new.append(req_idx)
        return True

    def apply_staged_writes(self) -> None:
        self.calls.append("apply_staged_writes" + "".join(self._seen(row) for row in self._new))
        self._new.clear()
        if Witness.fails:
            raise LookupError("no such table")

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        self.calls.append(f"apply {ctx.idx_mapping_np.tolist()} at {ctx.pos.tolist()}")
        return logits

    def _seen(self, row: Row) -> str:
        total, prompt, prefill = (
            int(column[row]) for column in (self._states.total_len, self._states.prompt_len, self._states.prefill_len)
        )
        tokens = self._states.all_token_ids[row, :total].tolist()
        return f" {row}: {tokens} of which {prompt} prompt, {prefill} known"


@pytest.fixture(autouse=True)
def forget() -> None:
    Witness.calls.clear()
    Witness.fails = False


def watched_runner(*processors: type[LogitsProcessor]) -> ModelRunner:
    loaded = loaded_model()
    watched = replace(loaded, model=Watched(loaded.model, Witness.calls), memory=DeviceMemory(torch.device("cpu")))
    return build_runner(CONFIG, watched, "tiny", load_processors(processors)).runner


def test_staged_writes_are_applied_once_a_step_when_the_tables_are_written_and_before_the_forward() -> None:
    runner = watched_runner(Witness)

    run(runner, plan(chunk(0, 2, range(8)), admitted=[admission(0, PROMPTS[1])]))
    run(runner, plan(chunk(0, 1)))
    run(runner, plan(released=[0]))

    assert Witness.calls == [
        "add_request 0",
        "apply_staged_writes 0: [11, 80] of which 2 prompt, 2 known",
        "forward",
        "apply [0] at [1]",
        "apply_staged_writes",
        "forward",
        "apply [0] at [2]",
        "apply_staged_writes",
    ]


def test_a_step_that_repeats_itself_applies_them_before_each_forward() -> None:
    runner = watched_runner(Witness)
    run(runner, plan(chunk(0, 2, range(8)), admitted=[admission(0, PROMPTS[1])]))
    Witness.calls.clear()

    run(runner, replace(plan(chunk(0, 1)), decode_steps=2))

    assert Witness.calls == [
        "apply_staged_writes",
        "forward",
        "apply [0] at [2]",
        "apply_staged_writes",
        "forward",
        "apply [0] at [3]",
    ]


def test_a_chunk_in_the_middle_of_a_prompt_has_no_row_of_logits() -> None:
    runner = watched_runner(Witness)

    run(runner, plan(chunk(0, 4, range(8)), admitted=[admission(0, PROMPTS[0])]))

    assert [call for call in Witness.calls if call.startswith("apply [")] == []


def test_who_comes_back_with_output_is_added_anew_with_its_history_in_place() -> None:
    runner = watched_runner(Witness)
    history = (*PROMPTS[1], *OUTPUTS[1][:3])

    result = run(runner, plan(chunk(2, 5, range(8)), admitted=[admission(2, history, num_prompt_tokens=2)]))

    assert Witness.calls[1] == ("apply_staged_writes 2: [11, 80, 68, 69, 76] of which 2 prompt, 5 known")
    assert result.token_ids == (OUTPUTS[1][3],)


def test_what_it_raises_in_apply_staged_writes_fails_rows_of_other_steps_too_when_their_turn_comes() -> None:
    """B083."""
    runner = watched_runner(Witness)
    run(
        runner,
        plan(chunk(0, 2, range(8)), chunk(1, 2, range(8, 16)), admitted=[admission(row, PROMPTS[1]) for row in (0, 1)]),
    )

    Witness.fails = True
    first = run(runner, plan(chunk(0, 1)))
    Witness.fails = False
    second = run(runner, plan(chunk(1, 1)))

    message = f"logits processor {HERE}:Witness failed in apply_staged_writes: LookupError: no such table"
    assert [(failure.row, failure.reason, failure.message) for failure in first.failures + second.failures] == [
        (0, "PLUGIN_FAILED", message),
        (1, "PLUGIN_FAILED", message),
    ]
    assert tokens_of(first) == tokens_of(second) == {}


# -- what it is given ---------------------------------------------------------------------------------------------


def test_it_is_built_with_what_it_may_know_and_its_own_section() -> None:
    class Curious(Witness):
        name = "curious"
        seen: ClassVar[list[tuple[ProcessorConfig, RequestStates]]] = []

        def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
            super().__init__(config, req_states)
            self.seen.append((config, req_states))

    with local_engine(Curious, logits_processor_config={"curious": {"depth": 3}}, max_sequences=8) as engine:
        model = engine.model.worker.model

    ((config, states),) = Curious.seen
    assert config == ProcessorConfig(
        model="dummy",
        dtype="float32",
        vocab_size=model.vocab_size,
        max_model_len=512,
        max_num_reqs=8,
        eos_token_ids=model.eos_token_ids,
        device="cpu",
        section={"depth": 3},
    )
    assert states.all_token_ids.shape == (8, 512)
    assert (states.max_num_reqs, states.vocab_size, states.device) == (8, model.vocab_size, torch.device("cpu"))
    with pytest.raises(AttributeError):
        states.total_len = torch.zeros(8)  # type: ignore[misc]  # it is read-only
    assert not hasattr(states, "admit")


def test_the_same_class_given_twice_is_two_processors_applied_in_order() -> None:
    class Numbered(Witness):
        order: ClassVar[list[int]] = []
        num_built: ClassVar[list[int]] = []

        def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
            super().__init__(config, req_states)
            self._number = len(self.num_built)
            self.num_built.append(self._number)

        def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
            self.order.append(self._number)
            return logits

    with local_engine(Numbered, Numbered) as engine:
        engine.generate([[1, 2, 3]], replace(GREEDY, max_tokens=2))
        places = engine.model.worker.logits_processors

    assert Numbered.order == [0, 1, 0, 1]
    assert [place.rpartition(".")[2] for place in places] == ["Numbered", "Numbered"]


@pytest.mark.parametrize("error", [OSError("no such file"), SystemExit("no such file")])
def test_what_it_raises_while_it_is_built_stops_the_start_and_names_it(error: BaseException) -> None:
    class Fragile(Witness):
        def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
            raise error

    said = f"Fragile failed in __init__: {type(error).__name__}: no such file; it is of no installed"
    with (
        pytest.raises(InvalidConfig, match=said),
        local_engine(Fragile),
    ):
        pass


def test_one_that_declares_nothing_is_warned_of_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    class Undeclared(Witness):
        extra_arg_names = None

    with local_engine(Undeclared, Witness):
        pass

    warned = [record for record in caplog.records if record.message == "logits_processor_undeclared"]
    assert [(record.levelno, record.__dict__["place"].endswith("Undeclared")) for record in warned] == [
        (logging.WARNING, True)
    ]


# -- what it does to requests -------------------------------------------------------------------------------------


def test_it_changes_the_requests_that_ask_for_it_and_no_others() -> None:
    with local_engine(Force) as engine:
        (plain,) = engine.generate([[1, 2, 3]], GREEDY)
        engine.add_request("asking", [4, 5, 6], asking(force=7, after=2))
        (beside,) = engine.generate([[1, 2, 3]], GREEDY)
        (forced,) = engine.generate([[1, 2, 3]], asking(force=7, after=2))

    assert beside.token_ids == plain.token_ids
    assert forced.token_ids == (*plain.token_ids[:2], *[7] * 10)


@pytest.mark.parametrize("answer", [ValueError("not today"), LookupError("no such table")])
def test_what_validate_params_raises_ends_that_request_alone(answer: Exception) -> None:
    class Picky(Force):
        extra_arg_names = ("force", "after", "pick")

        @classmethod
        def validate_params(cls, sampling_params: SamplingParams) -> None:
            if "pick" in sampling_params.extra_args:
                raise answer

    with local_engine(Picky) as engine:
        engine.add_request("neighbour", [1, 2, 3], asking(force=9))

        expected = InvalidRequest if isinstance(answer, ValueError) else PluginFailed
        with pytest.raises(expected, match=str(answer)):
            engine.add_request("picky", [1, 2, 3], asking(pick=1))

        ends = outputs(engine, ["neighbour"])

    assert ends == {"neighbour": ([9] * 12, FinishReason.LENGTH)}


def outputs(engine: LocalEngine, names: Sequence[str]) -> dict[str, tuple[list[int], FinishReason | None]]:
    """Step until all work is done, and return what each request produced."""
    found: dict[str, tuple[list[int], FinishReason | None]] = {name: ([], None) for name in names}
    while engine.has_work():
        for delivery in engine.step():
            token_ids, _ = found[delivery.request_id]
            found[delivery.request_id] = (token_ids + list(delivery.token_ids), delivery.finish)
    return found


def test_a_preempted_request_is_added_again_and_gets_the_tokens_that_it_would_have_got() -> None:
    added: list[tuple[int, int]] = []

    class Returning(Force):
        def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
            self.new = [*getattr(self, "new", []), req_idx]
            return super().add_request(req_idx, sampling_params)

        def apply_staged_writes(self) -> None:
            for row in getattr(self, "new", []):
                added.append((int(self.states.prompt_len[row]), int(self.states.prefill_len[row])))
            self.new = []

    prompts = [[number, 5, 6] for number in range(10, 14)]
    sampling = asking(replace(GREEDY, max_tokens=60), force=7, after=40)
    with local_engine(Returning) as engine:
        expected = [each.token_ids for each in engine.generate(prompts, sampling)]
    num_without = len(added)

    with local_engine(Returning, num_blocks=9, max_model_len=64) as engine:
        crowded = [each.token_ids for each in engine.generate(prompts, sampling)]

    assert crowded == expected
    assert num_without == 4
    assert any(prefill > prompt == 3 for prompt, prefill in added[num_without:])


class Tagged(Force):
    """Forces the token that the prompt begins with, if that is even; checks in each step whose rows it serves."""

    mistakes: ClassVar[list[str]] = []

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        for req_idx in ctx.idx_mapping_np.tolist():
            tag = int(self.states.all_token_ids[req_idx, 0])
            served = self.forces.get(req_idx)
            if served != ((tag, 2) if tag % 2 == 0 else None):
                self.mistakes.append(f"row {req_idx} of {tag} is served {served}")
        return super().apply(logits, ctx)


@dataclass
class Asked:
    """A request of the random run."""

    tag: int
    max_tokens: int
    is_cancelled: bool = False
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


def tagged(tag: int, max_tokens: int) -> SamplingParams:
    sampling = replace(GREEDY, max_tokens=max_tokens)
    return asking(sampling, force=tag, after=2) if tag % 2 == 0 else sampling


@pytest.mark.parametrize(
    ("is_ahead", "num_steps"),
    [(True, 1000), (False, 500), pytest.param(True, 5000, marks=pytest.mark.long)],
    ids=["run-ahead", "synchronous", "for long"],
)
def test_whoever_comes_and_goes_a_processor_serves_the_rows_of_those_who_asked(is_ahead: bool, num_steps: int) -> None:
    """B080."""
    Tagged.mistakes.clear()
    draw = random.Random(80)
    asked: dict[RequestId, Asked] = {}
    live: set[RequestId] = set()
    scheduler = SchedulerConfig(async_scheduling=is_ahead)
    with local_engine(Tagged, scheduler=scheduler, max_sequences=6, num_blocks=24, max_model_len=64) as engine:
        golden = {tag: engine.generate([[tag, 1, 2]], tagged(tag, 12))[0].token_ids for tag in range(3, 13)}
        for _ in range(num_steps):
            while len(live) < 6 and draw.random() < 0.5:
                request = Asked(draw.randrange(3, 13), draw.randrange(1, 13))
                name = engine.add_request(str(len(asked)), [request.tag, 1, 2], tagged(request.tag, request.max_tokens))
                asked[name] = request
                live.add(name)
            if live and draw.random() < 0.1:
                gone = draw.choice(sorted(live))
                engine.cancel(gone)
                asked[gone].is_cancelled = True
            for delivery in engine.step():
                told = asked[delivery.request_id]
                told.token_ids += delivery.token_ids
                if delivery.finish is not None:
                    told.finish = delivery.finish
                    live.discard(delivery.request_id)

    assert Tagged.mistakes == []
    ended = [each for each in asked.values() if each.finish is not None]
    assert len(ended) > num_steps // 3
    for each in ended:
        if each.finish is FinishReason.CANCELLED:
            assert each.is_cancelled
        else:
            assert (each.finish, len(each.token_ids)) == (FinishReason.LENGTH, each.max_tokens)
        assert tuple(each.token_ids) == golden[each.tag][: len(each.token_ids)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_and_bad_words_see_the_last_token_whether_plans_run_ahead_or_not(temperature: float) -> None:
    """B090."""
    sampling = SamplingParams(
        temperature=temperature,
        seed=90,
        max_tokens=64,
        ignore_eos=True,
        repetition_penalty=1.3,
        presence_penalty=1.0,
        frequency_penalty=0.5,
    )
    prompts = [[5, 6, 7, 8], [9, 10], [5, 6, 11]]

    def told(is_ahead: bool, **changes: Any) -> list[tuple[int, ...]]:
        with local_engine(scheduler=SchedulerConfig(async_scheduling=is_ahead)) as engine:
            return [each.token_ids for each in engine.generate(prompts, replace(sampling, **changes))]

    without = told(is_ahead=False)
    word, pair = pair_with_text(without)
    ahead, behind = told(is_ahead=True, bad_words=(word,)), told(is_ahead=False, bad_words=(word,))

    assert ahead == behind
    assert pair in pairs(without) and pair not in pairs(ahead)
    assert without != told(is_ahead=True, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)


def pairs(outputs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [pair for tokens in outputs for pair in pairwise(tokens)]


def pair_with_text(outputs: Sequence[Sequence[int]]) -> tuple[str, tuple[int, int]]:
    """Find two tokens in a row that a text is made of."""
    with local_engine() as engine:
        text = engine.model.text
        return next(
            (word, pair)
            for pair in pairs(outputs)
            if (word := text.decode([TokenId(each) for each in pair])).isprintable()
            and tuple(text.encode(word)) == pair
        )
