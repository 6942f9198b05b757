"""The chain of logits processors: who is asked, when one is skipped, and what remains of one that fails."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.sampling.processors import LoadedInstance, ProcessorChain
from plugins.logits import LogitsContext, LogitsProcessor
from plugins.types import ProcessorInfo, Row, RowFailure, SamplingParams, TokenId


class Recorder(LogitsProcessor):
    """Accepts the rows it is told to, adds a number to those, and writes down its calls."""

    def __init__(self, accepts: set[int], add: float, calls: list[str] | None = None) -> None:
        self._accepts, self._add, self._calls = accepts, add, [] if calls is None else calls

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self._calls.append(f"add_request {req_idx} +{self._add:g}")
        return req_idx in self._accepts

    def apply_staged_writes(self) -> None:
        self._calls.append(f"apply_staged_writes +{self._add:g}")

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        self._calls.append(f"apply +{self._add:g}")
        mine = torch.tensor([int(row) in self._accepts for row in ctx.expanded_idx_mapping])
        return torch.where(mine[:, None], (logits + self._add) * 2, logits)


class Failing(Recorder):
    """Accepts some rows, and does what it must not in the method that it is told."""

    def __init__(self, method: str, act: Callable[..., object], accepts: set[int]) -> None:
        super().__init__(accepts, 0.0)
        self._method, self._act = method, act

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        if self._method == "add_request" and req_idx in self._accepts:
            return self._act()  # type: ignore[return-value]  # what it must not
        return req_idx in self._accepts

    def apply_staged_writes(self) -> None:
        if self._method == "apply_staged_writes":
            self._act()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        if self._method != "apply":
            return logits
        return self._act(logits)  # type: ignore[return-value]  # what it must not


def raising(*_: object) -> object:
    raise TypeError("no such table")


def spoiling(logits: Tensor) -> object:
    logits.fill_(float("nan"))
    raise TypeError("no such table")


def custom(processor: LogitsProcessor, name: str = "mine") -> LoadedInstance:
    return LoadedInstance(processor, ProcessorInfo(name=name, place="pkg.mod:Mine", distribution="pkg 1.0"))


def chain_of(*processors: LogitsProcessor, check_declined: bool = False) -> ProcessorChain:
    return ProcessorChain((), [custom(each) for each in processors], 8, check_declined)


def admit(chain: ProcessorChain, *rows: int) -> list[RowFailure | None]:
    return [chain.add_request(Row(row), SamplingParams()) for row in rows]


def context(*rows: int) -> LogitsContext:
    index = torch.tensor(rows)
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    return LogitsContext(
        expanded_idx_mapping=index,
        expanded_local_pos=zeros,
        idx_mapping=index,
        idx_mapping_np=np.array(rows),
        input_ids=zeros,
        pos=zeros,
        seq_lens_upper_bound_np=np.ones(len(rows), dtype=np.int64),
    )


def failed_rows(failures: Sequence[RowFailure]) -> list[int]:
    return [failure.row for failure in failures]


# -- who is asked -------------------------------------------------------------------------------------------------


def test_an_empty_chain_returns_the_very_logits_it_was_given() -> None:
    chain = chain_of()
    logits = torch.zeros(2, 8)

    admit(chain, 0)

    assert chain.apply_staged_writes() == []
    changed, failures = chain.apply(logits, context(0, 3))
    assert changed is logits and failures == []


def test_built_in_processors_come_first_then_the_others_in_their_order() -> None:
    chain = ProcessorChain((Recorder({0}, 1.0),), [custom(Recorder({0}, 10.0)), custom(Recorder({0}, 100.0))], 8)
    admit(chain, 0)

    changed, _ = chain.apply(torch.zeros(1, 2), context(0))

    assert changed.tolist() == [[248.0, 248.0]]


def test_a_batch_without_an_accepted_row_skips_the_stage() -> None:
    calls: list[str] = []
    chain = chain_of(Recorder({2}, 1.0, calls))
    admit(chain, 1, 2)
    logits = torch.zeros(1, 8)

    skipped, _ = chain.apply(logits, context(1))

    assert skipped is logits
    assert calls == ["add_request 1 +1", "add_request 2 +1"]


def test_a_processor_that_no_row_of_the_batch_needs_is_skipped_and_brings_its_state_up_all_the_same() -> None:
    calls: list[str] = []
    chain = chain_of(Recorder({0}, 1.0, calls), Recorder({5}, 2.0, calls))
    admit(chain, 0)
    chain.apply_staged_writes()

    chain.apply(torch.zeros(2, 8), context(3, 0))

    assert calls == [
        "add_request 0 +1",
        "add_request 0 +2",
        "apply_staged_writes +1",
        "apply_staged_writes +2",
        "apply +1",
    ]


def test_built_in_stages_bring_their_state_up_when_somebody_has_come() -> None:
    calls: list[str] = []
    chain = ProcessorChain((Recorder({0}, 1.0, calls),), [custom(Recorder({0}, 2.0, calls))], 8)

    for row in (None, 0, None):
        if row is not None:
            admit(chain, row)
        chain.apply_staged_writes()

    assert calls == [
        "apply_staged_writes +2",
        "add_request 0 +1",
        "add_request 0 +2",
        "apply_staged_writes +1",
        "apply_staged_writes +2",
        "apply_staged_writes +2",
    ]


@pytest.mark.parametrize("leaves", ["another moves in", "released", "cleared"])
def test_the_claim_on_a_row_ends_with_its_occupant(leaves: str) -> None:
    accepts = {0}
    chain = chain_of(Recorder(accepts, 1.0))
    admit(chain, 0)
    accepts.clear()

    match leaves:
        case "another moves in":
            admit(chain, 0)
        case "released":
            chain.release([Row(0)])
        case _:
            chain.clear()

    logits = torch.zeros(1, 8)
    assert chain.apply(logits, context(0))[0] is logits


def test_what_a_built_in_processor_raises_is_a_bug_and_comes_out() -> None:
    chain = ProcessorChain((Failing("apply", raising, {0}),), (), 8)
    admit(chain, 0)

    with pytest.raises(TypeError, match="no such table"):
        chain.apply(torch.zeros(1, 8), context(0))


# -- what remains of one that fails -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (raising, "TypeError: no such table"),
        (spoiling, "TypeError: no such table"),
        (lambda logits: None, "it returned NoneType, not a tensor"),
        (lambda logits: logits.numpy(), "it returned ndarray, not a tensor"),
        (lambda logits: logits[:, 1:], "it returned (3, 3) torch.float32 on cpu, not (3, 4) torch.float32 on cpu"),
        (lambda logits: logits.double(), "it returned (3, 4) torch.float64 on cpu, not (3, 4) torch.float32 on cpu"),
        (lambda logits: logits.to("meta"), "it returned (3, 4) torch.float32 on meta, not (3, 4) torch.float32 on cpu"),
        (
            lambda logits: logits.to_sparse(),
            "it returned (3, 4) torch.float32 on cpu torch.sparse_coo, not (3, 4) torch.float32 on cpu",
        ),
        (lambda logits: logits.resize_(0), "it returned (0,) torch.float32 on cpu, not (3, 4) torch.float32 on cpu"),
    ],
)
def test_a_processor_that_fails_in_apply_fails_the_rows_it_accepted_and_leaves_no_trace(
    act: Callable[..., object], said: str
) -> None:
    """B083."""
    chain = chain_of(Recorder({0, 1, 2}, 1.0), Failing("apply", act, {1, 6}), Recorder({0, 1, 2}, 3.0))
    admit(chain, 0, 1, 2, 6)

    changed, failures = chain.apply(torch.zeros(3, 4), context(2, 1, 0))

    message = f"logits processor mine (pkg.mod:Mine) failed in apply: {said}"
    assert failures == [RowFailure(Row(1), "PLUGIN_FAILED", message)]
    assert changed.tolist() == [[10.0] * 4] * 3


def test_a_row_that_failed_needs_no_processor_any_more() -> None:
    calls: list[str] = []
    chain = chain_of(Failing("apply", raising, {0}), Recorder({0}, 1.0, calls))
    admit(chain, 0)
    chain.apply(torch.zeros(1, 4), context(0))

    chain.apply(torch.zeros(1, 4), context(0))

    assert calls == ["add_request 0 +1"]


def test_a_view_that_repeats_a_row_becomes_a_tensor_that_later_stages_may_write() -> None:
    chain = chain_of(Failing("apply", lambda logits: torch.ones(1, 4).expand(2, 4), {0}))
    admit(chain, 0)

    changed, failures = chain.apply(torch.zeros(2, 4), context(0, 1))
    changed[0] = 5.0

    assert failures == []
    assert changed.tolist() == [[5.0] * 4, [1.0] * 4]


class Closed(Tensor):
    """Tells of itself, and lets nobody compute with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("__get__", "contiguous"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch leaves it untyped
        raise TypeError("closed")


@pytest.mark.parametrize(
    ("act", "failed"),
    [
        (lambda logits: torch._neg_view(-logits), []),  # numpy, which takes the best of a greedy row, refuses it
        (lambda logits: logits.as_subclass(Closed), [0]),
    ],
    ids=["negated lazily", "closed"],
)
def test_a_tensor_of_another_kind_becomes_a_plain_one_or_fails_its_own_rows(
    act: Callable[..., object], failed: list[int]
) -> None:
    chain = chain_of(Failing("apply", act, {0}))
    admit(chain, 0)

    changed, failures = chain.apply(torch.ones(2, 4), context(0, 1))

    assert failed_rows(failures) == failed
    assert type(changed) is Tensor
    assert changed.numpy().tolist() == [[1.0] * 4] * 2


def test_what_a_processor_writes_to_its_context_nobody_else_sees() -> None:
    class Scribbling(Recorder):
        def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
            for column in (ctx.expanded_idx_mapping, ctx.expanded_local_pos, ctx.idx_mapping, ctx.input_ids, ctx.pos):
                column.fill_(7)
            ctx.idx_mapping_np.fill(7)
            ctx.seq_lens_upper_bound_np.fill(7)
            return logits

    chain = chain_of(Scribbling({0}, 0.0), Recorder({0}, 1.0))
    admit(chain, 0)
    ctx = context(1, 0)

    changed, failures = chain.apply(torch.zeros(2, 2), ctx)

    assert failures == []
    assert changed.tolist() == [[0.0, 0.0], [2.0, 2.0]]
    assert (ctx.idx_mapping_np.tolist(), ctx.idx_mapping.tolist(), ctx.pos.tolist()) == ([1, 0], [1, 0], [0, 0])


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (raising, "TypeError: no such table"),
        (lambda: None, "it returned NoneType, not bool"),
        (lambda: 1, "it returned int, not bool"),
        (lambda: torch.tensor(True), "it returned Tensor, not bool"),
    ],
)
def test_a_processor_that_fails_in_add_request_fails_that_row(act: Callable[..., object], said: str) -> None:
    """B083."""
    chain = chain_of(Recorder({0, 1}, 1.0), Failing("add_request", act, {1}))

    message = f"logits processor mine (pkg.mod:Mine) failed in add_request: {said}"
    assert admit(chain, 0, 1) == [None, RowFailure(Row(1), "PLUGIN_FAILED", message)]
    changed, _ = chain.apply(torch.zeros(1, 4), context(0))
    assert changed.tolist() == [[2.0] * 4]


