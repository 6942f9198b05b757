"""A worker that computes nothing and checks everything: does a plan ask for what a worker can do?

Follows the step protocol: release, copy, admit, forward. Which requests there are is told by its user.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from plugins.conformance.report import require
from plugins.types import (
    Admission,
    BlockCopy,
    BlockId,
    Chunk,
    FinishReason,
    Request,
    RequestId,
    Row,
    RowFailure,
    StepPlan,
    StepResult,
    TokenId,
    WorkerInfo,
)

FIRST_TOKEN = 3  # smaller ones are left to marks such as the end of a sequence


def say(token_ids: Iterable[TokenId], vocab_size: int) -> TokenId:
    """What the model of this worker says after these tokens: a pure function of them, so that any mix-up shows."""
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id + 1) % 1_000_003
    return TokenId(FIRST_TOKEN + value % (vocab_size - FIRST_TOKEN))


@dataclass(slots=True)
class _Row:
    request: Request
    token_ids: list[TokenId]
    histories: list[int]  # each stands for all tokens up to there, under the request's cache salt
    blocks: list[BlockId]
    num_computed: int
    is_finished: bool = False

    def append(self, token_id: TokenId) -> None:
        self.token_ids.append(token_id)
        before = self.histories[-1] if self.histories else zlib.crc32(self.request.cache_salt.encode())
        self.histories.append(hash((before, token_id)))


class PlanChecker:
    """Takes plans in order and answers each at once. Its user holds the answers back for as long as it likes.

    Every slot remembers the tokens that led to it, so a row that reads what others wrote is found.
    """

    def __init__(self, info: WorkerInfo) -> None:
        self.outputs: dict[RequestId, list[TokenId]] = {}  # sampled so far, with those that a request brought along
        self.failing: set[RequestId] = set()  # whose next row fails
        self.stop_after: dict[RequestId, int] = {}  # output length at which a request meets its end
        self.waits: Callable[[RequestId], bool] = lambda request_id: False  # asked before each token
        self._info = info
        self._requests: dict[RequestId, Request] = {}
        self._rows: dict[Row, _Row] = {}
        self._due: set[RequestId] = set()  # whose row the next plan has to release
        self._memory: dict[BlockId, list[int]] = {}  # by slot of the block; 0: never written
        self._holders: Counter[BlockId] = Counter()  # rows whose table has the block
        self._last_seq = 0

    def expect(self, request: Request) -> None:
        """From now on plans may admit this request."""
        self._requests[request.request_id] = request
        self.outputs[request.request_id] = list(request.output_token_ids)

    def owners(self) -> dict[Row, RequestId]:
        """Whose row is whose, since the last plan."""
        return {number: row.request.request_id for number, row in self._rows.items()}

    def forget(self, request_id: RequestId) -> None:
        """It has ended, or was cancelled: the next plan has to release its row, if it has one."""
        del self._requests[request_id]
        if any(row.request.request_id == request_id for row in self._rows.values()):
            self._due.add(request_id)

    def take(self, plan: StepPlan) -> StepResult:
        """Carry out a plan. Raises: CheckFailed: no worker could."""
        require(not plan.is_empty, f"plan {plan.seq} is empty; it must not be handed out")
        require(plan.seq == self._last_seq + 1, f"plan {plan.seq} came after plan {self._last_seq}")
        self._last_seq = plan.seq
        self._release(plan.released_rows)
        for copy in plan.block_copies:
            self._copy(copy)
        for admission in plan.admitted:
            self._admit(admission)
        return self._forward(plan)

    def _release(self, rows: Iterable[Row]) -> None:
        for number in rows:
            require(number in self._rows, f"row {number} is released, and holds nothing")
            row = self._rows.pop(number)
            self._holders.subtract(row.blocks)
            self._due.discard(row.request.request_id)
        require(not self._due, f"the plan after the end of {sorted(self._due)} does not release their rows")

    def _copy(self, copy: BlockCopy) -> None:
        require(copy.source in self._memory, f"block {copy.source} is copied, and nothing was written into it")
        self._check_block(copy.destination)
        require(self._holders[copy.destination] == 0, f"block {copy.destination} is copied over while a row holds it")
        self._memory[copy.destination] = list(self._memory[copy.source])

    def _admit(self, admission: Admission) -> None:
        request_id, number = admission.request_id, admission.row
        require(0 <= number < self._info.max_sequences, f"row {number} is none of {self._info.max_sequences}")
        require(number not in self._rows, f"row {number} is given to {request_id}, and holds another")
        require(request_id in self._requests, f"{request_id} is admitted, and has ended or never came")
        has_row = any(row.request.request_id == request_id for row in self._rows.values())
        require(not has_row, f"{request_id} is admitted while it has a row")
        request = self._requests[request_id]
        known = (*request.prompt_token_ids, *self.outputs[request_id])
        require(admission.token_ids == known, f"{request_id} is admitted with tokens that are not all of its own")
        num_prompt = len(request.prompt_token_ids)
        require(admission.num_prompt_tokens == num_prompt, f"{request_id} has {num_prompt} prompt tokens")
        require(admission.sampling == request.sampling, f"{request_id} is admitted with other sampling parameters")
        num_cached = admission.num_cached_tokens
        require(0 <= num_cached < len(known), f"{num_cached} of {len(known)} tokens of {request_id} are cached")
        is_told = request.sampling.prompt_logprobs is not None
        require(not (is_told and num_cached), f"{num_cached} tokens of {request_id}, which asks about each, are cached")
        row = _Row(request, [], [], [], num_cached)
        for token_id in known:
            row.append(token_id)
        self._rows[number] = row
        self._hold(row, admission.block_ids)
        require(num_cached <= len(row.blocks) * self._info.block_size, f"{request_id} lacks blocks of cached tokens")

    def _hold(self, row: _Row, blocks: Iterable[BlockId]) -> None:
        for block_id in blocks:
            self._check_block(block_id)
            require(block_id not in row.blocks, f"block {block_id} is twice in the table of {row.request.request_id}")
            row.blocks.append(block_id)
            self._holders[block_id] += 1

    def _check_block(self, block_id: BlockId) -> None:
        require(0 <= block_id < self._info.num_blocks, f"block {block_id} is none of {self._info.num_blocks}")

    def _forward(self, plan: StepPlan) -> StepResult:
        named = [chunk.row for chunk in plan.chunks]
        require(len(named) == len(set(named)), f"plan {plan.seq} names a row twice: {named}")
        most = self._info.max_step_tokens
        require(
            plan.num_tokens <= most, f"plan {plan.seq} computes {plan.num_tokens} tokens; a step has at most {most}"
        )
        produced: list[tuple[Row, list[TokenId], FinishReason | None]] = []
        failures: list[RowFailure] = []
        for chunk in plan.chunks:
            require(chunk.row in self._rows, f"plan {plan.seq} computes row {chunk.row}, which holds nothing")
            row = self._rows[chunk.row]
            self._hold(row, chunk.new_blocks)
            if row.is_finished:
                produced.append((chunk.row, [], None))
            elif row.request.request_id in self.failing:
                row.is_finished = True
                failures.append(RowFailure(chunk.row, "CHECKED", "the checking worker fails this row"))
            elif (answer := self._compute(row, chunk, plan.decode_steps)) is not None:
                produced.append((chunk.row, *answer))
        return StepResult(
            seq=plan.seq,
            rows=tuple(number for number, _, _ in produced),
            counts=tuple(len(tokens) for _, tokens, _ in produced),
            token_ids=tuple(token for _, tokens, _ in produced for token in tokens),
            finishes=tuple(finish for _, _, finish in produced),
            failures=tuple(failures),
        )

    def _compute(self, row: _Row, chunk: Chunk, num_steps: int) -> tuple[list[TokenId], FinishReason | None] | None:
        """Compute a chunk, as often as the plan says; None if it does not reach the end of the known tokens."""
        require(chunk.num_tokens >= 1, f"row {chunk.row} computes {chunk.num_tokens} tokens")
        require(num_steps == 1 or chunk.num_tokens == 1, f"row {chunk.row} is no decode, and runs {num_steps} times")
        tokens: list[TokenId] = []
        finish: FinishReason | None = None
        while finish is None and num_steps > 0:
            num_steps -= 1
            self._write(row, chunk.num_tokens)
            if row.num_computed < len(row.token_ids):
                require(num_steps == 0, f"row {chunk.row} repeats a chunk that is no decode")
                return None
            if self.waits(row.request.request_id):
                row.num_computed -= 1
                continue
            token, finish = self._sample(row)
            tokens.append(token)
        return tokens, finish

    def _write(self, row: _Row, num_tokens: int) -> None:
        """Check what the attention of these tokens reads, and write them."""
        start, end, size = row.num_computed, row.num_computed + num_tokens, self._info.block_size
        name = row.request.request_id
        require(end <= len(row.token_ids), f"{name} computes {end} tokens, and has {len(row.token_ids)}")
        require(end <= len(row.blocks) * size, f"{name} computes {end} tokens in {len(row.blocks)} blocks of {size}")
        for index in range(-(-end // size)):
            block_id, first = row.blocks[index], index * size
            slots = self._memory.setdefault(block_id, [0] * size)
            num_read = min(max(start - first, 0), size)
            held = row.histories[first : first + num_read]
            require(slots[:num_read] == held, f"{name} reads block {block_id}, which holds what others wrote")
            new = row.histories[first + num_read : min(end, first + size)]
            require(not new or self._holders[block_id] == 1, f"{name} writes block {block_id}, which others hold too")
            slots[num_read : num_read + len(new)] = new
        row.num_computed = end

    def _sample(self, row: _Row) -> tuple[TokenId, FinishReason | None]:
        request_id = row.request.request_id
        num_output = len(row.token_ids) - len(row.request.prompt_token_ids) + 1
        token = say(row.token_ids, self._info.model.vocab_size)
        row.append(token)
        if request_id in self._requests:  # else it was cancelled, and its name may be another's
            self.outputs[request_id].append(token)
        finish = None
        if num_output == self.stop_after.get(request_id):
            finish = FinishReason.STOP
        elif num_output == row.request.sampling.max_tokens:
            finish = FinishReason.LENGTH
        row.is_finished = finish is not None
        return token, finish
