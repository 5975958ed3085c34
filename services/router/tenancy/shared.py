"""Limits over all routers: the arithmetic of ``buckets.py`` in a Redis script, with Redis's clock.

Keys stand in proto/README.md. They hold nothing that cannot be lost: without them every bucket is full.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from epdserve.services.router.tenancy.buckets import Limit, Refusal
from epdserve.services.router.tenancy.tenant import TenantLimits
from redis.asyncio import Redis

_DEADLINE_S: Final = 0.25

# A bucket is a hash of level and time; written only where its limit is set. KEYS books, inside.
_BOOKS: Final = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local function level(name, per_minute)
  local kept = redis.call('HMGET', KEYS[1], name, name .. '_at')
  if not kept[1] then return per_minute end
  local rise = math.max(0, now - tonumber(kept[2])) * per_minute / 60
  return math.min(per_minute, tonumber(kept[1]) + rise)
end
local function keep(name, value)
  redis.call('HSET', KEYS[1], name, string.format('%.6f', value), name .. '_at', string.format('%.6f', now))
  redis.call('EXPIRE', KEYS[1], 86400)
end
"""

# ARGV requests/min, tokens/min, concurrent, stay, ttl_s. Answers {limit, milliseconds}; '' = in.
_ENTER: Final = (
    _BOOKS
    + """
local requests, tokens, concurrent = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local left = 0
if requests > 0 then
  left = level('requests', requests)
  if left < 1 then return {'requests', math.ceil((1 - left) * 60000 / requests)} end
end
if tokens > 0 then
  local debt = level('tokens', tokens)
  if debt < 1 then return {'tokens', math.ceil((1 - debt) * 60000 / tokens)} end
end
if concurrent > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if redis.call('ZCARD', KEYS[2]) >= concurrent then return {'concurrent', 1000} end
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[5]), ARGV[4])
  redis.call('EXPIRE', KEYS[2], math.ceil(tonumber(ARGV[5])))
end
if requests > 0 then keep('requests', left - 1) end
return {'', 0}
"""
)

# ARGV tokens/min, stay, tokens used.
_LEAVE: Final = (
    _BOOKS
    + """
redis.call('ZREM', KEYS[2], ARGV[2])
local tokens = tonumber(ARGV[1])
if tokens > 0 then keep('tokens', level('tokens', tokens) - tonumber(ARGV[3])) end
return 1
"""
)


class SharedBuckets:
    """Books of all tenants in Redis. Owned by the event loop.

    Every call raises ``RedisError``, ``OSError`` or ``TimeoutError`` if Redis does not answer within its deadline.
    """

    def __init__(self, redis: Redis, *, namespace: str) -> None:
        self._prefix = f"{{{namespace}}}:tenant:"
        self._enter: Any = redis.register_script(_ENTER)
        self._leave: Any = redis.register_script(_LEAVE)

    async def enter(self, name: str, limits: TenantLimits, stay: str, *, ttl_s: float) -> Refusal | None:
        """See ``LocalBuckets.enter``."""
        arguments = [limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent, stay, ttl_s]
        async with asyncio.timeout(_DEADLINE_S):
            limit, milliseconds = await self._enter(keys=self._keys(name), args=arguments)
        return Refusal(Limit(limit.decode()), milliseconds / 1e3) if limit else None

    async def leave(self, name: str, limits: TenantLimits, stay: str, *, tokens: int) -> None:
        """See ``LocalBuckets.leave``."""
        async with asyncio.timeout(_DEADLINE_S):
            await self._leave(keys=self._keys(name), args=[limits.tokens_per_minute, stay, tokens])

    def _keys(self, name: str) -> list[str]:
        return [f"{self._prefix}{name}:books", f"{self._prefix}{name}:inside"]