def test_what_a_processor_writes_to_parameters_nobody_else_sees() -> None:
    class Eating(Recorder):
        def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
            sampling_params.logit_bias.pop(TokenId(5), None)  # type: ignore[attr-defined]  # what it must not
            return bool(sampling_params.extra_args.pop("words")["first"].pop() == 7)  # type: ignore[attr-defined]

    chain = chain_of(Eating({0}, 1.0), Eating({0}, 2.0))
    params = SamplingParams(logit_bias={TokenId(5): 1.0}, extra_args={"words": {"first": [7]}})

    assert chain.add_request(Row(0), params) is None
    assert (params.extra_args, params.logit_bias) == ({"words": {"first": [7]}}, {5: 1.0})
    assert chain.apply(torch.zeros(1, 4), context(0))[0].tolist() == [[8.0] * 4]


def test_numpys_booleans_are_an_answer_too() -> None:
    chain = chain_of(Failing("add_request", lambda: np.True_, {0}))

    assert admit(chain, 0) == [None]


def test_a_processor_that_fails_in_apply_staged_writes_fails_every_row_it_accepted() -> None:
    """B083."""
    chain = chain_of(Failing("apply_staged_writes", raising, {1, 3, 5}), Recorder({0, 1}, 1.0))
    admit(chain, 0, 1, 3, 5)
    chain.release([Row(5)])

    failures = chain.apply_staged_writes()

    message = "logits processor mine (pkg.mod:Mine) failed in apply_staged_writes: TypeError: no such table"
    assert failures == [RowFailure(Row(row), "PLUGIN_FAILED", message) for row in (1, 3)]
    assert chain.apply_staged_writes() == []
    changed, _ = chain.apply(torch.zeros(1, 4), context(0))
    assert changed.tolist() == [[2.0] * 4]


