"""Which machine holds a tail: hints that live exactly as long as the tails do.

A location may be wrong by the time it is used, so whoever follows it asks the store there and verifies what comes. A
directory that is away, slow or emptied therefore costs hits and nothing else: its methods raise nothing and wait
no longer than their deadline.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable
from typing import Final, Protocol, Self, TypeVar

from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.host_metrics import TailDirectoryMetrics
from epdserve.kvstore.tails import TailId, TailLocation
from redis.asyncio import Redis
from redis.exceptions import RedisError

T = TypeVar("T")

RECORD_VERSION: Final = 1

# KEYS tail; ARGV record. Somebody else's later word stays.
_WITHDRAW: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class TailDirectory(Protocol):
    """Owned by one event loop. The last one to publish an identity is the one found."""

    async def publish(self, identity: TailId, location: TailLocation, ttl_s: float) -> bool:
        """Say where a tail is, for the ``ttl_s`` seconds it has left; False: nobody will know."""

    async def find(self, identity: TailId) -> TailLocation | None:
        """Where a tail was last said to be; None is a miss."""

    async def withdraw(self, identity: TailId, location: TailLocation) -> bool:
        """Take one's own word back; False: it was not there, or another's is."""


class MemoryTailDirectory:
    """Within one process, at most ``capacity`` entries: for tests and for one machine."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        capacity: int = 65536,
        metrics: TailDirectoryMetrics | None = None,
    ) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._clock = clock or SystemClock()
        self._capacity = capacity
        self._metrics = metrics or TailDirectoryMetrics.unregistered()
        self._entries: OrderedDict[TailId, tuple[TailLocation, float]] = OrderedDict()

    async def publish(self, identity: TailId, location: TailLocation, ttl_s: float) -> bool:
        """See ``TailDirectory.publish``."""
        if ttl_s <= 0:
            return False
        self._entries.pop(identity, None)
        self._entries[identity] = (location, self._clock.monotonic() + ttl_s)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        self._metrics.count("publish", "done")
        return True

    async def find(self, identity: TailId) -> TailLocation | None:
        """See ``TailDirectory.find``."""
        location, ends_at = self._entries.get(identity, (None, 0.0))
        if location is not None and self._clock.monotonic() >= ends_at:
            del self._entries[identity]
            location = None
        self._metrics.count("find", "miss" if location is None else "hit")
        return location

    async def withdraw(self, identity: TailId, location: TailLocation) -> bool:
        """See ``TailDirectory.withdraw``."""
        held, ends_at = self._entries.get(identity, (None, 0.0))
        mine = held == location and self._clock.monotonic() < ends_at
        if mine:
            del self._entries[identity]
        self._metrics.count("withdraw", "done" if mine else "miss")
        return mine


class RedisTailDirectory:
    """Across machines: one key a tail, whose TTL is what the tail has left. Keys stand in proto/README.md."""

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "epdserve",
        deadline_s: float = 0.1,
        metrics: TailDirectoryMetrics | None = None,
    ) -> None:
        """Connect with the first call.

        Args:
            url: ``redis://``, ``rediss://`` or ``unix://``.
            namespace: Prefix of all keys.
            deadline_s: Of one call, connecting included; a replayed window costs not much more.
            metrics: Counters.
        """
        self._deadline_s = deadline_s
        self._metrics = metrics or TailDirectoryMetrics.unregistered()
        self._redis = Redis.from_url(url, socket_timeout=deadline_s, socket_connect_timeout=deadline_s)
        self._prefix = f"{{{namespace}}}:tail:"
        self._withdraw = self._redis.register_script(_WITHDRAW)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def publish(self, identity: TailId, location: TailLocation, ttl_s: float) -> bool:
        """See ``TailDirectory.publish``."""
        ttl_ms = int(ttl_s * 1000)  # rounded down: a hint must not outlive its tail
        if ttl_ms <= 0:
            return False
        call = self._redis.set(self._key(identity), _encode(location), px=ttl_ms)
        _, answered = await self._ask("publish", call)
        if answered:
            self._metrics.count("publish", "done")
        return answered

    async def find(self, identity: TailId) -> TailLocation | None:
        """See ``TailDirectory.find``."""
        record, answered = await self._ask("find", self._redis.get(self._key(identity)))
        if not answered:
            return None
        if record is None:
            self._metrics.count("find", "miss")
            return None
        location = _decode(record)
        self._metrics.count("find", "unreadable" if location is None else "hit")
        return location

    async def withdraw(self, identity: TailId, location: TailLocation) -> bool:
        """See ``TailDirectory.withdraw``."""
        call = self._withdraw(keys=[self._key(identity)], args=[_encode(location)])
        removed, answered = await self._ask("withdraw", call)
        if answered:
            self._metrics.count("withdraw", "done" if removed else "miss")
        return bool(removed)

    def _key(self, identity: TailId) -> str:
        return self._prefix + identity.hex()

    async def _ask(self, request: str, call: Awaitable[T]) -> tuple[T | None, bool]:
        """The answer, and whether there was one."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await call, True
        except (RedisError, OSError, TimeoutError):
            self._metrics.count(request, "failed")
            return None, False


def _encode(location: TailLocation) -> bytes:
    record = [RECORD_VERSION, location.store, location.incarnation, location.nbytes, location.exact]
    return json.dumps(record, separators=(",", ":")).encode()


def _decode(record: bytes | str) -> TailLocation | None:
    try:
        version, store, incarnation, nbytes, exact = json.loads(record)
    except (ValueError, TypeError):
        return None  # another version's, or nobody's
    sound = (
        version == RECORD_VERSION
        and isinstance(store, str)
        and isinstance(incarnation, str)
        and type(nbytes) is int
        and nbytes > 0
        and isinstance(exact, bool)
    )
    return TailLocation(store, incarnation, nbytes, exact) if sound else None
