"""What an administrator may do, on a port of its own on loopback: look, drain, forget.

Whoever reaches the port may look, so it binds to loopback and nothing else; changes want the administrator's key, where
one is set. A web page in a browser on the same machine reaches loopback, too: every request must name a loopback host,
and every change must carry a header that no page can send to another origin unasked.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Protocol

import orjson
from epdserve.services.errors import InvalidRequest, ServiceError, Unauthenticated, Unavailable
from epdserve.services.router.console.page import console_routes
from epdserve.services.router.http_errors import NotFound, error_body, status_of
from epdserve.services.router.tenancy.gate import TenantGate
from epdserve.services.router.tenancy.tenant import Tenant
from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

log = logging.getLogger(__name__)

HEADER: Final = "x-epdserve-admin"
_MIN_KEY_CHARS: Final = 16

Handler = Callable[[Request], Awaitable[Any]]


class Operations(Protocol):
    """What the router lends to its administrator."""

    def load(self) -> Mapping[str, Any]:
        """What is going on, as JSON."""

    def explain(self, request_id: str) -> Mapping[str, Any] | None:
        """Why a request went where it went: candidates with their costs; None if it is not remembered."""

    def present(self) -> Mapping[str, Any]:
        """Workers, requests inside, errors, efforts and tiers, as JSON: what the console shows."""

    async def drain(self, worker: str, wanted: bool) -> None:
        """Have a worker take no new work, or take it again.

        Raises:
            ServiceError: There is none, or it cannot be told.
        """

    async def forget(self, tenant: Tenant | None) -> Mapping[str, Any]:
        """Delete what is cached of a tenant, or everything; what was deleted, as JSON.

        Raises:
            ServiceError: Some of it could not be.
        """


def create_admin(gate: TenantGate, operations: Operations, *, key: str | None = None) -> Starlette:
    """The administrator's application.

    Args:
        key: Changes must carry it as a bearer token; None = they need none.
    """
    desk, digest = _Desk(gate, operations), None if key is None else sha256(key.encode()).digest()

    def _guarded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        return _answering(handler, digest)

    return Starlette(
        routes=[
            *console_routes(_on_loopback),
            Route("/admin/present", _guarded(desk.present), methods=["GET"]),
            Route("/admin/workers/{name}/drain", _guarded(desk.drain_worker), methods=["POST", "DELETE"]),
            Route("/admin/load", _guarded(desk.load), methods=["GET"]),
            Route("/admin/explain/{request:path}", _guarded(desk.explain), methods=["GET"]),
            Route("/admin/tenants", _guarded(desk.tenants), methods=["GET"]),
            Route("/admin/tenants/{name}", _guarded(desk.tenant), methods=["GET"]),
            Route("/admin/tenants/{name}/data", _guarded(desk.forget_tenant), methods=["DELETE"]),
            Route("/admin/drain", _guarded(desk.drain), methods=["POST", "DELETE"]),
            Route("/admin/caches/reset", _guarded(desk.forget_all), methods=["POST"]),
            Route("/admin/keys/reload", _guarded(desk.reload), methods=["POST"]),
        ]
    )


class _Desk:
    """The handlers: each answers with a value that becomes JSON, or raises ``ServiceError``."""

    def __init__(self, gate: TenantGate, operations: Operations) -> None:
        self._gate, self._operations = gate, operations

    async def load(self, request: Request) -> Any:
        """What is going on."""
        gate = self._gate
        return {
            "draining": gate.draining,
            "inside": gate.inside,
            "refused": asdict(gate.counts),
            **self._operations.load(),
        }

    async def present(self, request: Request) -> Any:
        """What the console shows."""
        return {"draining": self._gate.draining, **self._operations.present()}

    async def drain_worker(self, request: Request) -> Any:
        """Have a worker take no new work, or take it again."""
        name, wanted = request.path_params["name"], request.method == "POST"
        await self._operations.drain(name, wanted)
        log.info("worker drain", extra={"worker": name, "drain": wanted})
        return {"worker": name, "draining": wanted}

    async def explain(self, request: Request) -> Any:
        """Why a request went where it went."""
        explained = self._operations.explain(request.path_params["request"])
        if explained is None:
            raise NotFound("no such request is remembered")
        return explained

    async def tenants(self, request: Request) -> Any:
        """Everybody who has a key."""
        return [self._shown(tenant) for tenant in self._gate.directory.tenants.values()]

    async def tenant(self, request: Request) -> Any:
        """One of them."""
        return self._shown(self._named(request))

    async def drain(self, request: Request) -> Any:
        """Take no new requests, or take them again."""
        self._gate.draining = request.method == "POST"
        log.info("drain", extra={"draining": self._gate.draining})
        return {"draining": self._gate.draining}

    async def reload(self, request: Request) -> Any:
        """Read keys and limits now."""
        failures = self._gate.directory.failures
        await self._gate.directory.refresh()
        if self._gate.directory.failures > failures:
            raise Unavailable("keys and limits could not be read; those that were good still are")
        return {"tenants": len(self._gate.directory.tenants)}

    async def forget_all(self, request: Request) -> Any:
        """Put every cached prefix out of reach."""
        return await self._forget(None)

    async def forget_tenant(self, request: Request) -> Any:
        """Put a tenant's cached prefixes out of reach, and delete them where they are kept."""
        return await self._forget(self._named(request))

    async def _forget(self, tenant: Tenant | None) -> Any:
        # deleted under the key they were cached with, so before that key changes
        deleted = await self._operations.forget(tenant)
        try:
            if tenant is None:
                await self._gate.epochs.raise_all()
            else:
                await self._gate.epochs.raise_of(tenant)
        except (RedisError, OSError, TimeoutError):
            raise Unavailable("Redis does not answer: other routers would go on with the old cache") from None
        log.info("caches forgotten", extra={"tenant": tenant.name if tenant else "all"})
        return {"forgotten": tenant.name if tenant else "all", **deleted}

    def _named(self, request: Request) -> Tenant:
        name = request.path_params["name"]
        tenant = self._gate.directory.tenants.get(name)
        if tenant is None:
            raise NotFound("no tenant of this name")
        return tenant

    def _shown(self, tenant: Tenant) -> dict[str, Any]:
        return {
            "name": tenant.name,
            "group": tenant.group or None,
            "keys": len(tenant.digests),
            "limits": asdict(tenant.limits),
            "inside": self._gate.inside.get(tenant.name, 0),
        }