def test_a_message_is_cut_and_can_always_be_sent(caplog: pytest.LogCaptureFixture) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    def fail(error: Exception) -> Callable[..., object]:
        def act(*_: object) -> object:
            raise error

        return act

    errors = (Mute(), ValueError("x" * 900), ValueError("\ud800"))
    chains = [chain_of(Failing("add_request", fail(error), {0})) for error in errors]

    said = [failure.message.partition("add_request: ")[2] for chain in chains for failure in admit(chain, 0) if failure]

    assert said == ["Mute: it has no message that can be read", f"ValueError: {'x' * 500}...", "ValueError: ?"]
    assert [record.message for record in caplog.records] == ["logits_processor_failed"] * 3
    assert "xxx" not in caplog.text


# -- --check-processors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [True, False])
def test_with_the_check_a_processor_that_touches_a_declined_row_fails_its_own(inplace: bool) -> None:
    def touch(logits: Tensor) -> Tensor:
        changed = logits if inplace else logits.clone()
        changed[1, 2] = 9.0
        return changed

    chain = chain_of(Failing("apply", touch, {0}), check_declined=True)
    admit(chain, 0, 1)

    changed, failures = chain.apply(torch.zeros(2, 4), context(0, 1))

    assert changed.tolist() == [[0.0] * 4] * 2
    assert [(failure.row, failure.message.partition("apply: ")[2]) for failure in failures] == [
        (0, "it changed rows that it had declined")
    ]


