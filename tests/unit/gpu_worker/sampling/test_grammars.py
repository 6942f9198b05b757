"""Rows are held to their grammars, token by token, and nobody waits for one that is slow.

Tokens of the small byte-level tokenizer: 2 ends an output, 3 + b is the byte b, and some texts have one of their own.
"""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from gpu_worker.sampling.grammar_reader import GrammarReader, GrammarState
from gpu_worker.sampling.grammars import MAX_IDLE_S, GrammarStage
from plugins.types import Admission, RequestId, Row, SamplingParams, TokenId
from tests.unit.control_plane.text.byte_level import VOCAB_SIZE, bundle, byte, merged

EOS = 2
PROMPT = (byte(ord("x")), byte(ord("y")))
HELLO = {merged("hello")}  # a text that cannot be another comes as the tokenizer would write it
HE_OR_HELLO = {merged("he"), merged("hell"), merged("hello"), byte(ord("h"))}


class Table:
    """Four rows of up to 100 tokens."""

    def __init__(self, device: str) -> None:
        self.num_tokens = np.zeros(4, dtype=np.int64)
        self.all_token_ids = torch.zeros((4, 100), dtype=torch.int32, device=device)

    def append(self, row: int, *token_ids: int) -> None:
        for token_id in token_ids:
            self.all_token_ids[row, int(self.num_tokens[row])] = token_id
            self.num_tokens[row] += 1


class Rig:
    """A stage over a table, whose rows are admitted and sampled as a runner would."""

    def __init__(
        self,
        make_reader: Callable[[], GrammarReader] | None = None,
        num_threads: int = 1,
        max_wait_s: float = 10.0,
        device: str = "cpu",
    ) -> None:
        self.table = Table(device)
        self.stage = GrammarStage(self.table, make_reader or reader, num_threads, max_wait_s)

    def admit(self, row: int, grammar: str, output: Sequence[int] = ()) -> None:
        self.table.num_tokens[row] = 0
        self.table.append(row, *PROMPT, *output)
        self.stage.admit(
            Admission(
                row=Row(row),
                request_id=RequestId(str(row)),
                token_ids=tuple(TokenId(token_id) for token_id in (*PROMPT, *output)),
                num_prompt_tokens=len(PROMPT),
                sampling=SamplingParams(grammar=grammar),
                block_ids=(),
                num_cached_tokens=0,
            )
        )

    def step(self, *rows: int, vocab_size: int = VOCAB_SIZE, is_alone: bool = False) -> list[set[int] | str | None]:
        """For each row: what may come next, why it failed, or None if it must wait."""
        rows_R = np.array(rows, dtype=np.int64)
        logits_RV = torch.zeros((len(rows), vocab_size), device=self.table.all_token_ids.device)
        self.stage.begin(rows_R)
        is_waiting, failures = self.stage.mask(logits_RV, rows_R, is_alone)
        outcomes: list[set[int] | str | None] = []
        for index, row in enumerate(rows):
            reasons = [failure.reason for failure in failures if failure.row == row]
            allowed = set(torch.nonzero(logits_RV[index] == 0).flatten().tolist())
            outcomes.append(reasons[0] if reasons else None if is_waiting[index] else allowed)
        return outcomes


def reader() -> GrammarReader:
    return GrammarReader(bundle().tokenizer_json, [TokenId(EOS)])


class HeldReader(GrammarReader):
    """Reads nothing before it is let go."""

    def __init__(self, may_read: threading.Event) -> None:
        super().__init__(bundle().tokenizer_json, [TokenId(EOS)])
        self._may_read = may_read

    def read(self, grammar: str) -> GrammarState:
        self._may_read.wait()
        return super().read(grammar)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_output_is_held_to_its_grammar_until_it_may_only_end(device: str) -> None:
    rig = Rig(device=device)
    rig.admit(0, 'start: "he" | "hello"')

    seen = [rig.step(0)[0]]
    for token_id in (merged("he"), merged("ll"), byte(ord("o"))):
        rig.table.append(0, token_id)
        seen.append(rig.step(0)[0])

    assert seen == [HE_OR_HELLO, {EOS, merged("ll"), byte(ord("l"))}, {byte(ord("o"))}, {EOS}]


