"""Who is alive, in Redis: heartbeats with a TTL, and fences that keep former lives out.

Keys stand in proto/README.md. Everything here can be lost and rebuilt: each worker's next heartbeat puts it back.
A fence outlives its worker, so that a life that was thought dead and wakes up cannot take the place of its
successor.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self, TypeVar

from epdserve.services.errors import InvalidRequest, Unavailable
from epdserve.services.rpc.convert_worker import info_from_bytes, info_to_bytes
from epdserve.services.types import WIRE_VERSION, WorkerInfo
from redis.asyncio import Redis
from redis.exceptions import RedisError

T = TypeVar("T")

FENCE_S: Final = 86_400

# KEYS worker, fence, index, epoch, drain; ARGV incarnation, record, lease_ms, fence_s, worker, epoch.
# 0 = a later life of this worker has spoken; 2 = heard, and the worker is to take no new work.
_PUBLISH: Final = """
local fence = redis.call('GET', KEYS[2])
if fence and fence > ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[4])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[3], ARGV[5])
redis.call('SET', KEYS[4], ARGV[6], 'NX')
redis.call('PEXPIRE', KEYS[4], ARGV[3])
if redis.call('EXISTS', KEYS[5]) == 1 then return 2 end
return 1
"""

# KEYS worker, fence, index; ARGV incarnation, worker. Only the latest life may take the record away.
_WITHDRAW: Final = """
local fence = redis.call('GET', KEYS[2])
if fence and fence ~= ARGV[1] then return 0 end
redis.call('SREM', KEYS[3], ARGV[2])
return redis.call('DEL', KEYS[1])
"""

# KEYS fence; ARGV now_ms, suffix, fence_s. Later than any life before, even if the clock was set back.
_CLAIM: Final = """
local now = tonumber(ARGV[1])
local fence = redis.call('GET', KEYS[1])
if fence then
  local last = tonumber(string.sub(fence, 1, 16))
  if last and last >= now then now = last + 1 end
end
local mine = string.format('%016.0f', now) .. '-' .. ARGV[2]
redis.call('SET', KEYS[1], mine, 'EX', ARGV[3])
return mine
"""

# KEYS index, epoch; ARGV prefix of worker keys. Members whose record expired leave the index here.
_LIST: Final = """
local found = {redis.call('GET', KEYS[2]) or ''}
for _, worker in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.call('GET', ARGV[1] .. worker)
  if record then
    found[#found + 1] = record
  else
    redis.call('SREM', KEYS[1], worker)
  end
end
return found
"""


class Heard(IntEnum):
    """What the registry says to a heartbeat; true if it counted."""

    FENCED = 0  # a later life of this worker has spoken
    READY = 1
    DRAIN = 2  # counted, and somebody wants the worker to take no new work


@dataclass(frozen=True, slots=True)
class Listing:
    """What the registry holds.

    Attributes:
        epoch: Name of this filling of Redis; another one means that it lost its data in between, or that its clock
            jumped past every lease. Empty if nobody has published since.
        unreadable: Records that this version cannot read.
    """

    epoch: str
    workers: tuple[WorkerInfo, ...]
    unreadable: int


def local_incarnation() -> str:
    """An incarnation made without the registry: later than earlier ones as far as this clock is right."""
    return f"{time.time_ns() // 1_000_000:016d}-{secrets.token_hex(4)}"


class Registry:
    """The registry of one namespace. Owned by one event loop.

    Every method raises ``Unavailable`` when Redis does not answer in time.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        namespace: Prefix of all keys.
        lease_s: A record nobody renews for this long is gone.
        timeout_s: Of one call.
    """

    def __init__(
        self, url: str, *, namespace: str = "epdserve", lease_s: float = 5.0, timeout_s: float = 2.0
    ) -> None:
        self._timeout_s = timeout_s
        self._lease_ms = max(1, int(lease_s * 1000))
        self._redis = Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, health_check_interval=10
        )
        # braces: one slot of a Redis cluster, so that a script may touch all of them
        self._prefix = f"{{{namespace}}}:"
        self._publish = self._redis.register_script(_PUBLISH)
        self._withdraw = self._redis.register_script(_WITHDRAW)
        self._claim = self._redis.register_script(_CLAIM)
        self._list = self._redis.register_script(_LIST)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def claim(self, worker: str) -> str:
        """Begin a new life of a worker: its incarnation, which fences all earlier ones off."""
        now_ms = time.time_ns() // 1_000_000
        args: list[str | int] = [now_ms, secrets.token_hex(4), FENCE_S]
        answer = await self._call(self._claim(keys=[self._key("fence", worker)], args=args))
        return str(answer.decode() if isinstance(answer, bytes) else answer)

    async def publish(self, info: WorkerInfo) -> Heard:
        """Say that a worker lives; ``FENCED`` (false) if a later life of it has spoken: this one must end."""
        keys = [*self._worker_keys(info.worker), self._prefix + "epoch", self._key("drain", info.worker)]
        record = info_to_bytes(info)
        args: list[str | bytes | int] = [
            info.incarnation,
            record,
            self._lease_ms,
            FENCE_S,
            info.worker,
            secrets.token_hex(8),  # another one each time: who was first before may be first again
        ]
        answer = await self._call(self._publish(keys=keys, args=args))
        assert isinstance(answer, int)
        return Heard(answer)

    async def drain(self, worker: str, wanted: bool) -> None:
        """Have a worker take no new work, in this life and later ones, or take it again.

        Its next heartbeat hears it.
        """
        key = self._key("drain", worker)
        await self._call(self._redis.set(key, b"1") if wanted else self._redis.delete(key))

    async def withdraw(self, worker: str, incarnation: str) -> bool:
        """Take a worker's record away; False if there was none, or it is a later life's."""
        call = self._withdraw(keys=self._worker_keys(worker), args=[incarnation, worker])
        return bool(await self._call(call))

    async def list(self) -> Listing:
        """All workers that live."""
        keys = [self._prefix + "workers", self._prefix + "epoch"]
        answer = await self._call(self._list(keys=keys, args=[self._prefix + "worker:"]))
        assert isinstance(answer, list)
        epoch, *records = answer
        workers, unreadable = [], 0
        for record in records:
            try:
                info = info_from_bytes(record)
            except InvalidRequest:
                unreadable += 1
                continue
            if info.wire_version == WIRE_VERSION:
                workers.append(info)
            else:
                unreadable += 1  # of another version: not ours to talk to
        return Listing(epoch.decode(), tuple(workers), unreadable)

    def _key(self, kind: str, worker: str) -> str:
        return f"{self._prefix}{kind}:{worker}"

    def _worker_keys(self, worker: str) -> Sequence[str]:
        return [self._key("worker", worker), self._key("fence", worker), self._prefix + "workers"]

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                return await call
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"registry does not answer: {type(error).__name__}") from error
