"""The limits that requests are held to before the engine sees them."""

from dataclasses import dataclass

from control_plane.admission.defaults import parse_defaults
from plugins.errors import InvalidConfig

_COUNTS = (
    "max_waiting",
    "max_waiting_tokens",
    "max_tenant_requests",
    "max_reading",
    "grammar_processes",
    "max_grammar_bytes",
    "max_prompt_bytes",
    "max_n",
    "max_prompt_logprobs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    max_waiting: int = 1024  # requests that may wait for a row; more are refused with RESOURCE_EXHAUSTED
    max_waiting_tokens: int = 4_000_000  # their prompts together; more are refused likewise
    max_tenant_requests: int | None = None  # of one tenant at once, waiting or running; None: as many as there may be
    tenant_key: str = "dihedral-tenant"  # the metadata of a call that tells its tenant
    max_queue_s: float = 300.0  # a request that has no row after so long ends with RESOURCE_EXHAUSTED
    max_unread_s: float = 60.0  # a request whose output nobody reads for so long ends
    max_reading: int = 64  # long prompts that may be read at once, and as many grammars; more are refused likewise
    max_prompt_bytes: int = 4 * 1024 * 1024  # UTF-8 of a prompt's text, or of a conversation; a MiB takes about 0.5 s
    grammar_processes: int = 2  # grammars that may be tried at once, each in a process; the others wait their turn
    grammar_timeout_s: float = 0.8  # a grammar that takes longer to try is refused
    max_grammar_bytes: int = 64 * 1024  # UTF-8 of a schema, an expression, all choices together or a grammar
    max_deadline_s: float = 600.0  # a request ends after so long, even if its caller would wait longer
    max_n: int = 128  # outputs of one request
    max_prompt_logprobs: int = 100_000  # of one request: tokens of its prompt, times one more than prompt_logprobs
    model_defaults: bool = True  # unset sampling parameters get what the model's generation config says
    default_sampling: str = ""  # such as temperature=0.7,top_p=0.9: unset ones get this, whatever the model says

    @property
    def max_outputs(self) -> int:
        """Outputs that one request may have: each counts for its tenant, who could never have more."""
        return min(self.max_n, self.max_tenant_requests or self.max_n)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"admission.{name} must be at least 1, is {value}")
        for name in ("max_deadline_s", "max_queue_s", "max_unread_s", "grammar_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"admission.{name} must be above 0, is {getattr(self, name)}")
        if not self.tenant_key or self.tenant_key != self.tenant_key.lower() or not self.tenant_key.isascii():
            raise InvalidConfig(f"admission.tenant_key must be a metadata key in lower case, is {self.tenant_key!r}")
        parse_defaults(self.default_sampling)
