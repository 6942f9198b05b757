"""What the chart's values say: refused where they are wrong, passed on word for word where they are right."""

import json
from pathlib import Path

import pytest
import yaml

from control_plane.config import Config, Source, find_sections, load_config
from control_plane.logs import LogConfig
from control_plane.scheduling.config import SchedulerConfig
from control_plane.telemetry import MetricsConfig
from control_plane.workers.config import WorkersConfig
from gpu_worker.config import WorkerConfig
from tests.chart.config_schema import SCHEMA, config_schema
from tests.chart.rendering import CHART, config_file, find, render, template


def load(path: Path) -> Config:
    return load_config(find_sections(), Source({}, "on the command line", str), {}, path)


def test_the_schema_of_config_has_the_keys_and_types_of_the_configuration() -> None:
    schema = json.loads(SCHEMA.read_text())

    assert schema["properties"]["config"] == config_schema()  # else: make generate


def test_each_plane_accepts_the_file_that_the_default_values_give_it(tmp_path: Path) -> None:
    objects = render()

    control_plane = load(config_file(objects, "cell-dihedral-control-plane", tmp_path))
    worker = load(config_file(objects, "cell-dihedral-worker", tmp_path))

    assert control_plane.section(WorkersConfig).address == "dns:cell-dihedral-worker.serving.svc:50061"
    assert control_plane.section(MetricsConfig).host == "0.0.0.0"
    assert control_plane.section(LogConfig).format == "json"
    assert worker.section(WorkerConfig).host == "0.0.0.0"


def test_config_reaches_the_planes_word_for_word(tmp_path: Path) -> None:
    objects = render(
        {
            "config.scheduler": {"max_step_tokens": 20_000_000, "watermark_ratio": 0.05},
            "config.worker": {"model": "/models/llama", "kv_cache_gib": 2.5, "port": 6000},
            "config.metrics.port": 9000,
        }
    )

    control_plane = load(config_file(objects, "cell-dihedral-control-plane", tmp_path))
    worker = load(config_file(objects, "cell-dihedral-worker", tmp_path))

    assert control_plane.section(SchedulerConfig) == SchedulerConfig(max_step_tokens=20_000_000, watermark_ratio=0.05)
    assert control_plane.section(WorkersConfig).address.endswith(":6000")
    assert worker.section(WorkerConfig) == WorkerConfig(
        model="/models/llama", kv_cache_gib=2.5, port=6000, threads=2, host="0.0.0.0"
    )
    assert worker.section(MetricsConfig).port == 9000


def test_the_key_of_block_names_comes_from_a_secret_and_from_nowhere_else() -> None:
    objects = render({"controlPlane.prefixHashKeySecret": {"name": "cache", "key": "names"}})

    (container,) = find(objects, "Deployment", "cell-dihedral-control-plane")["spec"]["template"]["spec"]["containers"]
    assert container["env"][0] == {
        "name": "DIHEDRAL_SCHEDULER__PREFIX_HASH_KEY",
        "valueFrom": {"secretKeyRef": {"name": "cache", "key": "names"}},
    }
    refused = template({"config.scheduler.prefix_hash_key": "0123456789abcdef"})
    assert refused.returncode == 1
    assert "prefix_hash_key" in refused.stderr


def test_without_a_secret_the_key_of_block_names_is_the_process_s_own() -> None:
    (container,) = find(render(), "Deployment", "cell-dihedral-control-plane")["spec"]["template"]["spec"]["containers"]

    assert [each["name"] for each in container["env"] if each["name"].startswith("DIHEDRAL_SCHEDULER")] == []


@pytest.mark.parametrize(
    ("workers", "owner_id"), [({}, "cell-dihedral"), ({"owner_id": None}, "cell-dihedral"), ({"owner_id": "a"}, "a")]
)
def test_the_control_plane_has_an_owner_id_that_outlives_its_pod(
    workers: dict[str, object], owner_id: str, tmp_path: Path
) -> None:
    objects = render({"config.workers": workers})

    control_plane = load(config_file(objects, "cell-dihedral-control-plane", tmp_path))

    assert control_plane.section(WorkersConfig).owner_id == owner_id


def test_the_worker_computes_with_the_cores_that_its_pod_requests(tmp_path: Path) -> None:
    objects = render()

    (container,) = find(objects, "StatefulSet", "cell-dihedral-worker")["spec"]["template"]["spec"]["containers"]
    worker = load(config_file(objects, "cell-dihedral-worker", tmp_path)).section(WorkerConfig)
    assert container["resources"]["requests"]["cpu"] == "2"
    assert worker.threads == 2


def test_the_control_plane_is_not_told_what_only_the_worker_needs() -> None:
    (told,) = [
        each["data"]["dihedral.yaml"]
        for each in render()
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].endswith("control-plane")
    ]

    assert "worker" not in yaml.safe_load(told)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"workr": {}}, "additional properties 'workr' not allowed"),
        ({"worker.gpus": 1}, "additional properties 'gpus' not allowed"),
        ({"worker.replicas": -1}, "minimum: got -1, want 0"),
        ({"worker.replicas": None}, "missing property 'replicas'"),
        ({"config.workers.address": "a:1"}, "additional properties 'address' not allowed"),
        ({"config.workers.heartbeat_s": 0}, "exclusiveMinimum: got 0, want 0"),
        ({"worker.startupTimeoutSeconds": 4}, "minimum: got 4, want 5"),
        ({"worker.startupTimeoutSeconds": "5"}, "got string, want integer"),
        ({"config.scheduler.max_step_token": 1}, "additional properties 'max_step_token' not allowed"),
        ({"config.worker.host": "0.0.0.0"}, "additional properties 'host' not allowed"),
        ({"config.worker.threads": "two"}, "got string, want null or integer"),
        ({"config.worker.port": 0}, "minimum: got 0, want 1"),
        ({"config.worker.dtype": "int8"}, "value must be one of 'bfloat16', 'float32'"),
        ({"config.log.level": "loud"}, "value must be one of 'debug', 'info', 'warning', 'error'"),
        ({"config.worker.lease_s": -3}, "minimum: got -3, want 0"),
        ({"config.worker.num_blocks": 0}, "minimum: got 0, want 1"),
        ({"config.worker.kv_cache_gib": 0}, "exclusiveMinimum: got 0, want 0"),
        ({"config.metrics.port": None}, "missing property 'port'"),
        ({"image.pullPolicy": "Sometimes"}, "value must be one of 'Always', 'IfNotPresent', 'Never'"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, object], complaint: str) -> None:
    run = template(values)

    assert run.returncode == 1
    assert complaint in run.stderr


def test_maps_that_kubernetes_defines_are_left_to_kubernetes() -> None:
    objects = render({"worker.affinity": {"newInSomeVersion": {}}, "podSecurityContext.fsGroupChangePolicy": "Always"})

    assert "newInSomeVersion: {}" in yaml.safe_dump(objects)


def test_the_default_values_name_no_key_that_the_configuration_lacks() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    known = config_schema()["properties"]

    for section, keys in values["config"].items():
        assert set(keys) <= set(known[section]["properties"]), section


@pytest.mark.parametrize(("version", "code"), [("1.26.9", 1), ("1.27.0", 0), ("1.27.3-gke.100", 0), ("1.37.1", 0)])
def test_kubernetes_before_grpc_probes_is_refused(version: str, code: int) -> None:
    run = template({}, "--kube-version", version)

    assert run.returncode == code
    assert ("incompatible with Kubernetes" in run.stderr) == (code == 1)
