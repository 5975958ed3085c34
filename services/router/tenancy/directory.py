"""Who has which key: from files, from Redis, read again when they change.

A reload that fails changes nothing, and says so: keys that were good stay good, and no door opens by mistake.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from epdserve.services.errors import Unauthenticated, Unavailable
from epdserve.services.router.auth import KeyRing
from epdserve.services.router.tenancy.tenant import (
    Tenant,
    TenantLimits,
    digest_of,
    read_tenants,
    tenants_of,
)
from redis.asyncio import Redis
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

ANYBODY: Final = Tenant("")
_REDIS_S: Final = 2.0


class Source(Protocol):
    """Where tenants come from."""

    async def read(self) -> dict[str, Tenant] | None:
        """Tenants by name; None if nothing has changed since the last call.

        Raises:
            OSError, ValueError, RedisError, TimeoutError: They cannot be had now.
        """


class FileSource:
    """A file of tenants (TOML), or of ``NAME KEY`` lines; read at once when it is made."""

    def __init__(self, path: Path, default: TenantLimits, *, plain: bool = False) -> None:
        self._path, self._default, self._plain = path, default, plain
        self._seen: tuple[int, int, int] | None = None

    def load(self) -> dict[str, Tenant] | None:
        """As ``read``, in this thread."""
        stat = self._path.stat()
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen:
            return None
        if self._plain:
            tenants = _of_ring(KeyRing.from_file(self._path), self._default)
        else:
            try:
                tenants = read_tenants(self._path.read_text(encoding="utf-8"), self._default)
            except ValueError as error:
                raise ValueError(f"{self._path}: {error}") from None
        self._seen = seen
        return tenants

    async def read(self) -> dict[str, Tenant] | None:
        """See ``Source``."""
        return await asyncio.to_thread(self.load)


class RedisSource:
    """A Redis hash: field tenant, value JSON as in the file."""

    def __init__(self, redis: Redis, key: str, default: TenantLimits) -> None:
        self._redis, self._key, self._default = redis, key, default
        self._seen: Mapping[Any, Any] | None = None

    async def read(self) -> dict[str, Tenant] | None:
        """See ``Source``."""
        async with asyncio.timeout(_REDIS_S):
            found: Mapping[Any, Any] = await self._redis.hgetall(self._key)
        if found == self._seen:
            return None
        entries = {name.decode(): json.loads(value) for name, value in found.items()}
        tenants = tenants_of(entries, self._default)
        self._seen = found
        return tenants


class TenantDirectory:
    """Authenticates. Owned by the event loop.

    Args:
        sources: Later ones win where two name the same tenant. None at all: nobody needs a key.
    """

    def __init__(self, sources: Sequence[Source] = ()) -> None:
        self._sources = tuple(sources)
        self._found: list[dict[str, Tenant]] = [{} for _ in sources]
        self._digests: list[tuple[bytes, Tenant]] = []
        self.failures = 0

    @property
    def open(self) -> bool:
        """Whether everybody is let in."""
        return not self._sources

    @property
    def tenants(self) -> dict[str, Tenant]:
        """By name."""
        return {name: tenant for found in self._found for name, tenant in found.items()}

    def load_files(self) -> None:
        """Read the files now.

        Raises:
            OSError, ValueError: One of them will not do.
        """
        for number, source in enumerate(self._sources):
            if isinstance(source, FileSource) and (tenants := source.load()) is not None:
                self._found[number] = tenants
        self._index()

    async def refresh(self) -> None:
        """Read what has changed; what cannot be read stays as it was."""
        for number, source in enumerate(self._sources):
            try:
                tenants = await source.read()
            except (OSError, ValueError, RedisError, TimeoutError) as error:
                self.failures += 1
                log.warning(
                    "tenants not read again", extra={"reason": f"{type(error).__name__}: {error}"[:300]}
                )
                continue
            if tenants is not None:
                self._found[number] = tenants
                log.info("tenants read", extra={"tenants": len(tenants)})
                self._index()

    def authenticate(self, *, authorization: str, api_key: str = "") -> Tenant:
        """Who has this key. A bearer token wins over ``x-api-key``.

        Raises:
            Unauthenticated: Keys are wanted, and this is none of them.
            Unavailable: Keys are wanted, and none could be read yet.
        """
        if self.open:
            return ANYBODY
        scheme, _, token = authorization.partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else api_key
        if not key:
            raise Unauthenticated("no API key given: send Authorization: Bearer KEY")
        if not self._digests:
            raise Unavailable("no API keys could be read yet", retry_after_s=2.0)
        asked, found = digest_of(key), None
        for digest, tenant in self._digests:
            # every key is compared in full, so that time tells nothing about which was near
            if hmac.compare_digest(digest, asked):
                found = tenant
        if found is None:
            raise Unauthenticated("this API key is not known here")
        return found

    def _index(self) -> None:
        self._digests = [(digest, tenant) for tenant in self.tenants.values() for digest in tenant.digests]


def _of_ring(ring: KeyRing, default: TenantLimits) -> dict[str, Tenant]:
    digests: dict[str, list[bytes]] = {}
    for digest, name in ring.entries():
        digests.setdefault(name, []).append(digest)
    return {name: Tenant(name, tuple(found), "", default) for name, found in digests.items()}
