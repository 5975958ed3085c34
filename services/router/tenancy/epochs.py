"""Since when cached blocks count: a number that enters the key of the block hashes.

Raising it puts everything cached before out of reach at once, on every worker and in every tier, without asking any of
them; what nobody can name any more ages out. Stores are also told to delete what they hold (``admin.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from epdserve.services.router.tenancy.tenant import Tenant
from redis.asyncio import Redis

_REDIS_S: Final = 2.0
_ALL: Final = ""


class CacheEpochs:
    """Epochs of all caches and of single tenants. Owned by the event loop.

    Args:
        redis: Shared by all routers; None = this router alone.
    """

    def __init__(self, redis: Redis | None = None, *, namespace: str = "epdserve") -> None:
        self._redis, self._key = redis, f"{{{namespace}}}:cache-epochs"
        self._epochs: dict[str, int] = {}

    def stamp(self, tenant: Tenant) -> str:
        """What enters the key of a tenant's block hashes; empty until something was raised."""
        every, own = self._epochs.get(_ALL, 0), self._epochs.get(tenant.cache_name, 0)
        return f"{every}.{own}" if every or own else ""

    async def refresh(self) -> None:
        """Learn what other routers have raised.

        Raises:
            RedisError, OSError, TimeoutError: Redis does not answer.
        """
        if self._redis is None:
            return
        async with asyncio.timeout(_REDIS_S):
            found: Mapping[Any, Any] = await self._redis.hgetall(self._key)
        for key, value in found.items():
            name = key.decode()
            self._epochs[name] = max(self._epochs.get(name, 0), int(value))

    async def raise_all(self) -> None:
        """Put every cached block out of reach. Raises as ``refresh``."""
        await self._raise(_ALL)

    async def raise_of(self, tenant: Tenant) -> None:
        """Put the blocks of a tenant, and of those it shares them with, out of reach. Raises as ``refresh``."""
        await self._raise(tenant.cache_name)

    async def close(self) -> None:
        """Let go of Redis; whoever shares the connection is done, too."""
        if self._redis is not None:
            async with asyncio.timeout(_REDIS_S):
                await self._redis.aclose()

    async def _raise(self, name: str) -> None:
        if self._redis is None:
            self._epochs[name] = self._epochs.get(name, 0) + 1
            return
        async with asyncio.timeout(_REDIS_S):
            self._epochs[name] = int(await self._redis.hincrby(self._key, name, 1))
