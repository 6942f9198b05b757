"""What results tell of probabilities: is it what was asked for, and does no place of a prompt lack?

Compares with the plan of a result; who is told is the ledger's business.
"""

from control_plane.engine.live import Live
from control_plane.engine.row_book import PlanInFlight
from plugins.errors import PlanOutOfOrder
from plugins.types import PromptLogprobs, Row, StepResult


def check_told(plan: PlanInFlight, result: StepResult) -> None:
    """Compare what a result tells with what the requests of its plan asked for.

    A prompt may be told again from its start, after a preemption or on another worker, but never with a gap; all of it
    is told when its first token is sampled.
    Raises: PlanOutOfOrder: something is missing, out of its place, or of nobody who asked.
    """
    if result.logprobs and len(result.logprobs) != len(result.token_ids):
        raise PlanOutOfOrder(
            f"result {result.seq} tells log-probabilities of {len(result.logprobs)} tokens, and has "
            f"{len(result.token_ids)}"
        )
    ends = _check_prompts(plan, result)
    start = 0
    for row, count in zip(result.rows, result.counts, strict=True):
        owner, end = plan.owners[row], start + count
        if count and owner.lane is not None:
            told = result.logprobs[start:end]
            if owner.tells_logprobs and (len(told) < count or any(each is None for each in told)):
                raise PlanOutOfOrder(f"result {result.seq} has a token without its log-probability for row {row}")
            num_places = len(owner.request.prompt_token_ids) - 1
            num_told = max(owner.num_prompt_logprobs, ends.get(row, 1) - 1)
            if owner.tells_prompt and num_told < num_places:
                raise PlanOutOfOrder(
                    f"result {result.seq} has a token for row {row}, and {num_told} of {num_places} places of its "
                    "prompt were told"
                )
        start = end


def _check_prompts(plan: PlanInFlight, result: StepResult) -> dict[Row, int]:
    """Return where the told part of each row ends."""
    ends: dict[Row, int] = {}
    for part in result.prompt_logprobs:
        owner = plan.owners.get(part.row)
        if owner is None or part.row in ends:
            raise PlanOutOfOrder(f"result {result.seq} tells of the prompt of row {part.row}, which is not its to tell")
        ends[part.row] = part.start + len(part.places)
        if owner.lane is not None and not _fits(part, owner):
            raise PlanOutOfOrder(
                f"result {result.seq} tells of places [{part.start}, {ends[part.row]}) of row {part.row}'s prompt; "
                f"[1, {owner.num_prompt_logprobs + 1}) of {len(owner.request.prompt_token_ids)} were told before"
            )
    return ends


def _fits(part: PromptLogprobs, owner: Live) -> bool:
    is_in_prompt = part.start >= 1 and part.start + len(part.places) <= len(owner.request.prompt_token_ids)
    return owner.tells_prompt and is_in_prompt and part.start <= owner.num_prompt_logprobs + 1
