"""The configuration of the scheduler."""

from dataclasses import dataclass

from plugins.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_step_tokens: int | None = None  # tokens computed in one step, if fewer than the worker can; None: all
    max_sequences: int | None = None  # sequences that hold a row at once, if fewer than the worker can; None: all
    watermark_ratio: float = 0.01  # share of the blocks that a new admission must leave free

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"scheduler.{name} must be at least 1 or left out, is {value}")
        if self.max_step_tokens is not None and self.max_step_tokens < (self.max_sequences or 1):
            raise InvalidConfig(
                f"scheduler.max_step_tokens ({self.max_step_tokens}) must be at least scheduler.max_sequences "
                f"({self.max_sequences}), so that every sequence can decode"
            )
        if not 0 <= self.watermark_ratio < 1:
            raise InvalidConfig(f"scheduler.watermark_ratio must be in [0, 1), is {self.watermark_ratio}")
