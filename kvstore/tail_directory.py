"""Which machine holds a tail: hints that live exactly as long as the tails do.

Tails are listed by the block they continue from, so that whoever has a longer prompt finds the ones that fit it. A
location may be wrong by the time it is used: whoever follows it asks the store there and verifies what comes. A
directory that is away, slow or emptied therefore costs hits and nothing else: its methods raise nothing and wait
no longer than their deadline.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from typing import Final, Protocol, Self, TypeVar

from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.host_metrics import TailDirectoryMetrics
from epdserve.kvstore.tails import TAIL_ID_BYTES, TailEntry, TailId, TailLocation, TailPlace
from redis.asyncio import Redis
from redis.exceptions import RedisError

T = TypeVar("T")

RECORD_VERSION: Final = 2
MAX_SIBLINGS: Final = 64  # entries under one parent; of more, those go that would end first

# A field ends by Redis' own clock: those of the machines may differ. KEYS tails; ARGV field, record, ttl_ms, siblings.
_PUBLISH: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ends = now + ARGV[3]
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then
  local all = redis.call('HGETALL', KEYS[1])
  local first, first_ends = nil, nil
  for at = 1, #all, 2 do
    local its = tonumber(string.match(all[at + 1], '^(%d+) ')) or 0
    if not first or its < first_ends then first, first_ends = all[at], its end
  end
  redis.call('HDEL', KEYS[1], first)
end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', ends, ARGV[2]))
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return 1
"""

