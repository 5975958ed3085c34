"""Real helm installs, upgrades, rolls back and uninstalls the chart against an API that checks every object."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chart import CHART, helm, wrong_with
from support.fake_kubernetes import Cluster, fake_kubernetes

HELMS = [
    pytest.param("helm3", marks=pytest.mark.needs("helm3")),
    pytest.param("helm4", marks=pytest.mark.needs("helm4")),
]


class Release:
    """One release as a platform team handles it."""

    def __init__(self, version: str, url: str, cluster: Cluster, home: Path) -> None:
        self.version, self.url, self.cluster, self.home = version, url, cluster, home
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "users": [{"name": "u", "user": {}}],
        }
        import json

        config["clusters"] = [{"name": "k", "cluster": {"server": url}}]
        config["contexts"] = [{"name": "c", "context": {"cluster": "k", "user": "u"}}]
        (home / "kubeconfig").write_text(json.dumps(config))

    def run(self, *arguments: str | Path) -> str:
        env = {"KUBECONFIG": str(self.home / "kubeconfig"), "HOME": str(self.home)}
        done = helm(self.version, *arguments, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def object(self, kind: str, name: str) -> dict[str, Any]:
        return self.cluster.of_kind(kind)[name]


@pytest.fixture(params=HELMS)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Release]:
    with fake_kubernetes(wrong_with) as (cluster, url):
        yield Release(request.param, url, cluster, tmp_path)


def test_a_release_lives_from_install_to_uninstall(release: Release) -> None:
    laptop = ("-f", CHART / "ci/laptop.yaml", "--disable-openapi-validation")
    release.run("install", "epd", CHART, *laptop, "--dry-run=server")
    assert set(release.cluster.of_kind("Deployment")) == set()

    notes = release.run("install", "epd", CHART, *laptop)
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in notes
    assert set(release.cluster.of_kind("StatefulSet")) == {"epd-epdserve-prefill", "epd-epdserve-decode"}
    token = release.object("Secret", "epd-epdserve-token")["data"]["token"]

    release.run(
        "upgrade",
        "epd",
        CHART,
        *laptop,
        "--set",
        "decode.replicas=3",
        "--set",
        "config.router.default_effort=60",
    )
    assert release.object("StatefulSet", "epd-epdserve-decode")["spec"]["replicas"] == 3
    assert (
        "default_effort = 60" in release.object("ConfigMap", "epd-epdserve-config")["data"]["epdserve.toml"]
    )
    assert release.object("Secret", "epd-epdserve-token")["data"]["token"] == token, (
        "workers would lose their routers"
    )

    release.run(
        "upgrade", "epd", CHART, *laptop, "--set", "store.enabled=false", "--set", "encode.replicas=1"
    )
    assert set(release.cluster.of_kind("DaemonSet")) == set()
    assert "epd-epdserve-encode" in release.cluster.of_kind("StatefulSet")

    release.run("rollback", "epd", "1")
    assert release.object("StatefulSet", "epd-epdserve-decode")["spec"]["replicas"] == 1
    assert "default_effort" not in release.object("ConfigMap", "epd-epdserve-config")["data"]["epdserve.toml"]
    assert set(release.cluster.of_kind("DaemonSet")) == {"epd-epdserve-store"}
    assert release.object("Secret", "epd-epdserve-token")["data"]["token"] == token
    assert [line.split()[0] for line in release.run("history", "epd").splitlines()[1:]] == [
        "1",
        "2",
        "3",
        "4",
    ]

    release.run("uninstall", "epd")
    assert {found["kind"] for found in release.cluster.objects.values()} == {"Namespace"}


def test_every_custom_kind_is_installed_where_its_api_is(release: Release) -> None:
    release.run("install", "epd", CHART, "-f", CHART / "ci/1p1d.yaml", "--disable-openapi-validation")
    assert set(release.cluster.of_kind("RayCluster")) == {"epd-epdserve"}
    assert set(release.cluster.of_kind("ServiceMonitor")) == {"epd-epdserve-router"}
    release.run("uninstall", "epd")
    assert {found["kind"] for found in release.cluster.objects.values()} == {"Namespace"}


def test_the_emulator_refuses_what_a_cluster_refuses(release: Release) -> None:
    broken = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"prots": []}}
    assert "prots" in wrong_with(broken)
    ray: dict[str, Any] = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "spec": {"headGroupSpec": {}, "workers": 1},
    }
    assert "workers" in wrong_with(ray)
    rule: dict[str, Any] = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "spec": {"groups": [{}]},
    }
    assert "name" in wrong_with(rule)
