"""The configuration of the public port."""

from dataclasses import dataclass

from plugins.errors import InvalidConfig

MAX_MESSAGE_MIB = 2047  # gRPC counts bytes in 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"  # where clients connect; 0.0.0.0 listens on every interface
    port: int = 50051  # 0: any free port
    max_message_mib: int = 16  # of one gRPC message, either way
    reflection: bool = True  # tell the protos to whoever asks, as grpcurl does
    drain_s: float = 10.0  # requests at hand get so long to end when the server stops

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidConfig(f"server.port must be in [0, 65535], is {self.port}")
        if not 1 <= self.max_message_mib <= MAX_MESSAGE_MIB:
            raise InvalidConfig(f"server.max_message_mib must be in [1, {MAX_MESSAGE_MIB}], is {self.max_message_mib}")
        if not self.drain_s >= 0:
            raise InvalidConfig(f"server.drain_s must be at least 0, is {self.drain_s}")
