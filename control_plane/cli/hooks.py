"""`dihedral plugins`: what is plugged into this installation, and whether a class keeps the promises of its hook."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from itertools import groupby
from typing import Annotated, Any

from cyclopts import App, Group, Parameter
from rich.console import Console

from control_plane.admission.extra_args import ExtraArgs
from control_plane.cli.render import JSON_ONLY, render, table
from control_plane.engine.scheduler_choice import (
    BUILTIN_POLICIES,
    BUILTIN_SCHEDULERS,
    POLICY_GROUP,
    SCHEDULER_GROUP,
    choose_policy,
    choose_scheduler,
)
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.first_come import FirstComePolicy
from plugins.classes import entry_point_names, find_class
from plugins.conformance.logits import check_logits_processor
from plugins.conformance.policy import check_policy
from plugins.conformance.report import CheckResult
from plugins.conformance.scheduler import check_scheduler
from plugins.errors import InvalidConfig, PluginFailed
from plugins.logits import LogitsProcessor
from plugins.logits_loading import BUILTIN_PROCESSORS, load_processor
from plugins.logits_loading import GROUP as PROCESSOR_GROUP
from plugins.scheduler import Scheduler, SchedulingPolicy
from plugins.types import SamplingParams, WorkerInfo

PREFIX = "dihedral."  # of every group of entry points that we read
CHECK_HELP = "a scheduler, scheduling policy or logits processor: its name in `dihedral plugins`, or pkg.mod:Class"
EXAMPLE_HELP = "arguments that a logits processor takes, as a JSON object; may be given again; default: from its schema"
SECTION_HELP = "a logits processor's part of plugins.logits_processor_config, as a JSON object"
HOOKS = "plugins.scheduler.Scheduler, plugins.scheduler.SchedulingPolicy or plugins.logits.LogitsProcessor"
DECLARED = ("UNKNOWN_ARGUMENT", "SCHEMA_VIOLATION")  # why arguments do not fit a processor's declarations
JSON = Parameter(name="--json", group=Group("General"), help="print JSON", show_default=False)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point, or a built-in class of a hook."""

    group: str = field(metadata=JSON_ONLY)  # the title of its table
    name: str  # empty: its place is its name
    place: str  # pkg.mod:Class
    distribution: str  # and its version


@dataclass(frozen=True, slots=True)
class ProcessorPlugin(Plugin):
    """A logits processor, which requests give arguments to."""

    arguments: str  # that it reads


@dataclass(frozen=True, slots=True)
class PluginList:
    """Everything that is plugged in, and what is built in."""

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
        found = list_plugins()
        if use_json:
            render(found, True, Console())
        else:
            show_groups(found, Console())
        return 0

    @commands.command(name="check")
    def check_command(
        name: Annotated[str, Parameter(help=CHECK_HELP)],
        /,
        *,
        example: Annotated[list[str] | None, Parameter(help=EXAMPLE_HELP, show_default=False, negative=())] = None,
        section: Annotated[str, Parameter(help=SECTION_HELP)] = "{}",
        use_json: Annotated[bool, JSON] = False,
    ) -> int:
        """Check that a plug-in keeps the promises of its hook. Exits with 1 if it does not."""
        examples = tuple(_object(each, "--example") for each in example or ())
        report = check_plugin(name, examples, _object(section, "--section"))
        render(report, use_json, Console())
        return 0 if report.passed else 1


def list_plugins() -> PluginList:
    """List the entry points of all our groups, and what is built in and needs none, sorted."""
    found = entry_points()
    ours = f"dihedral {version('dihedral')}"
    plugins = [
        Plugin(group, entry.name, entry.value, f"{entry.dist.name} {entry.dist.version}" if entry.dist else "")
        for group in found.groups
        if group.startswith(PREFIX)
        for entry in found.select(group=group)
    ]
    plugins += [Plugin(POLICY_GROUP, name, place, ours) for name, place in BUILTIN_POLICIES.items()]
    plugins += [Plugin(SCHEDULER_GROUP, "", place, ours) for place in BUILTIN_SCHEDULERS]
    plugins += [Plugin(PROCESSOR_GROUP, name, place, ours) for name, place in BUILTIN_PROCESSORS.items()]
    plugins = [_with_arguments(each) if each.group == PROCESSOR_GROUP else each for each in plugins]
    return PluginList(tuple(sorted(plugins, key=lambda each: (each.group, each.name, each.place))))


