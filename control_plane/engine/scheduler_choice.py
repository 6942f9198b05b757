"""Chooses the scheduler and its policy from the configuration, once, and makes one of each for every worker.

Imports the chosen classes and no others. What schedulers do is their own business.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final
from weakref import WeakSet

from control_plane.scheduling.config import SchedulerConfig, parse_weights
from plugins.classes import check_class, find_class
from plugins.errors import InvalidConfig
from plugins.scheduler import Scheduler, SchedulingPolicy
from plugins.types import WorkerInfo

logger = logging.getLogger(__name__)

SCHEDULER_GROUP: Final = "dihedral.schedulers"
POLICY_GROUP: Final = "dihedral.scheduling_policies"
BUILTIN_POLICIES: Final = {
    "fcfs": "control_plane.scheduling.first_come:FirstComePolicy",
    "priority": "control_plane.scheduling.priority:PriorityPolicy",
    "fair_share": "control_plane.scheduling.fair_share:FairSharePolicy",
}
BUILTIN_SCHEDULERS: Final = (
    "control_plane.scheduling.run_ahead:RunAheadScheduler",
    "control_plane.scheduling.synchronous:SynchronousScheduler",
)
_SYNCHRONOUS: Final = ("control_plane.scheduling.synchronous", "SynchronousScheduler")
_SCHEDULER: Final[type[Scheduler]] = Scheduler  # type: ignore[type-abstract]  # to be derived from, not to be built
_POLICY: Final[type[SchedulingPolicy]] = SchedulingPolicy  # type: ignore[type-abstract]  # likewise
_warned: WeakSet[type[Scheduler]] = WeakSet()  # one warning per class and process


@dataclass(frozen=True, slots=True)
class SchedulerFactory:
    """Makes schedulers of one class. All of them share a configuration, and so the key that names cached blocks."""

    scheduler_cls: type[Scheduler]
    is_builtin: bool  # scheduler and policy are ours: what they raise is a bug of ours
    _config: SchedulerConfig
    _make_policy: Callable[[], SchedulingPolicy]

    def __call__(self, worker: WorkerInfo) -> Scheduler:
        """Build the scheduler of one worker, with a policy of its own."""
        build: Callable[[SchedulerConfig, WorkerInfo, SchedulingPolicy], Scheduler] = self.scheduler_cls
        return build(self._config, worker, self._make_policy())


def choose_scheduler(
    config: SchedulerConfig,
    cls: type[Scheduler] | None = None,
    draw_key: Callable[[], str] = lambda: secrets.token_hex(32),
    policy: type[SchedulingPolicy] | None = None,
) -> SchedulerFactory:
    """Find the classes that the configuration names; class objects win over its names.

    `draw_key` gives the key that block names are made with, if the configuration has none.
    Raises: InvalidConfig: no such scheduler or policy, it cannot be imported or built, or it declares no depth.
    """
    chosen = _chosen_class(config) if cls is None else check_class(cls, _SCHEDULER, "scheduler_cls")
    depth = chosen.max_plans_in_flight
    if not isinstance(depth, int) or depth < 1:
        raise InvalidConfig(f"{chosen.__qualname__}.max_plans_in_flight must be a whole number from 1 on, is {depth!r}")
    is_ours = cls is None and chosen.__module__.startswith("control_plane.")
    if not is_ours and chosen not in _warned:
        _warned.add(chosen)
        _warn(chosen)
    if config.prefix_hash_key is None:
        config = replace(config, prefix_hash_key=draw_key())
    make_policy = choose_policy(config) if policy is None else check_class(policy, _POLICY, "policy")
    is_builtin = is_ours and policy is None and config.policy in _POLICIES
    return SchedulerFactory(chosen, is_builtin, config, make_policy)


def _chosen_class(config: SchedulerConfig) -> type[Scheduler]:
    if config.scheduler_cls is not None:
        return find_class(config.scheduler_cls, SCHEDULER_GROUP, _SCHEDULER, "scheduler.scheduler_cls")
    if config.async_scheduling:
        from control_plane.scheduling.run_ahead import RunAheadScheduler

        return RunAheadScheduler
    from control_plane.scheduling.synchronous import SynchronousScheduler

    return SynchronousScheduler


def _warn(cls: type[Scheduler]) -> None:
    detail = "the interface of schedulers is not public: it may change with any release"
    if any((each.__module__, each.__qualname__) == _SYNCHRONOUS for each in cls.__mro__):
        detail += "; it derives from SynchronousScheduler and so loses run-ahead: the worker idles between steps"
    logger.warning(
        "scheduler_not_public",
        extra={
            "scheduler_cls": f"{cls.__module__}:{cls.__qualname__}",
            "max_plans_in_flight": cls.max_plans_in_flight,
            "detail": detail,
        },
    )


def choose_policy(config: SchedulerConfig) -> Callable[[], SchedulingPolicy]:
    """Return what makes a policy. The class is found at once, so that a wrong name stops the start.

    Raises: InvalidConfig: there is no such policy, or it cannot be imported.
    """
    choose = _POLICIES.get(config.policy)
    if choose is not None:
        return choose(config)
    return find_class(config.policy, POLICY_GROUP, _POLICY, "scheduler.policy", _POLICIES)


def _first_come(config: SchedulerConfig) -> Callable[[], SchedulingPolicy]:
    from control_plane.scheduling.first_come import FirstComePolicy

    return FirstComePolicy


def _priority(config: SchedulerConfig) -> Callable[[], SchedulingPolicy]:
    from control_plane.scheduling.priority import PriorityPolicy

    return lambda: PriorityPolicy(config.priority_ageing_s)


def _fair_share(config: SchedulerConfig) -> Callable[[], SchedulingPolicy]:
    from control_plane.scheduling.fair_share import FairSharePolicy

    weights = parse_weights(config.tenant_weights)
    return lambda: FairSharePolicy(weights)


_POLICIES: Final = {"fcfs": _first_come, "priority": _priority, "fair_share": _fair_share}
