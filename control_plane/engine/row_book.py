"""What a worker knows of its rows, as its plans told it: who holds each, and how many tokens it has computed.

Checks plans before they go out and results when they come in; whose fault a wrong one is, is decided by who asks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from control_plane.engine.live import Live
from plugins.errors import InvariantBroken, PlanOutOfOrder
from plugins.types import Admission, BlockId, Chunk, RequestId, Row, StepPlan, StepResult, WorkerInfo


@dataclass(slots=True)
class _Held:
    """One row and what its worker knows of the sequence in it.

    A token that a row waits for counts as known and as computed all the same: only how far the two are apart matters.
    """

    live: Live
    num_known: int  # tokens, the sampled ones included
    num_computed: int


@dataclass(frozen=True, slots=True)
class PlanInFlight:
    """Whose row is whose in one plan: its result is read through this, never through today's rows."""

    seq: int
    decode_steps: int
    owners: dict[Row, Live]
    sampling: frozenset[Row] | None  # rows whose chunk reaches the last known token; None: all of them
    num_decodes: int  # chunks of one token
    released: tuple[Row, ...]  # rows that the plan takes from whoever had them before

    @property
    def num_prompts(self) -> int:
        """Chunks of more than one token."""
        return len(self.owners) - self.num_decodes


class RowBook:
    """The rows of one worker. Owned by its lane; told every plan, in order, before it goes out."""

    def __init__(self, worker: WorkerInfo) -> None:
        self._worker = worker
        self._last_seq = 0
        self._rows: dict[Row, _Held] = {}

    def read(self, plan: StepPlan, live: Mapping[RequestId, Live]) -> PlanInFlight:
        """Bring the rows up to date, and return who is in the plan.

        Raises: InvariantBroken: no worker could carry the plan out, or it says what is not true of a request.
        """
        if plan.seq != self._last_seq + 1:
            raise InvariantBroken(f"plan {plan.seq} comes after plan {self._last_seq}")
        self._last_seq = plan.seq
        for row in plan.released_rows:
            if self._rows.pop(row, None) is None:
                raise InvariantBroken(f"plan {plan.seq} releases row {row}, which holds nothing")
        for copy in plan.block_copies:
            self._check_blocks(plan.seq, (copy.source, copy.destination))
        for admission in plan.admitted:
            self._admit(plan.seq, admission, live)
        return self._compute(plan)

    def _admit(self, seq: int, admission: Admission, live: Mapping[RequestId, Live]) -> None:
        row, request_id = admission.row, admission.request_id
        if not 0 <= row < self._worker.max_sequences or row in self._rows:
            raise InvariantBroken(f"plan {seq} admits to row {row}, which is taken or not in the worker's table")
        owner = live.get(request_id)
        if owner is None:
            raise InvariantBroken(f"plan {seq} admits {request_id!r}, which is no request of this worker")
        prompt = owner.request.prompt_token_ids
        tokens = admission.token_ids
        if tokens != (*prompt, *owner.token_ids) or admission.num_prompt_tokens != len(prompt):
            raise InvariantBroken(f"plan {seq} admits {request_id!r} with other tokens than its prompt and output")
        if not 0 <= admission.num_cached_tokens < len(tokens):
            raise InvariantBroken(f"plan {seq} admits {request_id!r} with {admission.num_cached_tokens} cached tokens")
        if owner.tells_prompt and min(admission.num_cached_tokens, len(prompt) - 1) > owner.num_prompt_logprobs:
            raise InvariantBroken(f"plan {seq} admits {request_id!r} with cached tokens of a prompt that is told about")
        self._check_blocks(seq, admission.block_ids)
        self._rows[row] = _Held(owner, len(tokens), admission.num_cached_tokens)

    def _compute(self, plan: StepPlan) -> PlanInFlight:
        owners: dict[Row, Live] = {}
        resting: list[Row] = []  # rows whose chunk ends within what is known
        num_decodes = 0
        for chunk in plan.chunks:
            held = self._rows.get(chunk.row)
            if held is None or chunk.num_tokens < 1:
                raise InvariantBroken(f"plan {plan.seq} names {chunk.row}, which holds or is no request in flight")
            owners[chunk.row] = held.live
            if chunk.num_tokens == 1:
                num_decodes += 1
            if chunk.new_blocks:
                self._check_blocks(plan.seq, chunk.new_blocks)
            held.num_computed += chunk.num_tokens * plan.decode_steps
            self._sample(plan, chunk, held, resting)
        if len(owners) < len(plan.chunks):
            raise InvariantBroken(f"plan {plan.seq} names a row twice")
        if plan.num_tokens > self._worker.max_step_tokens:
            raise InvariantBroken(f"plan {plan.seq} has {plan.num_tokens} tokens of {self._worker.max_step_tokens}")
        if plan.decode_steps < 1 or (plan.decode_steps > 1 and num_decodes < len(plan.chunks)):
            raise InvariantBroken(f"plan {plan.seq} repeats {plan.decode_steps} times what is no decode of one token")
        sampling = frozenset(owners.keys() - set(resting)) if resting else None
        return PlanInFlight(plan.seq, plan.decode_steps, owners, sampling, num_decodes, plan.released_rows)

    def _sample(self, plan: StepPlan, chunk: Chunk, held: _Held, resting: list[Row]) -> None:
        known = held.num_known + plan.decode_steps - 1  # each repetition computes what the one before it sampled
        if held.num_computed == known:
            held.num_known = known + 1
        elif held.num_computed < held.num_known:
            resting.append(chunk.row)
        else:
            raise InvariantBroken(
                f"plan {plan.seq} computes {held.num_computed} tokens of row {chunk.row}, which has {held.num_known}"
            )

    def _check_blocks(self, seq: int, block_ids: tuple[BlockId, ...]) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._worker.num_blocks:
            raise InvariantBroken(f"plan {seq} names blocks outside [0, {self._worker.num_blocks})")


