"""Which scheduler and policy a configuration chooses."""

import itertools
import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.engine.scheduler_choice import (
    BUILTIN_POLICIES,
    BUILTIN_SCHEDULERS,
    SchedulerFactory,
    choose_scheduler,
)
from control_plane.scheduling.batching import BatchingScheduler
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.fair_share import FairSharePolicy
from control_plane.scheduling.first_come import FirstComePolicy
from control_plane.scheduling.priority import PriorityPolicy
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.classes import find_class
from plugins.errors import InvalidConfig
from plugins.scheduler import Scheduler, SchedulingPolicy
from plugins.types import Request, StepPlan, WorkerInfo
from tests.fakes import request, worker_info

HERE = "tests.unit.control_plane.test_scheduler_choice"


class LastComePolicy(SchedulingPolicy):
    def order(self, request: Request) -> float:
        return -request.arrival


class Watching(RunAheadScheduler):
    """Remembers what it was built with."""

    def __init__(self, config: SchedulerConfig, worker: WorkerInfo, policy: SchedulingPolicy | None = None) -> None:
        super().__init__(config, worker, policy)
        self.built_with = (config, worker, policy)


class Unfinished(Scheduler):
    """Plans, and leaves the rest open."""

    def schedule(self, throttle_prefills: bool = False) -> StepPlan:
        return StepPlan(seq=0)


class Depthless(RunAheadScheduler):
    max_plans_in_flight = 0


def parts_of(factory: SchedulerFactory) -> tuple[SchedulerConfig, WorkerInfo, SchedulingPolicy | None]:
    """Build a scheduler and return what it was built with."""
    scheduler = factory(worker_info())
    assert isinstance(scheduler, Watching)
    return scheduler.built_with


def built_with(config: SchedulerConfig) -> tuple[SchedulerConfig, WorkerInfo, SchedulingPolicy | None]:
    return parts_of(choose_scheduler(config, Watching))


def modules_imported_for(config: str) -> dict[str, bool]:
    """Choose in another process, and tell which of our schedulers and policies it has imported then."""
    names = ("run_ahead", "synchronous", "first_come", "priority", "fair_share")
    source = (
        "import json, sys\n"
        "from control_plane.engine.scheduler_choice import choose_scheduler\n"
        "from control_plane.scheduling.config import SchedulerConfig\n"
        f"choose_scheduler(SchedulerConfig({config}))\n"
        f"print(json.dumps({{n: 'control_plane.scheduling.' + n in sys.modules for n in {names!r}}}))\n"
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=Path.cwd())
    assert run.returncode == 0, run.stderr
    found: dict[str, bool] = json.loads(run.stdout)
    return found


def test_the_scheduler_that_runs_ahead_is_chosen_alone() -> None:
    imported = modules_imported_for("")

    assert imported["run_ahead"]
    assert not imported["synchronous"]


def test_without_async_scheduling_the_synchronous_one_is_chosen_alone() -> None:
    imported = modules_imported_for("async_scheduling=False, policy='priority'")

    assert imported["synchronous"]
    assert not imported["run_ahead"]
    assert imported["priority"]
    assert not imported["fair_share"]


@pytest.mark.parametrize(
    ("is_async", "module", "depth"),
    [(True, "control_plane.scheduling.run_ahead", 2), (False, "control_plane.scheduling.synchronous", 1)],
)
def test_ours_are_built_in_and_warn_nobody(
    is_async: bool, module: str, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    factory = choose_scheduler(SchedulerConfig(async_scheduling=is_async))

    scheduler = factory(worker_info())

    assert factory.is_builtin
    assert factory.scheduler_cls is type(scheduler)
    assert (type(scheduler).__module__, scheduler.max_plans_in_flight) == (module, depth)
    assert caplog.records == []


def test_a_built_in_one_that_is_named_is_built_in() -> None:
    config = SchedulerConfig(scheduler_cls="control_plane.scheduling.synchronous:SynchronousScheduler")

    assert choose_scheduler(config).is_builtin


def test_a_class_object_wins_over_the_configuration() -> None:
    config = SchedulerConfig(scheduler_cls="nowhere:Nothing", async_scheduling=False)

    factory = choose_scheduler(config, Watching)

    assert factory.scheduler_cls is Watching
    assert not factory.is_builtin


def test_a_class_of_ours_given_as_an_object_warns_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        factory = choose_scheduler(SchedulerConfig(), BatchingScheduler)

    assert not factory.is_builtin
    assert [record.message for record in caplog.records] == ["scheduler_not_public"]


def test_the_policy_gets_its_parameters_from_the_configuration() -> None:
    _, _, first_come = built_with(SchedulerConfig())
    _, _, priority = built_with(SchedulerConfig(policy="priority", priority_ageing_s=3.0))
    _, _, fair_share = built_with(SchedulerConfig(policy="fair_share", tenant_weights="a=2"))

    assert isinstance(first_come, FirstComePolicy)
    assert isinstance(priority, PriorityPolicy)
    assert priority.order(replace(request("r"), priority=2, arrival_s=1.0)) == 7.0
    assert isinstance(fair_share, FairSharePolicy)
    fair_share.order(replace(request("r", range(3, 9), max_tokens=4), tenant="a"))
    assert fair_share.order(replace(request("s"), tenant="a")) == 5.0  # 10 tokens at weight 2


def test_a_policy_of_yours_is_named_by_its_place_and_built_for_each_scheduler() -> None:
    factory = choose_scheduler(SchedulerConfig(policy=f"{HERE}:LastComePolicy"), Watching)

    policies = [policy for _, _, policy in (parts_of(factory), parts_of(factory))]

    assert [type(policy) for policy in policies] == [LastComePolicy, LastComePolicy]
    assert policies[0] is not policies[1]


def test_our_scheduler_with_a_policy_of_yours_is_not_built_in() -> None:
    factory = choose_scheduler(SchedulerConfig(policy=f"{HERE}:LastComePolicy"))

    assert factory.scheduler_cls is RunAheadScheduler
    assert not factory.is_builtin


def test_an_unknown_policy_is_told_the_built_in_ones() -> None:
    with pytest.raises(InvalidConfig, match="unknown scheduler.policy 'lifo'; known: fair_share, fcfs, priority;"):
        choose_scheduler(SchedulerConfig(policy="lifo"))


def test_an_unknown_scheduler_is_told_that_there_is_none() -> None:
    with pytest.raises(InvalidConfig, match="unknown scheduler.scheduler_cls 'mine'; known: <none>;"):
        choose_scheduler(SchedulerConfig(scheduler_cls="mine"))


def test_what_is_no_scheduler_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="must be a subclass of plugins.scheduler.Scheduler"):
        choose_scheduler(SchedulerConfig(scheduler_cls=f"{HERE}:LastComePolicy"))
    with pytest.raises(InvalidConfig, match="must be a subclass of plugins.scheduler.Scheduler"):
        choose_scheduler(SchedulerConfig(), LastComePolicy)  # type: ignore[arg-type]  # what a caller may do


