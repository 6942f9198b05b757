"""What the chart installs: valid, consistent with itself, and hardened."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_validate import validate

from tests.chart.rendering import CHART, Object, find, helm, pods, render, template

KUBERNETES = ("1.27", "1.33", "1.37")


def pod_of(objects: list[Object], component: str) -> Any:
    kind = {"control-plane": "Deployment", "worker": "StatefulSet"}[component]
    return find(objects, kind, f"cell-dihedral-{component}")["spec"]["template"]["spec"]


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def check(objects: list[Object]) -> None:
    """Hold what is true whatever the values: valid objects whose references meet."""
    for each in objects:
        for version in KUBERNETES:
            validate(each, version, strict=True)
    config_maps = {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}
    for owner in objects:
        if owner["kind"] in ("Deployment", "StatefulSet"):
            assert matches(owner["spec"]["selector"]["matchLabels"], owner["spec"]["template"]["metadata"]["labels"])
    for service in (each for each in objects if each["kind"] == "Service"):
        (selected,) = [pod for pod in pods(objects) if matches(service["spec"]["selector"], pod["metadata"]["labels"])]
        named = {port["name"] for port in selected["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} == named
    for pod in pods(objects):
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert {
            volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume
        } <= config_maps
        grpc = {port["name"]: port["containerPort"] for port in container["ports"]}["grpc"]
        probes = [container[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert {probe["grpc"]["port"] for probe in probes} == {grpc}


def test_the_chart_passes_its_linter() -> None:
    lint = helm("lint", "--strict", str(CHART))

    assert lint.returncode == 0, lint.stdout


def test_the_chart_of_the_default_values_is_valid_and_consistent() -> None:
    check(render())


def test_an_object_with_a_misspelt_field_would_be_found() -> None:
    objects = render()
    find(objects, "StatefulSet", "cell-dihedral-worker")["spec"]["podManagmentPolicy"] = "Parallel"

    with pytest.raises(Exception, match="podManagmentPolicy"):
        check(objects)


@settings(max_examples=10, deadline=None)
@given(
    metrics=st.booleans(),
    ports=st.tuples(st.integers(1024, 65535), st.integers(1024, 65535), st.integers(1024, 65535)),
    drain_s=st.floats(0, 600, allow_nan=False),
    startup_s=st.integers(5, 7200),
    replicas=st.integers(0, 64),
    name=st.from_regex(r"[a-z]([a-z0-9-]{0,60}[a-z0-9])?", fullmatch=True),
    service=st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]),
)
def test_the_chart_is_valid_and_consistent_whatever_the_values(
    metrics: bool, ports: tuple[int, int, int], drain_s: float, startup_s: int, replicas: int, name: str, service: str
) -> None:
    objects = render(
        {
            "worker.startupTimeoutSeconds": startup_s,
            "worker.replicas": replicas,
            "controlPlane.service.type": service,
            "controlPlane.podLabels": {"team": "a"},
            "config.metrics.enabled": metrics,
            "config.server.port": ports[0],
            "config.worker.port": ports[1],
            "config.metrics.port": ports[2],
            "config.server.drain_s": drain_s,
            "fullnameOverride": name,
        }
    )

    check(objects)


def test_rendering_twice_gives_the_same() -> None:
    assert template({}).stdout == template({}).stdout


def test_there_is_one_control_plane_at_a_time_and_as_many_workers_as_asked_for() -> None:
    objects = render({"worker.replicas": 3})

    control_plane = find(objects, "Deployment", "cell-dihedral-control-plane")["spec"]
    assert (control_plane["replicas"], control_plane["strategy"]) == (1, {"type": "Recreate"})
    assert find(objects, "StatefulSet", "cell-dihedral-worker")["spec"]["replicas"] == 3


def test_workers_are_upgraded_one_after_the_other_with_time_between_them() -> None:
    workers = find(render({"worker.minReadySeconds": 90}), "StatefulSet", "cell-dihedral-worker")["spec"]

    assert workers["updateStrategy"] == {"type": "RollingUpdate"}
    assert workers["minReadySeconds"] == 90
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] == 30


def test_workers_are_found_by_the_name_of_their_service_while_they_load() -> None:
    service = find(render(), "Service", "cell-dihedral-worker")["spec"]

    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


@pytest.mark.parametrize(
    ("component", "startup", "budget_s"), [("control-plane", "liveness", 120), ("worker", "readiness", 1800)]
)
def test_probes_ask_the_health_service_and_give_a_model_time_to_load(
    component: str, startup: str, budget_s: int
) -> None:
    (container,) = pod_of(render(), component)["containers"]

    assert container["startupProbe"]["grpc"]["service"] == startup
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] == budget_s
    assert container["readinessProbe"]["grpc"]["service"] == "readiness"
    assert container["livenessProbe"]["grpc"]["service"] == "liveness"


@pytest.mark.parametrize(("drain_s", "grace_s"), [(10.0, 25), (0.5, 16), (300, 315)])
def test_a_pod_is_not_killed_while_it_drains(drain_s: float, grace_s: int) -> None:
    pod = pod_of(render({"config.server.drain_s": drain_s}), "control-plane")

    assert pod["terminationGracePeriodSeconds"] == grace_s


def test_resources_of_any_name_are_asked_for_beside_those_of_the_values() -> None:
    objects = render({"worker.resources": {"limits": {"hugepages-2Mi": "1Gi"}}})
    (container,) = pod_of(objects, "worker")["containers"]

    assert container["resources"]["limits"] == {"memory": "4Gi", "hugepages-2Mi": "1Gi"}


def test_metrics_that_are_off_have_no_port_and_no_annotation() -> None:
    assert "9464" not in yaml.safe_dump([pods(render({"config.metrics.enabled": False}))])
    assert "prometheus.io/port: '9464'" in yaml.safe_dump(pods(render()))


def test_a_changed_setting_restarts_the_plane_that_reads_it_and_no_other() -> None:
    before, after = pods(render()), pods(render({"config.worker.lease_s": 9.0}))

    changed = [
        old["metadata"]["annotations"] != new["metadata"]["annotations"] for old, new in zip(before, after, strict=True)
    ]
    assert changed == [False, True]


@pytest.mark.parametrize("component", ["control-plane", "worker"])
def test_every_pod_passes_the_restricted_pod_security_standard(component: str) -> None:
    pod = pod_of(render(), component)
    (container,) = pod["containers"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers", "hostAliases"} & set(pod)
    assert all(set(volume) & {"configMap", "emptyDir"} for volume in pod["volumes"])


@pytest.mark.parametrize("component", ["control-plane", "worker"])
def test_every_pod_writes_only_where_it_has_a_volume_and_imports_only_what_is_installed(component: str) -> None:
    (container,) = pod_of(render(), component)["containers"]

    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert writable == {"/tmp", "/cache"}
    assert environment["XDG_CACHE_HOME"] == "/cache"
    assert environment["HF_HOME"] == "/cache/huggingface"
    assert environment["PYTHONSAFEPATH"] == "1"
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_the_notes_tell_the_first_request() -> None:
    notes = helm("install", "cell", str(CHART), "--namespace", "serving", "--dry-run=client").stdout

    assert "one control plane and 1 worker.\n" in notes
    assert "port-forward service/cell-dihedral 50051:50051" in notes
    assert "dihedral generate" in notes
