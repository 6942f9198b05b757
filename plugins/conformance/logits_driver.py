"""A worker's tables without a worker: drives a logits processor through steps as the worker would.

Makes the batches; what must hold of the answers is the business of `logits.py`. Imports torch and numpy when it runs.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig
from plugins.types import Row, SamplingParams, TokenId

if TYPE_CHECKING:
    from torch import Tensor, device

VOCAB_SIZE = 500
MAX_MODEL_LEN = 64
NUM_ROWS = 8
NUM_PROMPT = 7
NUM_OUTPUT = 24
COMMON_TOKENS = (3, 4, 9)  # said often, so that outputs repeat themselves


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: what it wants, its prompt, and all that it will ever say, whatever the scores are."""

    sampling: SamplingParams
    prompt: tuple[int, ...]
    script: tuple[int, ...]

    def known(self, num_output: int) -> tuple[int, ...]:
        """The prompt and so much of the output."""
        return self.prompt + self.script[:num_output]


@dataclass(frozen=True, slots=True)
class Subject:
    """A class to check, and what is known of its arguments."""

    cls: type[LogitsProcessor]
    examples: tuple[Mapping[str, Any], ...]  # values of extra_args that it should take
    section: Mapping[str, Any] = field(default_factory=dict)  # its part of the configuration

    @property
    def plain(self) -> Asked:
        """A request that gives no arguments."""
        return _asked({}, 0)

    def requests(self, num_each: int = 2) -> tuple[Asked, ...]:
        """So many requests of each example; each has a prompt and an output of its own."""
        return tuple(_asked(args, n + 10 * kind) for n in range(num_each) for kind, args in enumerate(self.examples))

    def build(self, states: "Tables") -> LogitsProcessor:
        """Make an instance as a worker does."""
        make: Any = self.cls
        config = ProcessorConfig(
            model="checked",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_reqs=NUM_ROWS,
            eos_token_ids=(TokenId(2),),
            device="cpu",
            section=self.section,
        )
        built: LogitsProcessor = make(config, states)
        return built


class Tables:
    """The worker's tables, as `RequestStates` describes them."""

    def __init__(self) -> None:
        import torch

        self.all_token_ids = torch.zeros((NUM_ROWS, MAX_MODEL_LEN), dtype=torch.int32)
        self.prompt_len = torch.zeros(NUM_ROWS, dtype=torch.int32)
        self.prefill_len = torch.zeros(NUM_ROWS, dtype=torch.int32)
        self.total_len = torch.zeros(NUM_ROWS, dtype=torch.int32)

    @property
    def device(self) -> "device":
        return self.all_token_ids.device

    @property
    def max_num_reqs(self) -> int:
        return NUM_ROWS

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def columns(self) -> tuple["Tensor", ...]:
        return self.all_token_ids, self.prompt_len, self.prefill_len, self.total_len

    def write(self, row: int, token_ids: Sequence[int], num_prompt: int) -> None:
        """Let a sequence in, with what is known of it."""
        import torch

        self.all_token_ids[row, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)
        self.prompt_len[row] = num_prompt
        self.prefill_len[row] = len(token_ids)
        self.total_len[row] = len(token_ids)

    def append(self, row: int, token_id: int) -> None:
        self.all_token_ids[row, self.total_len[row]] = token_id
        self.total_len[row] += 1


@dataclass(frozen=True, slots=True)
class Fed:
    """One request's part of a step: its last token and drafts after it, or one token in the middle of its prompt."""

    row: int
    drafts: tuple[int, ...] = ()
    place: int | None = None  # of the token in the middle


@dataclass(frozen=True, slots=True)
class Step:
    """What a processor was given in one step, and what it made of it. R = rows of scores."""

    before: "Tensor"  # [R, VOCAB_SIZE] float32
    after: "Tensor"
    rows: tuple[int, ...]  # [R]: whose each is
    is_accepted: tuple[bool, ...]  # [R]
    tables_before: tuple["Tensor", ...]
    tables_after: tuple["Tensor", ...]

    def of(self, row: int) -> "Tensor":
        """The answers for one request: its rows, in their order."""
        return self.after[[place for place, owner in enumerate(self.rows) if owner == row]]


