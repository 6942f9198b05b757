"""The chain of logits processors: who is asked, when the stage is skipped, and what a failure says."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.sampling.processors import ProcessorChain
from plugins.errors import PluginFailed
from plugins.logits import LogitsContext, LogitsProcessor
from plugins.types import Row, SamplingParams


class Recorder(LogitsProcessor):
    """Accepts the rows it is told to, adds a number to everything, and writes down its calls."""

    def __init__(self, accepts: set[int], add: float, calls: list[str]) -> None:
        self._accepts, self._add, self._calls = accepts, add, calls

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self._calls.append(f"add_request {req_idx} +{self._add:g}")
        return req_idx in self._accepts

    def apply_staged_writes(self) -> None:
        self._calls.append(f"apply_staged_writes +{self._add:g}")

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        self._calls.append(f"apply +{self._add:g}")
        return (logits + self._add) * 2


class Failing(Recorder):
    """Raises in the method it is told to."""

    def __init__(self, method: str) -> None:
        super().__init__({0}, 0.0, [])
        self._method = method

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        if self._method == "add_request":
            raise KeyError("no such table")
        return True

    def apply_staged_writes(self) -> None:
        if self._method == "apply_staged_writes":
            raise KeyError("no such table")

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        if self._method == "apply":
            raise KeyError("no such table")
        return logits[:, 1:]


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


def test_an_empty_chain_returns_the_very_logits_it_was_given() -> None:
    chain = ProcessorChain((), num_rows=4)
    logits = torch.zeros(2, 8)

    chain.add_request(Row(0), SamplingParams())
    chain.apply_staged_writes()

    assert chain.apply(logits, context(0, 3)) is logits


def test_processors_change_the_logits_in_their_order() -> None:
    chain = ProcessorChain((Recorder({0}, 1.0, []), Recorder({0}, 10.0, [])), num_rows=4)
    chain.add_request(Row(0), SamplingParams())

    changed = chain.apply(torch.zeros(1, 2), context(0))

    assert changed.tolist() == [[24.0, 24.0]]


def test_a_batch_without_an_accepted_row_skips_the_stage() -> None:
    calls: list[str] = []
    chain = ProcessorChain((Recorder({2}, 1.0, calls),), num_rows=4)
    chain.add_request(Row(1), SamplingParams())
    chain.add_request(Row(2), SamplingParams())
    logits = torch.zeros(1, 8)

    skipped = chain.apply(logits, context(1))

    assert skipped is logits
    assert calls == ["add_request 1 +1", "add_request 2 +1"]


def test_every_processor_sees_a_batch_that_any_of_them_accepted_a_row_of() -> None:
    calls: list[str] = []
    chain = ProcessorChain((Recorder({0}, 1.0, calls), Recorder(set(), 2.0, calls)), num_rows=4)
    chain.add_request(Row(0), SamplingParams())
    chain.apply_staged_writes()

    chain.apply(torch.zeros(2, 8), context(3, 0))

    assert calls == [
        "add_request 0 +1",
        "add_request 0 +2",
        "apply_staged_writes +1",
        "apply_staged_writes +2",
        "apply +1",
        "apply +2",
    ]


def test_the_next_occupant_of_a_row_ends_the_claim_of_the_last_one() -> None:
    accepts = {0}
    chain = ProcessorChain((Recorder(accepts, 1.0, []),), num_rows=4)
    chain.add_request(Row(0), SamplingParams())
    accepts.clear()

    chain.add_request(Row(0), SamplingParams())

    logits = torch.zeros(1, 8)
    assert chain.apply(logits, context(0)) is logits


@pytest.mark.parametrize("method", ["add_request", "apply_staged_writes", "apply"])
def test_an_exception_becomes_plugin_failed_and_names_class_and_method(method: str) -> None:
    chain = ProcessorChain((Failing(method),), num_rows=4)

    with pytest.raises(PluginFailed, match=rf"test_processors\.Failing\.{method} failed: KeyError: 'no such table'"):
        chain.add_request(Row(0), SamplingParams())
        chain.apply_staged_writes()
        chain.apply(torch.zeros(1, 8), context(0))


def test_logits_of_another_shape_become_plugin_failed_with_both_shapes() -> None:
    chain = ProcessorChain((Failing("none"),), num_rows=4)
    chain.add_request(Row(0), SamplingParams())

    with pytest.raises(PluginFailed, match=r"returned \(1, 7\) torch.float32, not \(1, 8\) torch.float32"):
        chain.apply(torch.zeros(1, 8), context(0))
