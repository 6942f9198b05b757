"""The configuration of the control plane's side of its worker."""

from dataclasses import dataclass

from plugins.errors import InvalidConfig
from protos.channel import INTERNAL_MAX_MESSAGE_BYTES, MIB

MAX_MESSAGE_MIB = INTERNAL_MAX_MESSAGE_BYTES // MIB  # a worker takes no larger one


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    address: str = "127.0.0.1:50061"  # where the worker listens
    owner_id: str | None = None  # stable over restarts, which then take the worker back at once; None: host and port
    max_message_mib: int = 32  # the largest message to and from a worker
    connect_timeout_s: float = 5.0  # for describing a worker and opening its step stream

    def __post_init__(self) -> None:
        if ":" not in self.address:
            raise InvalidConfig(f"workers.address must be host:port, is {self.address!r}")
        if self.owner_id == "":
            raise InvalidConfig("workers.owner_id must not be empty; leave it out for this machine's name and port")
        if not 1 <= self.max_message_mib <= MAX_MESSAGE_MIB:
            raise InvalidConfig(f"workers.max_message_mib must be in [1, {MAX_MESSAGE_MIB}], is {self.max_message_mib}")
        if not self.connect_timeout_s > 0:
            raise InvalidConfig(f"workers.connect_timeout_s must be above 0, is {self.connect_timeout_s}")
