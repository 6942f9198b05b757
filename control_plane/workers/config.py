"""The configuration of the control plane's side of its workers."""

from dataclasses import dataclass

from control_plane.workers.discovery import parse_address
from plugins.errors import InvalidConfig
from protos.channel import INTERNAL_MAX_MESSAGE_BYTES, MIB

MAX_MESSAGE_MIB = INTERNAL_MAX_MESSAGE_BYTES // MIB  # a worker takes no larger one


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    address: str = "127.0.0.1:50061"  # host:port, several with commas; dns:name:port; file:path, one address a line
    owner_id: str | None = None  # stable over restarts, which then take workers back at once; None: host and port
    router: str = "prefix_affinity"  # who gets a request: prefix_affinity, least_load, power_of_two, round_robin
    max_message_mib: int = 512  # the largest message to and from a worker; a larger plan ends the step stream
    connect_timeout_s: float = 5.0  # for describing a worker and opening its step stream
    refresh_s: float = 2.0  # how often a DNS name is resolved, or a file read, again
    drain_s: float = 30.0  # how long the requests of a worker whose address has gone may run on there
    heartbeat_s: float = 5.0  # a worker is asked twice in this time, and lost if it does not answer within it
    step_timeout_s: float = 120.0  # a worker that owes a result for so long is lost
    recovery_timeout_s: float = 30.0  # how long requests of a lost worker wait for another one like it

    def __post_init__(self) -> None:
        parse_address(self.address)
        if self.owner_id == "":
            raise InvalidConfig("workers.owner_id must not be empty; leave it out for this machine's name and port")
        if not 1 <= self.max_message_mib <= MAX_MESSAGE_MIB:
            raise InvalidConfig(f"workers.max_message_mib must be in [1, {MAX_MESSAGE_MIB}], is {self.max_message_mib}")
        for name in ("connect_timeout_s", "refresh_s", "heartbeat_s", "step_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"workers.{name} must be above 0, is {getattr(self, name)}")
        for name in ("drain_s", "recovery_timeout_s"):
            if not getattr(self, name) >= 0:
                raise InvalidConfig(f"workers.{name} must be at least 0, is {getattr(self, name)}")
