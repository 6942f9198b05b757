"""Which plug-ins a process loads by its configuration. Both planes read this section, and must read the same."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginsConfig:
    logits_processors: tuple[str, ...] = ()  # applied after those of entry points: short names or pkg.mod:Class
    logits_processor_config: str = field(  # JSON object: a processor's name to its section; may hold secrets
        default="", repr=False, metadata={"secret": True}
    )
