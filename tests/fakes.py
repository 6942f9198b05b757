"""Fakes with the real interfaces, and short ways to make the values that tests start from."""

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from plugins.types import (
    Admission,
    BlockCopy,
    BlockId,
    Chunk,
    FinishReason,
    ModelInfo,
    PromptLogprobs,
    Request,
    RequestId,
    Row,
    RowFailure,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenId,
    TokenizerBundle,
    TokenLogprobs,
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


def next_token(token_ids: Iterable[int], weights_version: str = "") -> TokenId:
    """What the fake model says after these tokens: a pure function of them, so that any mix-up shows."""
    value = _start(weights_version)
    for token_id in token_ids:
        value = _read(value, token_id)
    return _say(value)


def expected_output(prompt: Iterable[int], num_tokens: int, weights_version: str = "") -> tuple[TokenId, ...]:
    """What the fake model answers to a prompt, whatever happens to the request on the way."""
    value = _start(weights_version)
    for token_id in prompt:
        value = _read(value, token_id)
    output: list[TokenId] = []
    for _ in range(num_tokens):
        output.append(_say(value))
        value = _read(value, output[-1])
    return tuple(output)


def _start(weights_version: str) -> int:
    return 17 + zlib.crc32(weights_version.encode())


def _read(value: int, token_id: int) -> int:
    return (value * 31 + token_id + 1) % 1_000_003


def _say(value: int) -> TokenId:
    return TokenId(3 + value % (VOCAB_SIZE - 3))


def told(token_ids: Sequence[int], weights_version: str = "") -> TokenLogprobs:
    """What the fake model tells of the last one of these tokens."""
    value = _start(weights_version)
    for token_id in token_ids[:-1]:
        value = _read(value, token_id)
    return TokenLogprobs((TokenId(token_ids[-1]),), (-(value % 1000) / 100,), (1 + value % 7,))


def told_of_prompt(prompt: Sequence[int], weights_version: str = "") -> tuple[TokenLogprobs, ...]:
    """What it tells of a whole prompt, from place 1 on."""
    return tuple(told(prompt[:length], weights_version) for length in range(2, len(prompt) + 1))


def told_of_output(
    prompt: Sequence[int], output: Sequence[int], weights_version: str = ""
) -> tuple[TokenLogprobs, ...]:
    """What it tells of all tokens of an output."""
    lengths = range(1, len(output) + 1)
    return tuple(told((*prompt, *output[:length]), weights_version) for length in lengths)


class PlanViolation(AssertionError):
    """A plan asked for what no scheduler may ask for."""


@dataclass(slots=True)
class _Row:
    """One sequence on the fake worker. `histories[i]` stands for the tokens up to the i-th, in the request's scope."""

    admission: Admission
    token_ids: list[TokenId]
    blocks: list[BlockId]
    num_computed: int
    eos_after: int | None
    histories: list[int]
    value: int  # what the model has read
    is_finished: bool = False


@dataclass(slots=True)
class FakeWorker:
    """Carries plans out at once, as a real worker would in time, and checks each one (invariants I3, I4, I5, I6).

    Its memory is real in one respect: each slot remembers which tokens led to it, under which cache salt. A row that
    reads a slot with another history, or writes into a block that another row holds, fails the test.
    """

    info: WorkerInfo = field(default_factory=worker_info)
    eos_after: dict[RequestId, int] = field(default_factory=dict)  # output length at which a request meets its end
    salts: dict[RequestId, str] = field(default_factory=dict)  # of requests that may not share with those without
    siblings: set[RequestId] = field(default_factory=set)  # who may share blocks with a running one, reset or not
    failing: set[RequestId] = field(default_factory=set)  # whose next row fails
    waits: Callable[[RequestId], bool] = lambda request_id: False  # asked before each token: has the row to wait?
    num_steps: int = 0
    rows: dict[Row, _Row] = field(default_factory=dict)
    _last_seq: int = 0
    _memory: dict[BlockId, list[int]] = field(default_factory=dict)  # by slot of the block; 0: never written
    _written_at: dict[BlockId, int] = field(default_factory=dict)  # the step in which its first slot was written last
    _forgotten_at: int = 0  # hits of blocks that were written up to this step are wrong
    _holders: Counter[BlockId] = field(default_factory=Counter)  # rows whose table has the block

    def open(self) -> None:
        """Forget all rows and what the blocks hold; the next plan has seq 1."""
        self.rows.clear()
        self._memory.clear()
        self._written_at.clear()
        self._holders.clear()
        self._last_seq = 0

    def forbid_older_hits(self) -> None:
        """The prefix cache was reset: what was computed up to now must not be hit."""
        self._forgotten_at = self.num_steps

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. Raises: PlanViolation."""
        self._check(plan.seq == self._last_seq + 1, f"seq {plan.seq} after {self._last_seq}")
        self._last_seq = plan.seq
        self.num_steps += 1
        for row in plan.released_rows:
            self._check(row in self.rows, f"release of row {row}, which holds nothing")
            self._holders.subtract(self.rows.pop(row).blocks)
        for copy in plan.block_copies:
            self._copy(copy)
        for admission in plan.admitted:
            self._admit(admission)
        named = [chunk.row for chunk in plan.chunks]
        self._check(len(named) == len(set(named)), f"a row is named twice: {named}")
        self._check(plan.num_tokens <= self.info.max_step_tokens, f"{plan.num_tokens} tokens in one step")
        rows: list[Row] = []
        counts: list[int] = []
        tokens: list[TokenId] = []
        finishes: list[FinishReason | None] = []
        failures: list[RowFailure] = []
        logprobs: list[TokenLogprobs | None] = []
        prompts: list[PromptLogprobs] = []
        for chunk in plan.chunks:
            self._check(chunk.row in self.rows, f"chunk for row {chunk.row}, which holds nothing")
            held = self.rows[chunk.row]
            self._hold(held, chunk.new_blocks)
            if held.is_finished:
                rows.append(chunk.row)
                counts.append(0)
                finishes.append(None)
                continue
            if held.admission.request_id in self.failing:
                self.failing.discard(held.admission.request_id)
                held.is_finished = True
                failures.append(RowFailure(chunk.row, "ROW_FAILED", "the fake worker was told to fail it"))
                continue
            self._compute(held, chunk.num_tokens)
            if held.admission.sampling.prompt_logprobs is not None:
                prompts += self._tell_prompt(held, chunk)
            if held.num_computed < len(held.token_ids):
                continue
            if self.waits(held.admission.request_id):
                held.num_computed -= 1
                rows.append(chunk.row)
                counts.append(0)
                finishes.append(None)
            else:
                token, finish = self._sample(held)
                rows.append(chunk.row)
                counts.append(1)
                tokens.append(token)
                finishes.append(finish)
                is_told = held.admission.sampling.logprobs is not None
                logprobs.append(told(held.token_ids, self.info.weights_version) if is_told else None)
        return StepResult(
            seq=plan.seq,
            rows=tuple(rows),
            counts=tuple(counts),
            token_ids=tuple(tokens),
            finishes=tuple(finishes),
            failures=tuple(failures),
            logprobs=() if all(each is None for each in logprobs) else tuple(logprobs),
            prompt_logprobs=tuple(prompts),
        )

    def _tell_prompt(self, row: _Row, chunk: Chunk) -> list[PromptLogprobs]:
        """Each computed token tells of the place behind it, as far as that is of the prompt."""
        start = row.num_computed - chunk.num_tokens + 1
        end = min(row.num_computed + 1, row.admission.num_prompt_tokens)
        lengths = range(start + 1, end + 1)
        places = tuple(told(row.token_ids[:length], self.info.weights_version) for length in lengths)
        return [PromptLogprobs(chunk.row, start, places)] if places else []

    def _copy(self, copy: BlockCopy) -> None:
        """Copies come before admissions: nobody holds the destination yet."""
        self._check(copy.source in self._memory, f"block {copy.source} is copied, and nothing was written into it")
        self._check(self._holders[copy.destination] == 0, f"block {copy.destination} is copied over while it is held")
        self._memory[copy.destination] = list(self._memory[copy.source])
        self._written_at[copy.destination] = self._written_at[copy.source]

    def _admit(self, admission: Admission) -> None:
        request_id, token_ids = admission.request_id, admission.token_ids
        self._check(admission.row not in self.rows, f"row {admission.row} is admitted twice")
        self._check(0 <= admission.row < self.info.max_sequences, f"row {admission.row} is out of range")
        others = [row.admission.request_id for row in self.rows.values() if not row.is_finished]
        self._check(request_id not in others, f"{request_id} is admitted while it has a row")
        num_cached = admission.num_cached_tokens
        self._check(0 <= num_cached < len(token_ids), f"{request_id} has {num_cached} of {len(token_ids)} cached")
        history = 1 + zlib.crc32(self.salts.get(request_id, "").encode())
        value = _start(self.info.weights_version)
        histories: list[int] = []
        for index, token_id in enumerate(token_ids):
            if index >= admission.num_prompt_tokens and token_id != _say(value):
                raise PlanViolation(f"{request_id} is admitted with an output that is not its own")
            history = hash((history, token_id))
            value = _read(value, token_id)
            histories.append(history)
        row = _Row(admission, list(token_ids), [], num_cached, self.eos_after.get(request_id), histories, value)
        self.rows[admission.row] = row
        self._hold(row, admission.block_ids)
        if request_id not in self.siblings:
            for block_id in admission.block_ids[: -(-num_cached // self.info.block_size)]:
                is_new = self._written_at.get(block_id, 0) > self._forgotten_at
                self._check(is_new, f"{request_id} hits block {block_id}, which was to be forgotten")

    def _hold(self, row: _Row, blocks: tuple[BlockId, ...]) -> None:
        for block_id in blocks:
            if not 0 <= block_id < self.info.num_blocks or block_id in row.blocks:
                raise PlanViolation(f"block {block_id} is none of the worker's, or twice in the table of one row")
            row.blocks.append(block_id)
            self._holders[block_id] += 1

    def _compute(self, row: _Row, num_tokens: int) -> None:
        start, end, size = row.num_computed, row.num_computed + num_tokens, self.info.block_size
        request_id = row.admission.request_id
        if not start < end <= min(len(row.token_ids), len(row.blocks) * size):
            raise PlanViolation(f"{request_id} computes [{start}, {end}) of {len(row.token_ids)} in {row.blocks}")
        for index in range(-(-end // size)):
            block_id, first = row.blocks[index], index * size
            memory = self._memory.get(block_id)
            if memory is None:
                memory = self._memory[block_id] = [0] * size
            num_read = min(size, max(0, start - first))
            if memory[:num_read] != row.histories[first : first + num_read]:
                raise PlanViolation(f"{request_id} reads block {block_id}, which holds what others wrote")
            written = row.histories[max(start, first) : min(end, first + size)]
            if written:
                last = num_read + len(written)
                if self._holders[block_id] > 1 and memory[num_read:last] != written:
                    raise PlanViolation(f"{request_id} writes into block {block_id}, which others hold too")
                memory[num_read:last] = written
                if not num_read:
                    self._written_at[block_id] = self.num_steps
        row.num_computed = end

    def _sample(self, row: _Row) -> tuple[TokenId, FinishReason | None]:
        sampling = row.admission.sampling
        num_output = len(row.token_ids) - row.admission.num_prompt_tokens + 1
        token = _say(row.value)
        finish: FinishReason | None = None
        if row.eos_after == num_output and not sampling.ignore_eos:
            token, finish = EOS, FinishReason.STOP
        elif num_output == sampling.max_tokens:
            finish = FinishReason.LENGTH
        row.token_ids.append(token)
        row.histories.append(hash((row.histories[-1], token)))
        row.value = _read(row.value, token)
        row.is_finished = finish is not None
        return token, finish

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
        self.worker.open()
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
