"""The Helm chart: what it renders is valid, safe, and what the processes understand; typos are refused."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from epdserve.services.cli.__main__ import app
from epdserve.services.cli.roles import Cluster
from epdserve.services.cli.router_settings import router_config
from support.chart import CHART, VALUE_SETS, Object, helm, pod_specs, rendered, wrong_with
from support.repository import ROOT
from typer.main import get_command

HELMS = [
    pytest.param("helm3", marks=pytest.mark.needs("helm3")),
    pytest.param("helm4", marks=pytest.mark.needs("helm4")),
]
SETS = pytest.mark.parametrize("values", VALUE_SETS, ids=lambda file: file.stem)
needs_helm = pytest.mark.needs("helm4")


@cache
def objects(values: Path) -> list[Object]:
    return rendered("helm4", "-f", values)


def toml_of(found: list[Object]) -> str:
    return str(
        next(each for each in found if each["kind"] == "ConfigMap" and "epdserve.toml" in each["data"])[
            "data"
        ]["epdserve.toml"]
    )


def test_there_are_the_six_value_sets() -> None:
    names = {"laptop", "one-gpu-node", "1p1d", "2p4d-encode", "rdma-multi-node", "external-redis-tls"}
    assert {file.stem for file in VALUE_SETS} == names


def test_the_schema_is_what_values_and_settings_say() -> None:
    command = [sys.executable, "-P", ROOT / "deploy/chart_schema.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("version", HELMS)
@SETS
def test_every_value_set_passes_the_strict_linter(version: str, values: Path) -> None:
    run = helm(version, "lint", "--strict", CHART, "-f", values)
    assert run.returncode == 0, run.stdout + run.stderr


@needs_helm
@SETS
def test_every_object_is_valid_to_the_last_field(values: Path) -> None:
    wrong = {f"{each['kind']} {each['metadata']['name']}": wrong_with(each) for each in objects(values)}
    assert {name: text for name, text in wrong.items() if text} == {}


@needs_helm
@pytest.mark.needs("helm3")
@SETS
def test_both_helms_render_the_same(values: Path) -> None:
    def without_secrets(found: list[Object]) -> list[Object]:
        return [each for each in found if each["kind"] != "Secret"]

    assert without_secrets(rendered("helm3", "-f", values)) == without_secrets(objects(values))


@needs_helm
@SETS
def test_processes_understand_the_configuration(values: Path, tmp_path: Path) -> None:
    file = tmp_path / "epdserve.toml"
    file.write_text(toml_of(objects(values)))
    cluster = Cluster(file, tmp_path, "redis://registry", tmp_path / "token")
    settings, (router, _) = cluster.settings(), router_config(cluster, {})
    given = yaml.safe_load(values.read_text())
    assert router.host == "0.0.0.0"
    assert settings.machine.decode_workers == max(1, given.get("decode", {}).get("replicas", 1))
    wanted = [volume["capacityBytes"] for volume in given.get("store", {}).get("ssd", [])]
    assert [directory.capacity_bytes for directory in settings.store.ssd.directories] == wanted
    for path, value in leaves(given.get("config", {})):
        node: Any = settings.model_dump(mode="json")
        for name in path:
            node = node[name]
        assert node == value, path


def leaves(node: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict):
        return [leaf for name, inner in node.items() for leaf in leaves(inner, (*path, name))]
    return [(path, node)]


@needs_helm
def test_numbers_keep_their_kind_in_the_toml(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    config = {
        "pool": {"redis_timeout_s": 1.5},
        "store": {"host_bytes": 2**40},
        "router": {"model_aliases": ['a"\\b', "c"]},
    }
    file.write_text(yaml.safe_dump({"model": {"demo": True}, "config": config}))
    table = tomllib.loads(toml_of(rendered("helm4", "-f", file)))
    assert table["pool"]["redis_timeout_s"] == 1.5
    assert (table["store"]["host_bytes"], type(table["store"]["host_bytes"])) == (2**40, int)
    assert table["router"]["model_aliases"] == ['a"\\b', "c"]


@needs_helm
@SETS
def test_every_command_is_one_of_the_command_line(values: Path) -> None:
    commands: Any = get_command(app)
    seen = set()
    for name, spec in pod_specs(objects(values)):
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            lines = [container.get("command", []) + container.get("args", [])]
            lines.append(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", []))
            for line in lines:
                words = (
                    " ".join(line).partition("exec epdserve ")[2].split()
                    if "bash" in "".join(line[:1])
                    else line[1:]
                )
                if not words or ("epdserve" not in line[0] and "bash" not in line[0]):
                    continue
                known = {option for each in commands.commands[words[0]].params for option in each.opts}
                given = {word.partition("=")[0] for word in words if word.startswith("--")}
                assert given <= known, f"{name}: {words}"
                seen.add(words[0])
    assert {"router", "stop-worker"} <= seen
    assert "worker" in seen


@needs_helm
@SETS
def test_pods_have_no_rights_they_do_not_need(values: Path) -> None:
    kinds = {each["kind"] for each in objects(values)}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    for name, spec in pod_specs(objects(values)):
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")), name
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"], name
            assert not security["allowPrivilegeEscalation"], name
            assert security["capabilities"]["drop"] == ["ALL"], name
            assert set(security["capabilities"].get("add", [])) <= {"IPC_LOCK"}, name
            assert container["resources"]["limits"]["memory"], name


@needs_helm
@SETS
def test_every_pod_has_probes_and_time_to_drain(values: Path) -> None:
    config = tomllib.loads(toml_of(objects(values)))
    for name, spec in pod_specs(objects(values)):
        for container in spec["containers"]:
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container), name
            before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
            if "stop-worker" in before:
                wait_s = int(before[-1].partition("=")[2])
                assert wait_s > config["pool"].get("drain_timeout_s", 30) + 10, name
                assert spec["terminationGracePeriodSeconds"] > wait_s, name
            elif before[:1] == ["sleep"]:
                drain_s = config["router"].get("drain_timeout_s", 30)
                assert spec["terminationGracePeriodSeconds"] > int(before[1]) + drain_s, name


@needs_helm
@SETS
def test_pods_are_spread_budgeted_and_walled_in(values: Path) -> None:
    found = objects(values)
    policies = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "NetworkPolicy"}
    assert set(policies) == {"r-epdserve-router", "r-epdserve-inside"}
    assert all(policy["policyTypes"] == ["Ingress", "Egress"] for policy in policies.values())
    budgets = {each["metadata"]["name"] for each in found if each["kind"] == "PodDisruptionBudget"}
    assert {"r-epdserve-prefill", "r-epdserve-decode"} <= budgets
    spread = {name for name, spec in pod_specs(found) if spec.get("topologySpreadConstraints")}
    assert len(spread) >= 3


@needs_helm
def test_what_a_machine_has_is_asked_for(tmp_path: Path) -> None:
    by_name = dict(pod_specs(objects(CHART / "ci/rdma-multi-node.yaml")))
    prefill, store = by_name["ray prefill"], by_name["DaemonSet r-epdserve-store"]
    limits = prefill["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/hca_shared_devices_a"], limits["hugepages-2Mi"]) == (
        8,
        1,
        "32Gi",
    )
    assert {"name": "UCX_NET_DEVICES", "value": "mlx5_0:1,mlx5_1:1"} in prefill["containers"][0]["env"]
    assert "IPC_LOCK" in prefill["containers"][0]["securityContext"]["capabilities"]["add"]
    disks = [volume["hostPath"]["path"] for volume in store["volumes"] if "hostPath" in volume]
    assert disks == ["/srv/models", "/mnt/nvme0/epdserve", "/mnt/nvme1/epdserve"]
    claims = next(
        each
        for each in objects(CHART / "ci/2p4d-encode.yaml")
        if each["metadata"]["name"] == "r-epdserve-store" and each["kind"] == "StatefulSet"
    )["spec"]["volumeClaimTemplates"]
    assert [claim["spec"]["storageClassName"] for claim in claims] == ["local-nvme", "local-nvme"]


@needs_helm
def test_pools_scale_on_our_metrics_and_monitoring_brings_rules_and_dashboards() -> None:
    found = objects(CHART / "ci/2p4d-encode.yaml")
    kinds = [each["kind"] for each in found]
    assert {
        "HorizontalPodAutoscaler",
        "ScaledObject",
        "ServiceMonitor",
        "PodMonitor",
        "PrometheusRule",
    } <= set(kinds)
    scaled = {
        each["spec"]["scaleTargetRef"]["name"]
        for each in found
        if "scaleTargetRef" in (each.get("spec") or {})
    }
    assert scaled == {"r-epdserve-router", "r-epdserve-prefill", "r-epdserve-decode"}
    boards = next(each for each in found if each["metadata"]["name"] == "r-epdserve-dashboards")["data"]
    assert len(boards) >= 5


@pytest.mark.parametrize("version", HELMS)
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("prefil.replicas=2", "prefil"),
        ("decode.replica=2", "replica"),
        ("config.router.prot=1", "prot"),
        ("config.prefill.engine.num_page=1", "num_page"),
        ("config.router.port=high", "port"),
        ("config.router.registry_url=x", "registry_url"),
        ("workers.kind=Deployment", "kind"),
        ("store.ssd[0].name=a", "capacityBytes"),
        ("registry.external.url=redis://:password@host", "url"),
        ("prefill.resources.limits.memory=lots", "memory"),
    ],
)
def test_typos_are_refused(version: str, setting: str, said: str) -> None:
    run = helm(version, "template", "r", CHART, "--set", "model.demo=true", "--set", setting)
    assert run.returncode != 0
    assert said in run.stderr


@needs_helm
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "model.volume names where the checkpoint is"),
        (("model.demo=true", "registry.kind=external"), "registry.external needs url or existingSecret"),
        (("model.demo=true", "decode.autoscaling.kind=keda"), "KubeRay scales its own groups"),
        (
            (
                "model.demo=true",
                "store.ssd[0].name=a",
                "store.ssd[0].capacityBytes=2000000",
                "store.ssd[0].size=1Gi",
            ),
            "give it a hostPath",
        ),
    ],
)
def test_what_does_not_go_together_is_said(settings: tuple[str, ...], said: str) -> None:
    flags = [flag for setting in settings for flag in ("--set", setting)]
    run = helm("helm4", "template", "r", CHART, *flags)
    assert run.returncode != 0
    assert said in run.stderr
