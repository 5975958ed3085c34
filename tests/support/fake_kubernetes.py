"""A Kubernetes API for helm, on loopback: objects in memory, strict schemas, no controllers, no admission.

It serves discovery, reads and writes of the kinds the chart makes, patches in the three forms that helm sends, and dry
runs. Whatever is stored is checked first, so a field that the API does not have fails the release, as in a cluster.
"""

from __future__ import annotations

import base64
import copy
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

Object = dict[str, Any]
MINOR: Final = "33"
# group/version -> plural -> kind
KINDS: Final[Mapping[str, Mapping[str, str]]] = {
    "v1": {
        "namespaces": "Namespace",
        "pods": "Pod",
        "services": "Service",
        "configmaps": "ConfigMap",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "persistentvolumeclaims": "PersistentVolumeClaim",
    },
    "apps/v1": {
        "deployments": "Deployment",
        "statefulsets": "StatefulSet",
        "daemonsets": "DaemonSet",
        "replicasets": "ReplicaSet",
    },
    "batch/v1": {"jobs": "Job"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "ray.io/v1": {"rayclusters": "RayCluster"},
    "monitoring.coreos.com/v1": {
        "servicemonitors": "ServiceMonitor",
        "podmonitors": "PodMonitor",
        "prometheusrules": "PrometheusRule",
    },
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject"},
}
VERBS: Final = ["create", "delete", "get", "list", "patch", "update", "watch"]
# Lists that a strategic patch merges item by item, and what names an item
MERGE_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "topologySpreadConstraints": "topologyKey",
}


