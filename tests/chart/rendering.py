"""Renders the chart with the real helm, as the tests read it: a list of objects."""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.architecture.sources import ROOT

CHART = ROOT / "helm/dihedral"
HELM = ROOT / ".cache/helm"  # `make test` puts it there

Object = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *arguments], capture_output=True, text=True, check=False)


def template(values: Object, *flags: str) -> subprocess.CompletedProcess[str]:
    """Render the chart as release `cell` in namespace `serving`."""
    sets = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    return helm("template", "cell", str(CHART), "--namespace", "serving", *sets, *flags)


def render(values: Object | None = None) -> list[Object]:
    """Return the chart's objects for some values on top of its own."""
    run = template(values or {})
    assert run.returncode == 0, run.stderr
    return [each for each in yaml.safe_load_all(run.stdout) if each is not None]


def find(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def pods(objects: list[Object]) -> list[Object]:
    """Return the pod templates, metadata and spec, of everything that runs pods."""
    return [each["spec"]["template"] for each in objects if each["kind"] in ("Deployment", "StatefulSet")]


def config_file(objects: list[Object], name: str, folder: Path) -> Path:
    """Write the configuration file that a ConfigMap holds, as its pod would see it."""
    path = folder / f"{name}.yaml"
    path.write_text(find(objects, "ConfigMap", name)["data"]["dihedral.yaml"])
    return path
