"""`dihedral plugins`: what is plugged into this installation, and whether a class keeps the promises of its hook."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated

from cyclopts import App, Group, Parameter
from rich.console import Console

from control_plane.cli.render import render
from control_plane.engine.scheduler_choice import POLICY_GROUP, SCHEDULER_GROUP, choose_scheduler
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.first_come import FirstComePolicy
from plugins.classes import entry_point_names, find_class
from plugins.conformance.policy import check_policy
from plugins.conformance.report import CheckResult
from plugins.conformance.scheduler import check_scheduler
from plugins.errors import InvalidConfig
from plugins.scheduler import Scheduler, SchedulingPolicy
from plugins.types import WorkerInfo

PREFIX = "dihedral."  # of every group of entry points that we read
CHECK_HELP = "a scheduler or scheduling policy: name of an entry point, or pkg.mod:Class"
JSON = Parameter(name="--json", group=Group("General"), help="print JSON", show_default=False)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point."""

    group: str
    name: str
    place: str  # pkg.mod:Class
    distribution: str  # and its version


@dataclass(frozen=True, slots=True)
class PluginList:
    """Everything that is plugged in, our own entry points included."""

    plugins: tuple[Plugin, ...]


@dataclass(frozen=True, slots=True)
class PluginReport:
    """What the checks of a hook found."""

    plugin: str
    hook: str
    checks: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def add_plugin_commands(app: App) -> None:
    """Add `plugins` and `plugins check` to the command line."""
    commands = App(name="plugins", help="Show what is plugged in, or check a class of yours.", sort_key=110)
    app.command(commands)

    @commands.default
    def plugins_command(*, use_json: Annotated[bool, JSON] = False) -> int:
        """Show what is plugged in, or check a class of yours."""
        render(list_plugins(), use_json, Console())
        return 0

    @commands.command(name="check")
    def check_command(
        name: Annotated[str, Parameter(help=CHECK_HELP)], /, *, use_json: Annotated[bool, JSON] = False
    ) -> int:
        """Check that a scheduler or policy keeps its promises. Exits with 1 if it does not."""
        report = check_plugin(name)
        render(report, use_json, Console())
        return 0 if report.passed else 1


def list_plugins() -> PluginList:
    """List the entry points of all our groups, sorted."""
    found = entry_points()
    return PluginList(
        tuple(
            Plugin(group, entry.name, entry.value, f"{entry.dist.name} {entry.dist.version}" if entry.dist else "")
            for group in sorted(found.groups)
            if group.startswith(PREFIX)
            for entry in sorted(found.select(group=group), key=lambda entry: (entry.name, entry.value))
        )
    )


def check_plugin(name: str) -> PluginReport:
    """Run the suite of the hook that the class belongs to.

    Raises: InvalidConfig: there is no such class, or it belongs to no hook that has a suite.
    """
    group = POLICY_GROUP if name in entry_point_names(POLICY_GROUP) else SCHEDULER_GROUP
    found = find_class(name, group, object, "plug-in", entry_point_names(POLICY_GROUP))
    if issubclass(found, Scheduler):
        return PluginReport(name, "scheduler", check_scheduler(_with_first_come(found)))
    if issubclass(found, SchedulingPolicy):
        make = choose_scheduler(SchedulerConfig(policy=name))
        return PluginReport(name, "scheduling policy", (*check_policy(found), *check_scheduler(make)))
    raise InvalidConfig(f"plug-in {name!r} is neither a Scheduler nor a SchedulingPolicy of plugins.scheduler")


def _with_first_come(cls: type[Scheduler]) -> Callable[[WorkerInfo], Scheduler]:
    build: Callable[[SchedulerConfig, WorkerInfo, SchedulingPolicy], Scheduler] = cls
    return lambda worker: build(SchedulerConfig(), worker, FirstComePolicy())