def test_with_the_check_a_processor_that_leaves_declined_rows_alone_passes_even_if_they_are_not_numbers() -> None:
    chain = chain_of(Recorder({0}, 1.0), check_declined=True)
    admit(chain, 0, 1)
    logits = torch.tensor([[0.0, 0.0], [float("nan"), float("-inf")]])

    changed, failures = chain.apply(logits, context(0, 1))

    assert failures == []
    assert changed[0].tolist() == [2.0, 2.0]
    assert torch.isnan(changed[1, 0])


def test_with_the_check_several_rows_of_one_request_belong_to_it() -> None:
    chain = chain_of(Recorder({0}, 1.0), check_declined=True)
    admit(chain, 0, 1)
    several = context(0, 0, 1)

    changed, failures = chain.apply(torch.zeros(3, 2), several)

    assert failed_rows(failures) == []
    assert changed.tolist() == [[2.0, 2.0], [2.0, 2.0], [0.0, 0.0]]


def test_with_the_check_a_row_that_another_processor_failed_is_none_that_was_declined() -> None:
    failing, sound = Failing("apply", raising, {0}), Recorder({0, 1}, 1.0)
    chain = chain_of(failing, sound, check_declined=True)
    admit(chain, 0, 1)

    changed, failures = chain.apply(torch.zeros(2, 8), context(0, 1))
    again, others = chain.apply(torch.zeros(2, 8), context(0, 1))  # of a plan that was made before

    assert failed_rows(failures) == [0]
    assert others == []
    assert changed[1].tolist() == again[1].tolist() == [2.0] * 8


@pytest.mark.parametrize("method", ["add_request", "apply_staged_writes", "apply"])
def test_what_would_end_the_thread_fails_the_row_like_any_exception(method: str) -> None:
    """A processor that calls sys.exit, or that raises what cannot be shown."""

    class Unspeakable(BaseException):
        def __str__(self) -> str:
            raise SystemExit

    def leaving(*_: object) -> object:
        raise Unspeakable

    chain = chain_of(Failing(method, leaving, {0}), Recorder({1}, 1.0))
    failures = [each for each in admit(chain, 0, 1) if each is not None]
    failures += chain.apply_staged_writes()

    changed, failed = chain.apply(torch.zeros(2, 8), context(0, 1))

    assert [(each.row, each.message) for each in (*failures, *failed)] == [
        (0, f"logits processor mine (pkg.mod:Mine) failed in {method}: Unspeakable: it has no message that can be read")
    ]
    assert changed[1].tolist() == [2.0] * 8