# KEYS tails of each parent. Answers (number of the parent, field, record) one after the other.
_FIND: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = {}
for number, key in ipairs(KEYS) do
  local all = redis.call('HGETALL', key)
  for at = 1, #all, 2 do
    local ends, record = string.match(all[at + 1], '^(%d+) (.*)$')
    if not ends or tonumber(ends) > now then
      found[#found + 1] = number - 1
      found[#found + 1] = all[at]
      found[#found + 1] = record or all[at + 1]
    else
      redis.call('HDEL', key, all[at])
    end
  end
end
return found
"""

# KEYS tails; ARGV field, record. A later word of the same store, of another life of it, stays.
_WITHDRAW: Final = """
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and string.match(held, '^%d+ (.*)$') == ARGV[2] then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
"""


class TailDirectory(Protocol):
    """Owned by one event loop. Several stores may hold a tail; of each the last word counts."""

    async def publish(self, entry: TailEntry, ttl_s: float) -> bool:
        """Say where a tail is, for the ``ttl_s`` seconds it has left; False: nobody will know."""

    async def find(self, parents: Sequence[bytes]) -> list[TailEntry]:
        """What was said of tails that continue from one of ``parents``; nothing is a miss."""

    async def withdraw(self, entry: TailEntry) -> bool:
        """Take one's own word back; False: it was not there."""


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
        self._order: dict[tuple[TailId, str], TailEntry] = {}  # the oldest word first
        self._by_parent: dict[bytes, dict[tuple[TailId, str], tuple[TailEntry, float]]] = {}

    async def publish(self, entry: TailEntry, ttl_s: float) -> bool:
        """See ``TailDirectory.publish``."""
        if ttl_s <= 0:
            return False
        name = (entry.identity, entry.location.store)
        self._drop(name)
        self._order[name] = entry
        places = self._by_parent.setdefault(entry.place.parent, {})
        places[name] = (entry, self._clock.monotonic() + ttl_s)
        if len(self._order) > self._capacity:
            self._drop(next(iter(self._order)))
        self._metrics.count("publish", "done")
        return True

    async def find(self, parents: Sequence[bytes]) -> list[TailEntry]:
        """See ``TailDirectory.find``."""
        now = self._clock.monotonic()
        found = []
        for parent in parents:
            for name, (entry, ends_at) in list(self._by_parent.get(parent, {}).items()):
                if now < ends_at:
                    found.append(entry)
                else:
                    self._drop(name)
        self._metrics.count("find", "hit" if found else "miss")
        return found

    async def withdraw(self, entry: TailEntry) -> bool:
        """See ``TailDirectory.withdraw``."""
        name = (entry.identity, entry.location.store)
        held, ends_at = self._by_parent.get(entry.place.parent, {}).get(name, (None, 0.0))
        mine = held == entry and self._clock.monotonic() < ends_at
        if mine:
            self._drop(name)
        self._metrics.count("withdraw", "done" if mine else "miss")
        return mine

    def _drop(self, name: tuple[TailId, str]) -> None:
        entry = self._order.pop(name, None)
        if entry is not None:
            places = self._by_parent[entry.place.parent]
            del places[name]
            if not places:
                del self._by_parent[entry.place.parent]


class RedisTailDirectory:
    """Across machines: one hash a parent block, a field a tail and store. Keys stand in proto/README.md."""

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
        self._prefix = f"{{{namespace}}}:tails:"
        self._publish = self._redis.register_script(_PUBLISH)
        self._find = self._redis.register_script(_FIND)
        self._withdraw = self._redis.register_script(_WITHDRAW)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def publish(self, entry: TailEntry, ttl_s: float) -> bool:
        """See ``TailDirectory.publish``."""
        ttl_ms = int(ttl_s * 1000)  # rounded down: a hint must not outlive its tail
        if ttl_ms <= 0:
            return False
        args: list[str | bytes | int] = [_field(entry), _encode(entry), ttl_ms, MAX_SIBLINGS]
        call = self._publish(keys=[self._key(entry.place.parent)], args=args)
        _, answered = await self._ask("publish", call)
        if answered:
            self._metrics.count("publish", "done")
        return answered

    async def find(self, parents: Sequence[bytes]) -> list[TailEntry]:
        """See ``TailDirectory.find``."""
        if not parents:
            return []
        answer, answered = await self._ask("find", self._find(keys=[self._key(p) for p in parents]))
        if not answered or not isinstance(answer, list):
            return []
        records = zip(answer[::3], answer[1::3], answer[2::3], strict=False)
        read = [_decode(parents[int(number)], field, record) for number, field, record in records]
        found = [entry for entry in read if entry is not None]
        if found or not read:
            self._metrics.count("find", "hit" if found else "miss")
        if len(found) < len(read):
            self._metrics.count("find", "unreadable")
        return found

    async def withdraw(self, entry: TailEntry) -> bool:
        """See ``TailDirectory.withdraw``."""
        args: list[str | bytes] = [_field(entry), _encode(entry)]
        call = self._withdraw(keys=[self._key(entry.place.parent)], args=args)
        removed, answered = await self._ask("withdraw", call)
        if answered:
            self._metrics.count("withdraw", "done" if removed else "miss")
        return bool(removed)

    def _key(self, parent: bytes) -> str:
        return self._prefix + parent.hex()

    async def _ask(self, request: str, call: Awaitable[T]) -> tuple[T | None, bool]:
        """The answer, and whether there was one."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await call, True
        except (RedisError, OSError, TimeoutError):
            self._metrics.count(request, "failed")
            return None, False


def _field(entry: TailEntry) -> str:
    return f"{entry.identity.hex()}:{entry.location.store}"


def _encode(entry: TailEntry) -> bytes:
    place, location = entry.place, entry.location
    record = [
        RECORD_VERSION,
        place.after_tokens,
        place.rest.hex(),
        location.incarnation,
        location.nbytes,
        location.exact,
    ]
    return json.dumps(record, separators=(",", ":")).encode()


def _decode(parent: bytes, field: bytes | str, record: bytes | str) -> TailEntry | None:
    try:
        version, after_tokens, rest, incarnation, nbytes, exact = json.loads(record)
        name = field.decode() if isinstance(field, bytes) else field
        identity, _, store = name.partition(":")
        sound = (
            version == RECORD_VERSION
            and type(after_tokens) is int
            and isinstance(incarnation, str)
            and type(nbytes) is int
            and nbytes > 0
            and isinstance(exact, bool)
            and len(bytes.fromhex(identity)) == TAIL_ID_BYTES
        )
        if not sound:
            return None
        place = TailPlace(parent, after_tokens, bytes.fromhex(rest))
        location = TailLocation(store, incarnation, nbytes, exact)
        return TailEntry(TailId(bytes.fromhex(identity)), place, location)
    except (ValueError, TypeError):
        return None  # another version's, or nobody's
