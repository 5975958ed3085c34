"""The way in: who asks, and whether he may now. One object a router; endpoints call ``authenticate`` and ``enter``."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from epdserve.services.errors import Draining, Overloaded
from epdserve.services.router.tenancy.buckets import LocalBuckets, Refusal
from epdserve.services.router.tenancy.directory import TenantDirectory
from epdserve.services.router.tenancy.epochs import CacheEpochs
from epdserve.services.router.tenancy.shared import SharedBuckets
from epdserve.services.router.tenancy.tenant import Tenant
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

_REDIS_AGAIN_S: Final = 1.0


@dataclass(slots=True)
class GateCounts:
    """What happened at the gate; read by metrics."""

    refused_requests: int = 0
    refused_tokens: int = 0
    refused_concurrent: int = 0
    without_redis: int = 0


@dataclass(slots=True)
class Stay:
    """One request inside, as a context.

    Attributes:
        tokens: What it has used, prompt and answer; to be set before it leaves.
        shared: Its place is in Redis's books.
    """

    gate: TenantGate
    tenant: Tenant
    tokens: int = 0
    name: str = ""
    shared: bool = False

    async def __aenter__(self) -> Stay:
        await self.gate.let_in(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gate.let_out(self)


class TenantGate:
    """Owned by the event loop.

    Args:
        shared: Limits over all routers; None = each router counts for itself, as it does while Redis is away.
        stay_ttl_s: Longest stay; a place whose router has died is free after it.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        directory: TenantDirectory,
        epochs: CacheEpochs,
        *,
        shared: SharedBuckets | None = None,
        stay_ttl_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory, self.epochs, self.counts = directory, epochs, GateCounts()
        self.draining = False
        self._shared, self._local = shared, LocalBuckets()
        self._stay_ttl_s, self._clock = stay_ttl_s, clock
        self._redis_again_at = 0.0
        self._inside: dict[str, int] = {}

    async def close(self) -> None:
        """Let go of Redis."""
        await self.epochs.close()

    @property
    def inside(self) -> dict[str, int]:
        """Requests inside now, by tenant."""
        return dict(self._inside)

    def authenticate(self, *, authorization: str, api_key: str = "") -> Tenant:
        """See ``TenantDirectory.authenticate``."""
        return self.directory.authenticate(authorization=authorization, api_key=api_key)

    def enter(self, tenant: Tenant) -> Stay:
        """Be inside until the block ends. Raises as ``let_in``, where the block begins."""
        return Stay(self, tenant)

    async def let_in(self, stay: Stay) -> None:
        """A stay begins.

        Raises:
            Draining: This router takes no new requests.
            Overloaded: A limit of the tenant; ``retry_after_s`` is when it lets the next one in.
        """
        if self.draining:
            raise Draining("this router takes no new requests", retry_after_s=5.0)
        tenant = stay.tenant
        if not tenant.limits.none:
            stay.name = secrets.token_hex(8)
            stay.shared = await self._take(tenant, stay.name)
        self._inside[tenant.name] = self._inside.get(tenant.name, 0) + 1

    async def let_out(self, stay: Stay) -> None:
        """It ends."""
        tenant = stay.tenant
        self._inside[tenant.name] -= 1
        if not self._inside[tenant.name]:
            del self._inside[tenant.name]
        if not tenant.limits.none:
            await self._give(tenant, stay.name, stay.tokens, stay.shared)

    async def _take(self, tenant: Tenant, name: str) -> bool:
        """Whether the place is in Redis's books; raises ``Overloaded``."""
        limits, shared = tenant.limits, False
        refusal: Refusal | None = None
        if self._shared is not None and self._clock() >= self._redis_again_at:
            try:
                refusal = await self._shared.enter(tenant.name, limits, name, ttl_s=self._stay_ttl_s)
                shared = True
            except (RedisError, OSError, TimeoutError) as error:
                self._redis_failed(error)
        if not shared:
            self.counts.without_redis += self._shared is not None
            refusal = self._local.enter(tenant.name, limits, name, ttl_s=self._stay_ttl_s, now=self._clock())
        if refusal is not None:
            self._refuse(tenant, refusal)
        return shared

    async def _give(self, tenant: Tenant, name: str, tokens: int, shared: bool) -> None:
        if not shared or self._shared is None:
            self._local.leave(tenant.name, tenant.limits, name, tokens=tokens, now=self._clock())
            return
        # the client may have gone: its cancellation must not leave the place taken
        leaving = asyncio.ensure_future(self._shared.leave(tenant.name, tenant.limits, name, tokens=tokens))
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            leaving.add_done_callback(_forget)
            raise
        except (RedisError, OSError, TimeoutError) as error:
            self._redis_failed(error)

    def _refuse(self, tenant: Tenant, refusal: Refusal) -> None:
        count = f"refused_{refusal.limit.value}"
        setattr(self.counts, count, getattr(self.counts, count) + 1)
        allowed = {
            "requests": f"{tenant.limits.requests_per_minute} requests a minute",
            "tokens": f"{tenant.limits.tokens_per_minute} tokens a minute",
            "concurrent": f"{tenant.limits.concurrent} requests at a time",
        }[refusal.limit.value]
        raise Overloaded(f"over the limit of {allowed}", retry_after_s=refusal.retry_after_s)

    def _redis_failed(self, error: Exception) -> None:
        if self._clock() >= self._redis_again_at:
            log.warning("limits are counted here only", extra={"reason": type(error).__name__})
        self._redis_again_at = self._clock() + _REDIS_AGAIN_S


def _forget(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()