class RefusedError(Exception):
    """An answer of the API other than an object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass
class Cluster:
    """What is stored.

    Attributes:
        check: Says what is wrong with an object, or nothing.
        objects: By (group/version, plural, namespace, name).
    """

    check: Callable[[Object], str]
    objects: dict[tuple[str, str, str, str], Object] = field(default_factory=dict)
    writes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of_kind(self, kind: str) -> dict[str, Object]:
        """All objects of a kind by name."""
        return {key[3]: found for key, found in self.objects.items() if found["kind"] == kind}

    def store(self, key: tuple[str, str, str, str], wanted: Object, *, dry: bool) -> Object:
        """Check and keep.

        Raises:
            RefusedError: It is not valid.
        """
        group, plural, namespace, name = key
        wanted = copy.deepcopy(wanted)
        wanted.setdefault("apiVersion", group)
        wanted.setdefault("kind", KINDS[group][plural])
        meta = wanted.setdefault("metadata", {})
        for bookkeeping in ("resourceVersion", "uid", "creationTimestamp", "generation", "managedFields"):
            meta.pop(bookkeeping, None)
        meta.setdefault("name", name)
        if namespace:
            meta.setdefault("namespace", namespace)
        if wrong := self.check(wanted):
            raise RefusedError(422, "Invalid", f'{wanted["kind"]} "{name}" is invalid: {wrong}')
        old = self.objects.get(key)
        self.writes += 1
        meta |= {
            "uid": old["metadata"]["uid"] if old else str(uuid.uuid4()),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "resourceVersion": str(self.writes),
        }
        if not dry:
            self.objects[key] = wanted
        return wanted


def merged(old: Any, patch: Any, *, strategic: bool, name: str = "") -> Any:
    """A merge patch applied; a strategic one merges some lists item by item."""
    if isinstance(old, dict) and isinstance(patch, dict):
        result = dict(old)
        for key, value in patch.items():
            if key.startswith("$"):
                continue  # orders of lists, retained keys
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(result.get(key), value, strategic=strategic, name=key)
        return result
    if isinstance(patch, dict):
        return merged({}, patch, strategic=strategic)
    if strategic and isinstance(patch, list):
        key = MERGE_KEYS.get(name)
        if key is None and name == "ports":
            key = next((each for each in ("containerPort", "port") if patch and each in patch[0]), None)
        if key is not None and isinstance(old, list):
            return _merged_items(old, patch, key)
        return [item for item in patch if not (isinstance(item, dict) and "$patch" in item)]
    return patch


def _merged_items(old: list[Any], patch: list[Any], key: str) -> list[Any]:
    items = {item[key]: item for item in old}
    for item in patch:
        if item.get("$patch") == "delete":
            items.pop(item[key], None)
        else:
            items[item[key]] = merged(items.get(item[key], {}), item, strategic=True)
    return list(items.values())


def from_protobuf(raw: bytes) -> Object:
    """A Secret or ConfigMap as typed clients send it: a prefix, an envelope (type, bytes), the object in its fields."""
    envelope = dict(_fields(raw[4:]))
    kind = dict(_fields(envelope[1]))
    found: Object = {"apiVersion": kind[1].decode(), "kind": kind[2].decode(), "metadata": {}}
    secret = found["kind"] == "Secret"
    for number, value in _fields(envelope[2]):
        if number == 1:
            found["metadata"] = _metadata(value)
        elif number == 2:
            pair = dict(_fields(value))
            content = pair.get(2, b"")
            text = base64.b64encode(content).decode() if secret else content.decode()
            found.setdefault("data", {})[pair[1].decode()] = text
        elif number == 3 and secret:
            found["type"] = value.decode()
    return found


def _metadata(raw: bytes) -> Object:
    meta: Object = {}
    plain, maps = {1: "name", 3: "namespace"}, {11: "labels", 12: "annotations"}
    for number, value in _fields(raw):
        if number in plain and value:
            meta[plain[number]] = value.decode()
        elif number in maps:
            pair = dict(_fields(value))
            meta.setdefault(maps[number], {})[pair[1].decode()] = pair.get(2, b"").decode()
    return meta


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(raw):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
            continue
        size = number() if tag & 7 == 2 else {1: 8, 5: 4}[tag & 7]
        yield tag >> 3, raw[at : at + size]
        at += size


class _Handler(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer in one piece: two would wait for a delayed ACK
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _any(self) -> None:
        try:
            code, body = self._answer()
        except RefusedError as error:
            code = error.code
            body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            body |= {"reason": error.reason, "message": str(error), "code": code}
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

    def _answer(self) -> tuple[int, Object]:
        size = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(size)
        url = urlsplit(self.path)
        words = [unquote(word) for word in url.path.split("/") if word]
        if url.path == "/version":
            return 200, {
                "major": "1",
                "minor": MINOR,
                "gitVersion": f"v1.{MINOR}.0",
                "platform": "linux/amd64",
            }
        if words == ["api"]:
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if words == ["apis"]:
            return 200, _groups()
        if words[:1] == ["api"]:
            group, rest = "v1", words[2:]
        elif words[:1] == ["apis"] and len(words) >= 3:
            group, rest = "/".join(words[1:3]), words[3:]
        else:
            raise RefusedError(404, "NotFound", url.path)
        if group not in KINDS:
            raise RefusedError(404, "NotFound", f"no {group} here")
        if not rest:
            return 200, _resources(group)
        with self.cluster.lock:
            return self._object(group, rest, parse_qs(url.query), raw)

    def _object(
        self, group: str, rest: list[str], query: dict[str, list[str]], raw: bytes
    ) -> tuple[int, Object]:
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name = rest[0], rest[1] if len(rest) > 1 else ""
        if plural not in KINDS[group]:
            raise RefusedError(404, "NotFound", f"no {plural} here")
        key, dry = (group, plural, namespace, name), query.get("dryRun") == ["All"]
        old = self.cluster.objects.get(key)
        if self.command == "GET" and not name:
            return 200, self._list(group, plural, namespace, query)
        if self.command == "POST":
            return self._create((group, plural, namespace), _read(raw), dry)
        applied = "apply-patch" in (self.headers.get("Content-Type") or "")
        if old is None and not (self.command == "PATCH" and applied):
            raise RefusedError(404, "NotFound", f'{plural} "{name}" not found')
        if self.command == "GET":
            return 200, old or {}
        if self.command == "DELETE":
            if not dry:
                del self.cluster.objects[key]
            return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return 200 if old else 201, self.cluster.store(key, self._patched(old, _read(raw)), dry=dry)

    def _create(self, place: tuple[str, str, str], body: Object, dry: bool) -> tuple[int, Object]:
        key = (*place, str(body["metadata"]["name"]))
        if key in self.cluster.objects:
            raise RefusedError(409, "AlreadyExists", f'{key[1]} "{key[3]}" already exists')
        return 201, self.cluster.store(key, body, dry=dry)

    def _patched(self, old: Object | None, body: Object) -> Object:
        kind = self.headers.get("Content-Type") or ""
        if self.command == "PUT" or old is None or "apply-patch" in kind:
            return body  # one manager owns every field: what it does not name any more goes
        result: Object = merged(old, body, strategic="strategic" in kind)
        return result

    def _list(self, group: str, plural: str, namespace: str, query: dict[str, list[str]]) -> Object:
        wanted = [
            term.split("=", 1) for term in ",".join(query.get("labelSelector", [])).split(",") if "=" in term
        ]
        items = [
            found
            for (of, what, where, _), found in self.cluster.objects.items()
            if (of, what) == (group, plural)
            and namespace in ("", where)
            and all((found["metadata"].get("labels") or {}).get(k) == v.lstrip("=") for k, v in wanted)
        ]
        kind = KINDS[group][plural] + "List"
        return {"kind": kind, "apiVersion": group, "metadata": {"resourceVersion": "1"}, "items": items}


def _read(raw: bytes) -> Object:
    body: Object = from_protobuf(raw) if raw[:4] == b"k8s\0" else yaml.safe_load(raw)
    return body


def _groups() -> Object:
    names = [group.split("/") for group in KINDS if "/" in group]
    groups = [
        {"name": n, "versions": [v], "preferredVersion": v}
        for n, version in names
        for v in [{"groupVersion": f"{n}/{version}", "version": version}]
    ]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resources(group: str) -> Object:
    resources = [
        {
            "name": plural,
            "singularName": kind.lower(),
            "kind": kind,
            "namespaced": kind != "Namespace",
            "verbs": VERBS,
        }
        for plural, kind in KINDS[group].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": resources}


@contextmanager
def fake_kubernetes(check: Callable[[Object], str]) -> Iterator[tuple[Cluster, str]]:
    """A running API and its URL."""
    cluster = Cluster(check)
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}
    cluster.store(("v1", "namespaces", "", "default"), space, dry=False)
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield cluster, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