class Rig:
    """A processor and the tables that it reads. Does to both what a worker does, in its order."""

    def __init__(self, subject: Subject) -> None:
        self.tables = Tables()
        self.processor = subject.build(self.tables)
        self.asked: dict[int, Asked] = {}  # by row; whoever is released stays until somebody else comes, as on a worker
        self.num_output: dict[int, int] = {}
        self._is_accepted: dict[int, bool] = {}
        self._unwritten: list[int] = []

    def admit(self, row: int, asked: Asked, num_output: int = 0) -> bool:
        """Offer a row; its tables are written by the next step. Outputs come along after a preemption."""
        answer = self.processor.add_request(Row(row), asked.sampling)
        self.asked[row], self.num_output[row], self._is_accepted[row] = asked, num_output, bool(answer)
        self._unwritten.append(row)
        return answer

    def flush(self) -> None:
        """Write what is new to the tables, and let the processor bring its own state along."""
        for row in self._unwritten:
            asked = self.asked[row]
            self.tables.write(row, asked.known(self.num_output[row]), len(asked.prompt))
        self._unwritten.clear()
        self.processor.apply_staged_writes()

    def step(self, *batch: Fed) -> Step:
        """Carry a step out: its requests in the given order."""
        self.flush()
        before, ctx = self._score(batch)
        tables_before = tuple(column.clone() for column in self.tables.columns())
        after = self.processor.apply(before.clone(), ctx)
        rows = tuple(ctx.expanded_idx_mapping.tolist())
        return Step(
            before,
            after,
            rows,
            tuple(self._is_accepted[row] for row in rows),
            tables_before,
            tuple(column.clone() for column in self.tables.columns()),
        )

    def say(self, row: int) -> None:
        """Append the next token of the row's script."""
        self.tables.append(row, self.asked[row].script[self.num_output[row]])
        self.num_output[row] += 1

    def _score(self, batch: Sequence[Fed]) -> tuple["Tensor", LogitsContext]:
        import numpy as np
        import torch

        rows, local_places, tokens, places, scores, lengths = [], [], [], [], [], []
        for fed in batch:
            known = self.asked[fed.row].known(self.num_output[fed.row])
            first = len(known) - 1 if fed.place is None else fed.place
            text = (*known[: first + 1], *fed.drafts)
            for local, place in enumerate(range(first, len(text))):
                rows.append(fed.row)
                local_places.append(local)
                tokens.append(text[place])
                places.append(place)
                scores.append(scores_after(text[: place + 1]))
            lengths.append(max(len(known), len(text)))
        sequences = [fed.row for fed in batch]
        context = LogitsContext(
            expanded_idx_mapping=torch.tensor(rows),
            expanded_local_pos=torch.tensor(local_places),
            idx_mapping=torch.tensor(sequences),
            idx_mapping_np=np.array(sequences, dtype=np.int64),
            input_ids=torch.tensor(tokens),
            pos=torch.tensor(places),
            seq_lens_upper_bound_np=np.array(lengths, dtype=np.int64),
        )
        return torch.stack(scores), context


@lru_cache(maxsize=4096)
def scores_after(token_ids: tuple[int, ...]) -> "Tensor":
    """What the model says after these tokens: [VOCAB_SIZE] float32, a tenth of it -inf, as after a grammar; a few are
    -0.0, which is not 0.0 to who compares bits."""
    import torch

    seed = random.Random(str(token_ids)).getrandbits(63)
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(VOCAB_SIZE, generator=generator)
    scores.masked_fill_(torch.rand(VOCAB_SIZE, generator=generator) < 0.1, float("-inf"))
    return scores.masked_fill((torch.rand(VOCAB_SIZE, generator=generator) < 0.02) & scores.isfinite(), -0.0)


def answer_alone(subject: Subject, asked: Asked, num_output: int, drafts: tuple[int, ...] = ()) -> "Tensor":
    """What a new instance says to one request that has so much output: [1 + drafts, VOCAB_SIZE]."""
    rig = Rig(subject)
    rig.admit(0, asked, num_output)
    return rig.step(Fed(0, drafts)).of(0)


def mixed_steps(subject: Subject) -> Iterator[Step]:
    """Steps of a batch in which some ask for the processor and others do not, with drafts, in changing order."""
    draw = random.Random(1)
    rig = Rig(subject)
    requests = (*subject.requests()[: NUM_ROWS - 2], subject.plain, subject.plain)
    for row, asked in zip(draw.sample(range(NUM_ROWS), len(requests)), requests, strict=True):
        rig.admit(row, asked)
    for num_output in range(NUM_OUTPUT - 3):
        rows = list(rig.asked)
        draw.shuffle(rows)
        yield rig.step(
            *(Fed(row, rig.asked[row].script[num_output : num_output + draw.choice((0, 0, 2))]) for row in rows)
        )
        for row in rows:
            rig.say(row)


def _asked(args: Mapping[str, Any], seed: int) -> Asked:
    """A request whose output says the tokens that its arguments name, among a few others."""
    draw = random.Random(seed)
    alphabet = sorted({*COMMON_TOKENS, *(each for each in _numbers(args) if 0 <= each < VOCAB_SIZE)})
    tokens = tuple(draw.choice(alphabet) for _ in range(NUM_PROMPT + NUM_OUTPUT))
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, seed=seed, extra_args=args)
    return Asked(sampling, tokens[:NUM_PROMPT], tokens[NUM_PROMPT:])


def _numbers(value: Any) -> Iterator[int]:
    """Every whole number in a JSON value."""
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)
