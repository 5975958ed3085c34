"""Writes helm/epdserve/values.schema.json: ``python deploy/chart_schema.py [--check]``.

What a value may be follows from values.yaml, which shows every key once: its type there is its type, what needs more
is said in ``RULES``. The keys under ``config`` are those of the TOML, out of the models that read it. Nothing else is
allowed anywhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from epdserve.services.cli.router_settings import AS_THE_POOL
from epdserve.services.cli.settings import FILLED_IN, UpSettings

CHART: Final = Path(__file__).resolve().parents[1] / "helm" / "epdserve"
Schema = dict[str, Any]
DRAFT: Final = "/".join(("http:", "", "json-schema.org", "draft-07", "schema#"))

QUANTITY: Final = {
    "type": ["string", "integer"],
    "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$",
}
NAME: Final = {"type": "string", "pattern": r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$"}
LABEL: Final = {"type": "string", "pattern": r"^([a-z]([a-z0-9-]*[a-z0-9])?)?$"}  # services are named by it
STRINGS: Final = {"type": "object", "additionalProperties": {"type": "string"}}
ANY_OBJECT: Final = {"type": "object"}
RESOURCES: Final = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "requests": {"type": "object", "additionalProperties": QUANTITY},
        "limits": {"type": "object", "additionalProperties": QUANTITY},
    },
}
SSD: Final = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "capacityBytes"],
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$"},
            "hostPath": {"type": "string", "pattern": "^/"},
            "storageClass": {"type": "string"},
            "size": QUANTITY,
            "capacityBytes": {"type": "integer", "minimum": 1048576},
        },
    },
}


def one_of(*values: str) -> Schema:
    """One of these words."""
    return {"type": "string", "enum": list(values)}


def objects() -> Schema:
    """A list of what Kubernetes understands."""
    return {"type": "array", "items": ANY_OBJECT}


def at_least(minimum: int) -> Schema:
    """A whole number from there on."""
    return {"type": "integer", "minimum": minimum}


# The last names of a path, most particular first in effect: "router.replicas" wins over "replicas".
RULES: Final[Mapping[str, Schema]] = {
    "kind": one_of("none", "hpa", "keda"),
    "workers.kind": one_of("RayCluster", "StatefulSet"),
    "store.kind": one_of("DaemonSet", "StatefulSet"),
    "registry.kind": one_of("valkey", "external"),
    "pullPolicy": one_of("Always", "IfNotPresent", "Never"),
    "service.type": one_of("ClusterIP", "NodePort", "LoadBalancer"),
    "pullSecrets": {"type": "array", "items": NAME},
    "existingSecret": NAME,
    "clientCASecret": NAME,
    "caSecret": NAME,
    "resources": RESOURCES,
    "ssd": SSD,
    "volume": ANY_OBJECT,
    "affinity": ANY_OBJECT,
    "nodeSelector": STRINGS,
    "annotations": STRINGS,
    "podAnnotations": STRINGS,
    "labels": STRINGS,
    "env": STRINGS,
    "tolerations": objects(),
    "clients": objects(),
    "egress": objects(),
    "networkPolicy.monitoring": objects(),
    "nameOverride": LABEL,
    "fullnameOverride": LABEL,
    "sharedMemory": QUANTITY,
    "hugepages": {"anyOf": [QUANTITY, {"const": ""}]},
    "replicas": at_least(0),
    "router.replicas": at_least(1),
    "minReplicas": at_least(1),
    "maxReplicas": at_least(1),
    "target": at_least(1),
    "gpus": {"type": "number", "minimum": 0},
    "count": at_least(1),
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "adminPort": {"type": "integer", "minimum": 0, "maximum": 65535},
    "endpointSeconds": at_least(0),
    "startSeconds": at_least(1),
    "mountPath": {"type": "string", "pattern": "^/[a-zA-Z0-9/_.-]+$"},
    "folder": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]+$"},
    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
    "external.url": {"type": "string", "pattern": "^(rediss?://[^@]+)?$"},
    "runAsUser": at_least(1),
}


def schema_of(values: Any, path: tuple[str, ...]) -> Schema:
    """What may stand where ``values`` stand."""
    for start in range(len(path)):
        if (rule := RULES.get(".".join(path[start:]))) is not None:
            return rule
    if isinstance(values, Mapping):
        inner = {
            name: schema_of(value, (*path, name))
            for name, value in values.items()
            if (*path, name) != ("config",)
        }
        return {"type": "object", "additionalProperties": False, "properties": inner}
    if isinstance(values, bool):
        return {"type": "boolean"}
    if isinstance(values, int):
        return at_least(0)
    if isinstance(values, str):
        return {"type": "string"}
    raise SystemExit(f"values.yaml: say in RULES what {'.'.join(path)} may be")


def config_schema() -> Schema:
    """Of the TOML's keys, as pydantic says, without what the chart fills in; nothing is required."""
    whole = UpSettings.model_json_schema()
    definitions = whole.pop("$defs")

    def plain(node: Any) -> Any:
        if isinstance(node, list):
            return [plain(item) for item in node]
        if not isinstance(node, Mapping):
            return node
        if "$ref" in node:
            return plain(definitions[node["$ref"].rpartition("/")[2]])
        dropped = ("title", "description", "required", "format", "default", "discriminator")
        kept = {key: value for key, value in node.items() if key not in dropped}
        if "properties" in node:
            kept["properties"] = {name: plain(value) for name, value in node["properties"].items()}
            return {key: value if key == "properties" else plain(value) for key, value in kept.items()}
        return {key: plain(value) for key, value in kept.items()}

    config: Schema = plain(whole)
    filled = {**FILLED_IN, "router": (*FILLED_IN["router"], *AS_THE_POOL, "router_id")}
    for section, names in filled.items():
        node = config
        for name in section.split("."):
            node = node["properties"][name]
        for name in names:
            node["properties"].pop(name, None)
    return config


def text() -> str:
    """The file's."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = schema_of(values, ())
    schema["properties"]["config"] = config_schema()
    schema["properties"]["global"] = ANY_OBJECT  # helm adds it for charts that hold this one
    return json.dumps({"$schema": DRAFT, **schema}, indent=1, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    """Write it, or compare it."""
    file, wanted = CHART / "values.schema.json", text()
    if "--check" in arguments:
        fresh = file.is_file() and file.read_text(encoding="utf-8") == wanted
        print("fresh" if fresh else f"{file} is not what the code says: run this without --check")
        return 0 if fresh else 1
    file.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