def test_a_class_object_with_methods_missing_is_refused_like_one_that_is_named() -> None:
    message = "Unfinished must define add_request, cancel_request, "

    with pytest.raises(InvalidConfig, match=f"scheduler_cls: {message}"):
        choose_scheduler(SchedulerConfig(), Unfinished)
    with pytest.raises(InvalidConfig, match=f"'{HERE}:Unfinished' .*: {message}"):
        choose_scheduler(SchedulerConfig(scheduler_cls=f"{HERE}:Unfinished"))


def test_a_policy_that_is_a_class_object_wins_over_the_configuration() -> None:
    factory = choose_scheduler(SchedulerConfig(policy="nowhere:Nothing"), Watching, policy=LastComePolicy)

    _, _, policy = parts_of(factory)

    assert isinstance(policy, LastComePolicy)
    assert not choose_scheduler(SchedulerConfig(), policy=LastComePolicy).is_builtin


def test_a_policy_object_that_is_no_policy_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="policy: .* must be a subclass of plugins.scheduler.SchedulingPolicy"):
        choose_scheduler(SchedulerConfig(), policy=Watching)  # type: ignore[arg-type]  # what a caller may do


@pytest.mark.parametrize("key", ["scheduler_cls", "policy"])
def test_a_configuration_takes_names_and_says_where_the_class_itself_goes(key: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        SchedulerConfig(**{key: LastComePolicy})  # type: ignore[arg-type]  # what a caller may do

    assert str(caught.value) == (
        f"scheduler.{key} is a name, such as {HERE}:LastComePolicy; the class itself is given as LocalEngine({key}=...)"
    )


@pytest.mark.parametrize("place", [*BUILTIN_POLICIES.values(), *BUILTIN_SCHEDULERS])
def test_what_is_built_in_is_where_the_list_says(place: str) -> None:
    found = find_class(place, "", object, "built-in")

    assert issubclass(found, (Scheduler, SchedulingPolicy))


def test_a_scheduler_without_a_depth_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="Depthless.max_plans_in_flight must be a whole number from 1 on, is 0"):
        choose_scheduler(SchedulerConfig(), Depthless)


def test_one_key_is_drawn_for_all_schedulers_of_a_factory() -> None:
    keys = (f"key number {n:06}" for n in itertools.count())

    factory = choose_scheduler(SchedulerConfig(), Watching, draw_key=lambda: next(keys))
    configs = [config for config, _, _ in (parts_of(factory), parts_of(factory))]

    assert [config.prefix_hash_key for config in configs] == ["key number 000000", "key number 000000"]


def test_a_key_of_the_configuration_is_kept() -> None:
    config, _, _ = built_with(SchedulerConfig(prefix_hash_key="a secret of an operator"))

    assert config.prefix_hash_key == "a secret of an operator"


def test_a_key_is_drawn_anew_for_each_choice() -> None:
    (first, _, _), (second, _, _) = built_with(SchedulerConfig()), built_with(SchedulerConfig())

    assert len(first.prefix_hash_key or "") == 64
    assert first.prefix_hash_key != second.prefix_hash_key


def test_a_scheduler_is_built_with_its_worker() -> None:
    scheduler: Scheduler = choose_scheduler(SchedulerConfig())(worker_info(num_blocks=7))

    assert scheduler.load().num_blocks == 7
