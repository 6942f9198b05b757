"""What the command line hands to a command that another plane provides.

The console script reads configuration, sets up logging and serves metrics; a command such as `dihedral worker`
is found by entry point (group `dihedral.commands`) and called with this context, so that planes need not meet.
"""

from typing import Protocol, TypeVar

from plugins.metrics import Metrics

T = TypeVar("T")


class CommandContext(Protocol):
    """The resolved configuration and the process's metrics. Logging is set up before the command is called."""

    @property
    def metrics(self) -> Metrics: ...

    def section(self, kind: type[T]) -> T:
        """Return the section of the configuration that this dataclass describes."""


class Command(Protocol):
    """An entry point of the group `dihedral.commands`. Returns the process's exit code."""

    def __call__(self, context: CommandContext) -> int: ...
