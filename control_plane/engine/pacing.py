"""Decides when prompts should wait so that decodes keep their pace.

Knows how long steps took; which prompts wait is the scheduler's decision, which may ignore the advice.
"""

from math import ceil

from plugins.types import StepResult

SMOOTHING = 0.25  # weight of the latest step in the averages
MAX_PAUSE = 32  # decode steps between two steps with prompts, at most: prompts always move


class PrefillPacer:
    """Advice for one worker. Owned by its lane.

    A step that computes prompts beside decodes takes longer than one of decodes alone. If that breaks the target,
    so many steps without prompts follow that the mean time between a request's tokens keeps it.
    """

    def __init__(self, target_ms: float | None) -> None:
        self._target_ms = target_ms  # None: prompts never wait
        self._mixed_ms = 0.0  # how long a step with both takes, on average
        self._decode_ms = 0.0  # and one with decodes alone
        self._num_decode_steps = 0  # planned since the last one with prompts

    def note_plan(self, num_prompts: int) -> None:
        """A plan with so many chunks of prompts goes out."""
        self._num_decode_steps = 0 if num_prompts else self._num_decode_steps + 1

    def note_result(self, num_decodes: int, num_prompts: int, result: StepResult) -> None:
        """A plan with so many chunks of one token, and of more, was answered. Prompts alone keep nobody waiting."""
        took_ms = result.compute_ns / 1e6
        if not num_prompts:
            self._decode_ms = _averaged(self._decode_ms, took_ms)
        elif num_decodes:
            self._mixed_ms = _averaged(self._mixed_ms, took_ms)

    @property
    def throttles(self) -> bool:
        """True if a step with prompts would break the target."""
        if self._target_ms is None or self._mixed_ms <= self._target_ms:
            return False
        spared_ms = self._target_ms - self._decode_ms
        pause = ceil((self._mixed_ms - self._target_ms) / spared_ms) if spared_ms > 0 else MAX_PAUSE
        return self._num_decode_steps < min(pause, MAX_PAUSE)


def _averaged(average_ms: float, took_ms: float) -> float:
    """Move an average towards the latest value; the first one is the average."""
    return average_ms + SMOOTHING * (took_ms - average_ms) if average_ms else took_ms