def _answering(handler: Handler, key_digest: bytes | None) -> Callable[[Request], Awaitable[Response]]:
    """A handler behind the checks of this port, its errors as answers."""

    async def answer(request: Request) -> Response:
        try:
            _check(request, key_digest)
            body, status = orjson.dumps(await handler(request)), 200
        except ServiceError as error:
            body, status = error_body(error), status_of(error)
        return Response(body, status, media_type="application/json")

    return answer


def _on_loopback(request: Request) -> bool:
    return is_loopback(request.url.hostname or "")


def _check(request: Request, key_digest: bytes | None) -> None:
    """Raises ``InvalidRequest`` for what a browser could have been talked into, ``Unauthenticated`` without the key."""
    if not _on_loopback(request):
        raise InvalidRequest("administration answers to loopback names only")
    if request.method in ("GET", "HEAD"):
        return
    if request.headers.get(HEADER) is None:
        raise InvalidRequest(f"changes need the header {HEADER}")
    given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
    if key_digest is not None and not hmac.compare_digest(sha256(given).digest(), key_digest):
        raise Unauthenticated("changes need the administrator's key")


def read_admin_key(path: Path | None) -> str | None:
    """The key in a file, None without a file.

    Raises:
        ValueError: It holds no key of 16 or more characters.
        OSError: It cannot be read.
    """
    if path is None:
        return None
    key = path.read_text(encoding="ascii").strip()
    if len(key) < _MIN_KEY_CHARS:
        raise ValueError(f"{path} holds no administrator's key of {_MIN_KEY_CHARS} or more characters")
    return key


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
