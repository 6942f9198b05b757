"""The configuration of the scheduler."""

from dataclasses import dataclass, field

from plugins.errors import InvalidConfig

MIN_HASH_KEY_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    scheduler_cls: str | None = None  # a class of yours, by entry-point name or pkg.mod:Class; None: a built-in one
    async_scheduling: bool = True  # plan a step while the one before it runs; only for the built-in ones
    policy: str = "fcfs"  # who is served first: fcfs, priority, fair_share, or a class of yours
    max_step_tokens: int | None = None  # tokens computed in one step, if fewer than the worker can; None: all
    max_sequences: int | None = None  # sequences that hold a row at once, if fewer than the worker can; None: all
    max_chunk_tokens: int | None = None  # of one prompt in one step, while others wait or run; None: all that fit
    watermark_ratio: float = 0.01  # share of the blocks that a new admission must leave free
    prefix_caching: bool = True  # keep the blocks of finished sequences for prompts that begin alike
    prefix_hash_key: str | None = field(  # secret that block names are made with; None: one of this process's own
        default=None, repr=False, metadata={"secret": True}
    )
    target_inter_token_ms: float | None = None  # hold prompts back when steps take longer; None: never
    priority_ageing_s: float = 10.0  # policy priority: so much waiting outweighs one level of priority
    tenant_weights: str = ""  # policy fair_share: such as a=3,b=1.5; who is not named has weight 1

    def __post_init__(self) -> None:
        for name in ("scheduler_cls", "policy"):
            value = getattr(self, name)
            if isinstance(value, type):
                raise InvalidConfig(
                    f"scheduler.{name} is a name, such as {value.__module__}:{value.__qualname__}; "
                    f"the class itself is given as LocalEngine({name}=...)"
                )
        for name in ("max_step_tokens", "max_sequences", "max_chunk_tokens"):
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
        if self.prefix_hash_key is not None and len(self.prefix_hash_key) < MIN_HASH_KEY_CHARACTERS:
            raise InvalidConfig(
                f"scheduler.prefix_hash_key must have at least {MIN_HASH_KEY_CHARACTERS} characters, so that nobody "
                f"guesses it; it has {len(self.prefix_hash_key)}"
            )
        for name in ("target_inter_token_ms", "priority_ageing_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidConfig(f"scheduler.{name} must be above 0, is {value}")
        parse_weights(self.tenant_weights)


def parse_weights(text: str) -> dict[str, float]:
    """Read weights such as `a=3,b=1.5`. Raises: InvalidConfig: names the entry that is none."""
    weights: dict[str, float] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        tenant, _, value = entry.rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = 0.0
        if not tenant or not 0 < weight < float("inf"):
            raise InvalidConfig(f"scheduler.tenant_weights must be tenant=weight with a weight above 0, is {entry!r}")
        weights[tenant.strip()] = weight
    return weights