def test_rows_without_a_grammar_keep_all_their_scores() -> None:
    rig = Rig()
    rig.admit(0, "")
    rig.admit(1, 'start: "hello"')

    free, held = rig.step(0, 1)

    assert free == set(range(VOCAB_SIZE))
    assert held == HELLO


def test_a_row_whose_grammar_is_not_read_yet_waits_and_its_neighbours_go_on() -> None:
    may_read = threading.Event()
    rig = Rig(lambda: HeldReader(may_read), max_wait_s=0.0)
    rig.admit(0, 'start: "hello"')
    rig.admit(1, "")

    waiting = [rig.step(0, 1), rig.step(0, 1)]
    may_read.set()
    while (ready := rig.step(0, 1))[0] is None:
        pass

    assert waiting == [[None, set(range(VOCAB_SIZE))]] * 2
    assert ready == [HELLO, set(range(VOCAB_SIZE))]


def test_a_row_that_comes_back_is_where_it_was() -> None:
    """After a preemption, or on another worker: the output so far is read again."""
    rig = Rig()
    rig.admit(0, 'start: "he" | "hello"', output=[merged("he")])
    rig.admit(1, 'start: "he" | "hello"')
    rig.step(1)
    rig.table.append(1, merged("he"))

    back, there = rig.step(0, 1)

    assert back == there == {EOS, merged("ll"), byte(ord("l"))}


def test_several_tokens_may_come_between_two_steps() -> None:
    rig = Rig()
    rig.admit(0, 'start: "hello"')

    rig.table.append(0, merged("he"), merged("ll"))

    assert rig.step(0) == [{byte(ord("o"))}]


def test_the_next_occupant_of_a_row_has_nothing_of_the_last() -> None:
    rig = Rig()
    rig.admit(0, 'start: "hello"')
    rig.step(0)

    rig.stage.release([Row(0)])
    rig.admit(0, "")
    free = rig.step(0)
    rig.admit(0, 'start: "b"')

    assert free == [set(range(VOCAB_SIZE))]
    assert rig.step(0) == [{byte(ord("b"))}]


def test_a_token_that_the_grammar_does_not_allow_fails_the_row_alone() -> None:
    """A processor may have forced it; the row is told again until it is released."""
    rig = Rig()
    rig.admit(0, 'start: "hello"')
    rig.admit(1, 'start: "hello"')
    rig.step(0, 1)
    rig.table.append(0, byte(ord("q")))

    assert rig.step(0, 1) == ["GRAMMAR_FAILED", HELLO]
    assert rig.step(0, 1) == ["GRAMMAR_FAILED", HELLO]


@pytest.mark.parametrize("grammar", ["start: b", 'start: "a" /[/'])
def test_a_grammar_that_admission_would_have_refused_fails_its_row(grammar: str) -> None:
    rig = Rig()
    rig.admit(0, grammar)

    assert rig.step(0) == ["GRAMMAR_FAILED"]


@pytest.mark.parametrize(
    "grammar",
    ["start: start", 'start: <|im_end|> "a"', 'start: "a" <|im_end|> "b"', 'start: "a" /[^\\x00-\\x{10FFFF}]/'],
)
def test_a_grammar_that_leads_nowhere_is_the_callers_fault_wherever_that_shows(grammar: str) -> None:
    rig = Rig()
    rig.admit(0, grammar)
    if rig.step(0) == [{byte(ord("a"))}]:
        rig.table.append(0, byte(ord("a")))

    assert rig.step(0) == ["INVALID_GRAMMAR"]


def test_a_grammar_that_becomes_too_complex_on_the_way_fails_its_row_with_that_reason() -> None:
    """B097: the limits hold for every step, not only for the first."""
    rig = Rig()
    rig.admit(0, 'start: s{1,1000}\ns: t{1,1000}\nt: u{1,1000}\nu: "a" | "b"')

    outcome = rig.step(0)[0]
    for _ in range(90):
        if outcome == "GRAMMAR_TOO_COMPLEX":
            break
        rig.table.append(0, byte(ord("a")))
        outcome = rig.step(0)[0]

    assert outcome == "GRAMMAR_TOO_COMPLEX"


def test_a_tokenizer_that_cannot_be_used_fails_the_rows_that_need_it() -> None:
    rig = Rig(lambda: GrammarReader(b'{"model": {"type": "Unheard"}}', [TokenId(EOS)]))
    rig.admit(0, 'start: "a"')
    rig.admit(1, "")

    assert rig.step(0, 1) == ["GRAMMAR_FAILED", set(range(VOCAB_SIZE))]


