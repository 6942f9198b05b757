"""Fakes with the real interfaces, and short ways to make the values that tests start from."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from plugins.types import (
    Admission,
    BlockId,
    FinishReason,
    ModelInfo,
    Request,
    RequestId,
    Row,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenId,
    TokenizerBundle,
    WorkerInfo,
)

VOCAB_SIZE = 1000
EOS = TokenId(2)


def request(
    request_id: str, prompt: Iterable[int] = range(3, 8), max_tokens: int = 4, ignore_eos: bool = True
) -> Request:
    """A valid request, as admission would make it."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=ignore_eos)
    return Request(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(TokenId(token_id) for token_id in prompt),
        sampling=sampling,
    )


def worker_info(
    num_blocks: int = 64, block_size: int = 4, max_sequences: int = 8, max_step_tokens: int = 32, name: str = "fake"
) -> WorkerInfo:
    """A small worker."""
    return WorkerInfo(
        model=ModelInfo(
            name=name,
            architecture="FakeForCausalLM",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=256,
            eos_token_ids=(EOS,),
            num_parameters=0,
        ),
        incarnation="one",
        num_blocks=num_blocks,
        block_size=block_size,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        kv_cache_dtype="float32",
        kv_bytes=0,
        tokenizer_sha256="",
        load_s=0.0,
    )


def next_token(token_ids: Iterable[int]) -> TokenId:
    """What the fake model says after these tokens: a pure function of them, so that any mix-up shows."""
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id + 1) % 1_000_003
    return TokenId(3 + value % (VOCAB_SIZE - 3))


def expected_output(prompt: Iterable[int], num_tokens: int) -> tuple[TokenId, ...]:
    """What the fake model answers to a prompt, whatever happens to the request on the way."""
    token_ids = [TokenId(token_id) for token_id in prompt]
    start = len(token_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return tuple(token_ids[start:])


class PlanViolation(AssertionError):
    """A plan asked for what no scheduler may ask for."""


@dataclass(slots=True)
class _Row:
    admission: Admission
    token_ids: list[TokenId]
    blocks: list[BlockId]
    num_computed: int
    is_finished: bool = False


@dataclass(slots=True)
class FakeWorker:
    """Carries plans out at once, as a real worker would in time, and checks each one (invariants I3, I4, I5).

    Its memory is real in one respect: each block remembers which tokens were written into it, and a row that reads a
    block in which somebody else has written since fails the test.
    """

    info: WorkerInfo = field(default_factory=worker_info)
    eos_after: dict[RequestId, int] = field(default_factory=dict)  # output length at which a request meets its end
    num_steps: int = 0
    rows: dict[Row, _Row] = field(default_factory=dict)
    _last_seq: int = 0
    _slots: dict[tuple[BlockId, int], tuple[TokenId, ...]] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. Raises: PlanViolation."""
        self._check(plan.seq == self._last_seq + 1, f"seq {plan.seq} after {self._last_seq}")
        self._last_seq = plan.seq
        self.num_steps += 1
        for row in plan.released_rows:
            self._check(row in self.rows, f"release of row {row}, which holds nothing")
            del self.rows[row]
        for admission in plan.admitted:
            self._check(admission.row not in self.rows, f"row {admission.row} is admitted twice")
            self._check(0 <= admission.row < self.info.max_sequences, f"row {admission.row} is out of range")
            self.rows[admission.row] = _Row(
                admission, list(admission.token_ids), list(admission.block_ids), admission.num_cached_tokens
            )
        named = [chunk.row for chunk in plan.chunks]
        self._check(len(named) == len(set(named)), f"a row is named twice: {named}")
        self._check(plan.num_tokens <= self.info.max_step_tokens, f"{plan.num_tokens} tokens in one step")
        rows: list[Row] = []
        counts: list[int] = []
        tokens: list[TokenId] = []
        finishes: list[FinishReason | None] = []
        for chunk in plan.chunks:
            self._check(chunk.row in self.rows, f"chunk for row {chunk.row}, which holds nothing")
            held = self.rows[chunk.row]
            held.blocks.extend(chunk.new_blocks)
            if held.is_finished:
                rows.append(chunk.row)
                counts.append(0)
                finishes.append(None)
                continue
            self._compute(held, chunk.num_tokens)
            if held.num_computed == len(held.token_ids):
                token, finish = self._sample(held)
                rows.append(chunk.row)
                counts.append(1)
                tokens.append(token)
                finishes.append(finish)
        self._check_tables()
        return StepResult(
            seq=plan.seq, rows=tuple(rows), counts=tuple(counts), token_ids=tuple(tokens), finishes=tuple(finishes)
        )

    def _compute(self, row: _Row, num_tokens: int) -> None:
        end = row.num_computed + num_tokens
        self._check(end <= len(row.token_ids), f"{row.admission.request_id} computes {end} of {len(row.token_ids)}")
        size = self.info.block_size
        self._check(end <= len(row.blocks) * size, f"{row.admission.request_id}: {end} tokens in {row.blocks}")
        for position in range(end):
            slot = (row.blocks[position // size], position % size)
            history = tuple(row.token_ids[: position + 1])
            if position >= row.num_computed:
                self._slots[slot] = history
            else:
                self._check(self._slots.get(slot) == history, f"{row.admission.request_id} reads a foreign {slot}")
        row.num_computed = end

    def _sample(self, row: _Row) -> tuple[TokenId, FinishReason | None]:
        sampling = row.admission.sampling
        num_output = len(row.token_ids) - row.admission.num_prompt_tokens + 1
        token = next_token(row.token_ids)
        finish: FinishReason | None = None
        if self.eos_after.get(row.admission.request_id) == num_output and not sampling.ignore_eos:
            token, finish = EOS, FinishReason.STOP
        elif num_output == sampling.max_tokens:
            finish = FinishReason.LENGTH
        row.token_ids.append(token)
        row.is_finished = finish is not None
        return token, finish

    def _check_tables(self) -> None:
        held = [block for row in self.rows.values() for block in row.blocks]
        self._check(len(held) == len(set(held)), f"a block is in two tables: {sorted(held)}")

    def _check(self, holds: bool, message: str) -> None:
        if not holds:
            raise PlanViolation(message)


class FakeWorkerHandle:
    """A WorkerHandle over a FakeWorker. `crash` makes it go away as a killed worker would."""

    def __init__(self, worker: FakeWorker, bundle: TokenizerBundle | None = None) -> None:
        self.worker = worker
        self.is_closed = False
        self.closed = asyncio.Event()
        self._bundle = bundle
        self._queue: asyncio.Queue[StepResult | Exception | None] = asyncio.Queue()

    async def describe(self) -> WorkerInfo:
        return self.worker.info

    async def tokenizer(self) -> TokenizerBundle:
        if self._bundle is None:
            raise AssertionError("this fake was given no tokenizer")
        return self._bundle

    async def open(self) -> WorkerInfo:
        self.worker.rows.clear()
        self.worker._last_seq = 0
        return self.worker.info

    def submit(self, plan: StepPlan) -> None:
        self._queue.put_nowait(self.worker.execute(plan))

    def crash(self, error: Exception) -> None:
        """End `results` with this error."""
        self._queue.put_nowait(error)

    async def results(self) -> AsyncIterator[StepResult]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def close(self) -> None:
        self.is_closed = True
        self.closed.set()
        self._queue.put_nowait(None)