def _with_arguments(plugin: Plugin) -> ProcessorPlugin:
    """Ask the class what it reads; one that cannot be loaded is listed nevertheless."""
    try:
        names = load_processor(plugin.name).info.extra_arg_names
        arguments = "any" if names is None else ", ".join(names)
    except InvalidConfig:
        arguments = "cannot be loaded; `dihedral plugins check` tells why"
    return ProcessorPlugin(plugin.group, plugin.name, plugin.place, plugin.distribution, arguments)


def show_groups(found: PluginList, console: Console) -> None:
    """Print a table for each group."""
    for group, plugins in groupby(found.plugins, key=lambda each: each.group):
        console.print(table(group, tuple(plugins), console), highlight=False)


def check_plugin(
    name: str, examples: Sequence[Mapping[str, Any]] = (), section: Mapping[str, Any] | None = None
) -> PluginReport:
    """Run the suite of the hook that the class belongs to. `examples` and `section` are of logits processors.

    Raises: InvalidConfig: there is no such class, or it belongs to no hook that has a suite, or cannot be run here.
    """
    policies = (*BUILTIN_POLICIES, *entry_point_names(POLICY_GROUP))
    processors = (*BUILTIN_PROCESSORS, *entry_point_names(PROCESSOR_GROUP))
    if name in BUILTIN_POLICIES:
        return _check_policy(name)
    if name in processors:
        return _check_processor(name, load_processor(name).cls, examples, section)
    group = POLICY_GROUP if name in policies else SCHEDULER_GROUP
    found = find_class(name, group, object, "plug-in", (*policies, *processors), HOOKS)
    if issubclass(found, Scheduler):
        return PluginReport(name, "scheduler", check_scheduler(_with_first_come(found)))
    if issubclass(found, SchedulingPolicy):
        return _check_policy(name)
    if issubclass(found, LogitsProcessor):
        return _check_processor(name, found, examples, section)
    raise InvalidConfig(f"plug-in {name!r}: {found!r} must be a subclass of {HOOKS}")


def _check_policy(name: str) -> PluginReport:
    """Check a policy by itself, and at work in a scheduler."""
    config = SchedulerConfig(policy=name)
    checks = (*check_policy(choose_policy(config)), *check_scheduler(choose_scheduler(config)))
    return PluginReport(name, "scheduling policy", checks)


def _with_first_come(cls: type[Scheduler]) -> Callable[[WorkerInfo], Scheduler]:
    build: Callable[[SchedulerConfig, WorkerInfo, SchedulingPolicy], Scheduler] = cls
    return lambda worker: build(SchedulerConfig(), worker, FirstComePolicy())


def _check_processor(
    name: str,
    cls: type[LogitsProcessor],
    examples: Sequence[Mapping[str, Any]],
    section: Mapping[str, Any] | None,
) -> PluginReport:
    if not _has_torch():
        raise InvalidConfig(
            f"logits processor {name!r}: its checks run it, and torch is not installed here; "
            "pip install 'dihedral[worker]', or check it where workers run"
        )
    for example in examples:
        _require_declared(name, example)
    return PluginReport(name, "logits processor", check_logits_processor(cls, examples, section))


def _require_declared(name: str, example: Mapping[str, Any]) -> None:
    """Raises: InvalidConfig: the example is none by the processor's declarations; the checks would blame the class."""
    try:
        found = ExtraArgs((load_processor(name),)).violations(SamplingParams(extra_args=example))
    except (InvalidConfig, PluginFailed):  # what is wrong with the class is for the suite to tell
        return
    wrong = [f"{each.field}: {each.description}" for each in found if each.reason in DECLARED]
    if wrong:
        raise InvalidConfig(f"--example {json.dumps(example)} is none: {'; '.join(wrong)}")


def _has_torch() -> bool:
    try:
        return find_spec("torch") is not None
    except ImportError:  # this process refuses it
        return False


def _object(text: str, flag: str) -> Mapping[str, Any]:
    """Read a JSON object. Raises: InvalidConfig: it is none."""
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise InvalidConfig(f"{flag} {text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidConfig(f'{flag} {text!r} must be a JSON object, such as {{"size": 3}}')
    return value