def check_result(plan: PlanInFlight, later: Iterable[PlanInFlight], result: StepResult, vocab_size: int) -> None:
    """Compare a result with its plan, and with the plans that went out after it.

    Raises: PlanOutOfOrder: it says what no result of this plan could, or does not say what it must.
    """
    failed = {failure.row for failure in result.failures}
    in_order = iter(plan.owners)
    if not all(row in in_order for row in result.rows) or not failed <= plan.owners.keys():
        strangers = sorted({*result.rows, *failed} - plan.owners.keys())
        told = f"rows {strangers}, which its plan does not name" if strangers else "rows twice or out of order"
        raise PlanOutOfOrder(f"result {result.seq} tells of {told}")
    if result.counts and max(result.counts) > plan.decode_steps:
        raise PlanOutOfOrder(f"result {result.seq} has {max(result.counts)} tokens for one row")
    if result.token_ids and not 0 <= min(result.token_ids) <= max(result.token_ids) < vocab_size:
        raise PlanOutOfOrder(f"result {result.seq} has a token outside [0, {vocab_size})")
    is_steady = plan.sampling is None and plan.decode_steps == 1
    is_steady = is_steady and len(result.token_ids) == len(plan.owners) == len(result.rows)
    if not is_steady or min(result.counts, default=1) < 1:
        _check_samples(plan, result, failed.union(*(each.released for each in later)))


def _check_samples(plan: PlanInFlight, result: StepResult, excused: set[Row]) -> None:
    """Each row of a request that goes on has its tokens if its chunk samples, and none if it does not.

    A row that waits is named, and has none or fewer.
    Excused from having them are rows that failed, and those that a later plan released: a worker that has launched
    that plan already has forgotten them, and what it sampled is sampled again.
    """
    counts = dict(zip(result.rows, result.counts, strict=True))
    ended = {row for row, finish in zip(result.rows, result.finishes, strict=True) if finish is not None}
    for row, owner in plan.owners.items():
        if owner.lane is None:
            continue
        samples = plan.sampling is None or row in plan.sampling
        count = counts.get(row, 0)
        is_whole = count == plan.decode_steps or (count and row in ended)
        if samples and not is_whole and row not in excused:
            if row in counts and row not in ended:
                continue  # it waits
            raise PlanOutOfOrder(f"result {result.seq} has no token for row {row}, whose chunk samples one")
        if not samples and (count or row in ended):
            raise PlanOutOfOrder(f"result {result.seq} has a token for row {row}, whose chunk samples none")
