"""The configuration of the scheduler."""

from dataclasses import dataclass

from plugins.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_step_tokens: int = 512  # tokens computed in one step; the worker's own limit holds too
    max_sequences: int = 64  # sequences that hold a row at once; the worker's own limit holds too
    watermark_ratio: float = 0.01  # share of the blocks that a new admission must leave free

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"scheduler.{name} must be at least 1, is {getattr(self, name)}")
        if self.max_step_tokens < self.max_sequences:
            raise InvalidConfig(
                f"scheduler.max_step_tokens ({self.max_step_tokens}) must be at least scheduler.max_sequences "
                f"({self.max_sequences}), so that every sequence can decode"
            )
        if not 0 <= self.watermark_ratio < 1:
            raise InvalidConfig(f"scheduler.watermark_ratio must be in [0, 1), is {self.watermark_ratio}")
