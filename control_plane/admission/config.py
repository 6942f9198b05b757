"""The limits that requests are held to before the engine sees them."""

from dataclasses import dataclass

from plugins.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    max_waiting: int = 1024  # requests that may wait for a row; more are refused with RESOURCE_EXHAUSTED
    max_reading: int = 64  # long prompts that may be turned into tokens at once; more are refused likewise
    max_prompt_bytes: int = 4 * 1024 * 1024  # UTF-8 of a prompt's text, or of a conversation; a MiB takes about 0.5 s
    max_deadline_s: float = 600.0  # a request ends after so long, even if its caller would wait longer

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_reading", "max_prompt_bytes"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"admission.{name} must be at least 1, is {getattr(self, name)}")
        if not self.max_deadline_s > 0:
            raise InvalidConfig(f"admission.max_deadline_s must be above 0, is {self.max_deadline_s}")
