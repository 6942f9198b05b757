"""Builds a worker in this process, found by entry point so that the planes need not meet."""

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from control_plane.config import Source, load_config
from control_plane.workers.handle import WorkerHandle
from plugins.errors import InvalidConfig
from plugins.logits_loading import LoadedProcessor
from plugins.metrics import NoMetrics


def build_worker(values: Mapping[str, object], processors: Sequence[LoadedProcessor]) -> WorkerHandle:
    """Build a worker of these keys of its configuration, with these processors of scores; it loads its model.

    Raises: InvalidConfig: a key is unknown (the nearest one is told) or its value is wrong, or the worker's packages
        are not installed.
    """
    config_class = _load("dihedral.config_sections", "worker")
    build = _load("dihedral.worker_factories", "local")
    given = Source({f"worker.{key}": value for key, value in values.items()}, "of LocalEngine", _argument)
    config = load_config({"worker": config_class}, given, {}, None).section(config_class)
    worker: WorkerHandle = build(config, NoMetrics(), lambda phase, done, total: None, processors)
    return worker


def _argument(key: str) -> str:
    return key.removeprefix("worker.")


def _load(group: str, name: str) -> Any:
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    if not found:
        raise InvalidConfig(f"no {name!r} in the entry-point group {group}; install the package with its worker extra")
    return found[0].load()