def test_tokens_that_only_the_model_has_are_not_allowed() -> None:
    """B102: a matrix that is filled up has more rows than the tokenizer knows tokens."""
    rig = Rig()
    rig.admit(0, "start: /(.|\\n)*/")

    (wide,), (narrow,) = rig.step(0, vocab_size=VOCAB_SIZE + 64), rig.step(0, vocab_size=100)

    assert isinstance(wide, set) and isinstance(narrow, set)
    assert max(wide) < VOCAB_SIZE
    assert narrow == {token_id for token_id in wide if token_id < 100}


def test_what_runs_ahead_of_an_output_that_has_ended_does_no_harm() -> None:
    """The step after the last token is launched before anybody has read that token."""
    rig = Rig()
    rig.admit(0, 'start: "he"')
    rig.step(0)

    ends = []
    for token_id in (merged("he"), EOS, EOS, EOS):
        rig.table.append(0, token_id)
        ends += rig.step(0)

    assert ends == [{EOS}] * 4


def test_many_rows_in_several_threads_stay_apart() -> None:
    rig = Rig(num_threads=3)
    for row in range(4):
        rig.admit(row, f'start: "{"abcd"[row] * 20}"')

    for _ in range(20):
        outcomes = rig.step(0, 1, 2, 3)
        assert outcomes == [{byte(ord(letter))} for letter in "abcd"]
        for row in range(4):
            rig.table.append(row, byte(ord("abcd"[row])))

    assert rig.step(3, 1) == [{EOS}, {EOS}]


def test_a_step_all_of_whose_rows_wait_is_not_computed_again_at_once() -> None:
    """The reading gets the core; a step with other rows in it goes on after the shorter time."""
    may_read = threading.Event()
    rig = Rig(lambda: HeldReader(may_read), max_wait_s=0.0)
    rig.admit(0, 'start: "hello"')
    rig.admit(1, 'start: "hello"')

    started_s = time.monotonic()
    waiting = [rig.step(0, 1, is_alone=True) for _ in range(4)]
    idle_s = time.monotonic() - started_s
    may_read.set()
    ready = waiting[-1]
    while None in ready:
        ready = rig.step(0, 1, is_alone=True)

    assert waiting == [[None, None]] * 4
    assert idle_s >= 4 * MAX_IDLE_S
    assert ready == [HELLO, HELLO]


def test_a_fault_of_the_library_fails_its_row_alone() -> None:
    class Panicking(GrammarReader):
        def read(self, grammar: str) -> GrammarState:
            if "panic" in grammar:
                raise SystemExit("as a panic of the library, it is no Exception")
            return super().read(grammar)

    rig = Rig(lambda: Panicking(bundle().tokenizer_json, [TokenId(EOS)]))
    rig.admit(0, 'start: "panic"')
    rig.admit(1, 'start: "hello"')

    assert rig.step(0, 1) == ["GRAMMAR_FAILED", HELLO]


def test_what_nobody_waits_for_any_more_is_not_read() -> None:
    may_read = threading.Event()
    read: list[str] = []

    class Noting(HeldReader):
        def read(self, grammar: str) -> GrammarState:
            state = super().read(grammar)
            read.append(grammar)
            return state

    rig = Rig(lambda: Noting(may_read))
    for row, letter in enumerate("abcd"):
        rig.admit(row, f'start: "{letter}"')
    rig.stage.release([Row(1)])
    rig.admit(2, 'start: "e"')
    may_read.set()

    outcomes = rig.step(0, 2, 3)

    assert outcomes == [{byte(ord(letter))} for letter in "aed"]
    assert read == [f'start: "{letter}"' for letter in "ade"]


def test_the_threads_end_when_the_stage_is_closed() -> None:
    rig = Rig(num_threads=2)
    for row, letter in enumerate("abcd"):
        rig.admit(row, f'start: "{letter}"')
    before = {each for each in threading.enumerate() if each.name.startswith("grammar")}
    rig.step(0, 1)

    started = {each for each in threading.enumerate() if each.name.startswith("grammar")} - before
    rig.stage.close()

    assert started
    assert not any(each.is_alive() for each in started)
