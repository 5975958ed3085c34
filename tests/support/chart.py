"""The Helm chart as tests see it: rendered by real helm, its objects checked against the kinds' own schemas."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import yaml
from support.fake_kubernetes import MINOR
from support.repository import ROOT

CHART: Final = ROOT / "helm/epdserve"
VALUE_SETS: Final = sorted((CHART / "ci").glob("*.yaml"))
CRDS: Final = ROOT / "tests/deploy/crds"
Object = dict[str, Any]


def helm(
    version: str, *arguments: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``helm3`` or ``helm4`` with these arguments."""
    command = [str(shutil.which(version)), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **(env or {})}
    )


def rendered(version: str, *arguments: str | Path) -> list[Object]:
    """The objects of ``helm template``.

    Raises:
        AssertionError: helm refused.
    """
    run = helm(version, "template", "r", CHART, "--kube-version", f"1.{MINOR}.0", *arguments)
    assert run.returncode == 0, run.stderr
    return objects_of(run.stdout)


def objects_of(text: str) -> list[Object]:
    """Objects of a YAML stream."""
    return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found]


def wrong_with(found: Object) -> str:
    """What a cluster would refuse about an object, or nothing."""
    import kubernetes_validate

    group = found.get("apiVersion", "").partition("/")[0]
    if (schema := _custom().get((group, found.get("kind", "")))) is not None:
        errors = list(schema.iter_errors(found["spec"]))
        return "; ".join(
            f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors[:3]
        )
    try:
        kubernetes_validate.validate(found, f"1.{MINOR}", strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return ""


@cache
def _custom() -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    raw = gzip.decompress((CRDS / "ray.io_rayclusters.yaml.gz").read_bytes())
    ray = yaml.load(raw, Loader=yaml.CSafeLoader)
    version = next(each for each in ray["spec"]["versions"] if each["name"] == "v1")
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    others = yaml.safe_load((CRDS / "others.yaml").read_text())
    groups = {"ScaledObject": "keda.sh"}
    schemas = {("ray.io", "RayCluster"): closed(spec)}
    for kind, schema in others["kinds"].items():
        schemas[groups.get(kind, "monitoring.coreos.com"), kind] = {
            **schema,
            "definitions": others["definitions"],
        }
    return {name: jsonschema.Draft202012Validator(schema) for name, schema in schemas.items()}


def closed(schema: Any) -> Any:
    """A structural schema that refuses unknown fields, as strict field validation does."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {key: closed(value) if key != "enum" else value for key, value in schema.items()}
    if "properties" in result:
        result.setdefault(
            "additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields", False))
        )
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    return result


def pod_specs(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """Every pod's specification, with a name for messages."""
    for found in objects:
        spec = found.get("spec") or {}
        if found["kind"] in ("Deployment", "StatefulSet", "DaemonSet"):
            yield f"{found['kind']} {found['metadata']['name']}", spec["template"]["spec"]
        elif found["kind"] == "RayCluster":
            yield "ray head", spec["headGroupSpec"]["template"]["spec"]
            for group in spec["workerGroupSpecs"]:
                yield f"ray {group['groupName']}", group["template"]["spec"]
