"""What routers tell each other through Redis: ledgers, tenants' use, and what they have learnt of answers' lengths.

Keys stand in proto/README.md. Everything ends by itself: a router that says nothing for a while is not counted any
more, and without Redis each router goes on with what it knows itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, Final

import orjson
from epdserve.services.policy.fairness import ServiceMeter
from epdserve.services.policy.length_cells import BINS, CellKey
from epdserve.services.policy.length_model import LengthModel
from epdserve.services.router.ledger import InFlight, InFlightLedger
from redis.asyncio import Redis
from redis.exceptions import RedisError

_log = logging.getLogger(__name__)

_PERIOD_S: Final = 0.5
_LEDGER_TTL_MS: Final = 2000
_LENGTHS_EVERY: Final = 20
_LENGTHS_TTL_MS: Final = 120_000
_LENGTH_CELLS: Final = 128
_SERVICE_EVERY: Final = 2
_SERVICE_TTL_MS: Final = 10_000
_TIMEOUT_S: Final = 0.5
_MAX_ROUTERS: Final = 64


class Sharing:
    """One router's exchange with the others. Owned by the event loop.

    Args:
        redis: Its owner closes it.
        router_id: Unique among the routers of a cluster.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        namespace: str,
        router_id: str,
        ledger: InFlightLedger,
        lengths: LengthModel,
        meter: ServiceMeter | None = None,
    ) -> None:
        self._redis = redis
        self._prefix = f"{{{namespace}}}:"
        self._router_id = router_id
        self._ledger = ledger
        self._lengths = lengths
        self._meter = meter
        self._metered: set[str] = set()
        self._heard_at = monotonic()
        self._known = 0
        self.unreadable = 0
        self.failures = 0

    async def exchange_ledgers(self) -> None:
        """Tell the own ledger and hear those of the others; those not heard of for two seconds no longer count."""
        mine = {
            worker: [row.requests, row.tokens, round(row.output_tokens)]
            for worker, row in self._ledger.own.items()
        }
        told = await self._exchange("ledger", mine, _LEDGER_TTL_MS)
        if told is None:
            if monotonic() - self._heard_at > _LEDGER_TTL_MS / 1000:
                self._ledger.hear({}, routers=self._known)
            return
        self._heard_at, self._known = monotonic(), len(told)
        total: dict[str, InFlight] = {}
        for said in told.values():
            try:
                _add_ledger(total, said)
            except (TypeError, ValueError):
                self.unreadable += 1
        self._ledger.hear(total, routers=len(told))

    async def exchange_lengths(self) -> None:
        """Tell the newest cells of the own length model and learn from those of the others."""
        cells = self._lengths.snapshot(newest=_LENGTH_CELLS)
        mine = [
            [key, {str(at): count for at, count in enumerate(counts) if count}]
            for key, counts in cells.items()
        ]
        for router, said in (await self._exchange("lengths", mine, _LENGTHS_TTL_MS) or {}).items():
            try:
                self._lengths.merge(router, _cells(said))
            except (TypeError, ValueError):
                self.unreadable += 1

    async def exchange_service(self) -> None:
        """Tell what tenants have had here lately and hear what they had elsewhere; the silent no longer count."""
        meter = self._meter
        if meter is None:
            return
        now = monotonic()
        mine = {
            name: [round(asked, 4), round(given, 4)]
            for name, (asked, given) in meter.snapshot(now=now).items()
        }
        told = await self._exchange("service", mine, _SERVICE_TTL_MS)
        if told is None:
            return
        for router in self._metered - told.keys():
            meter.merge(router, {})
        self._metered = set(told)
        for router, said in told.items():
            try:
                meter.merge(router, _service(said))
            except (TypeError, ValueError):
                self.unreadable += 1

    async def run(self) -> None:
        """Exchange again and again; ends by being cancelled."""
        for turn in range(2**62):
            await self.exchange_ledgers()
            if turn % _SERVICE_EVERY == 0:
                await self.exchange_service()
            if turn % _LENGTHS_EVERY == 0:
                await self.exchange_lengths()
            await asyncio.sleep(_PERIOD_S)

    async def leave(self) -> None:
        """Take the own words away at once."""
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                await self._redis.delete(
                    self._key("ledger", self._router_id), self._key("service", self._router_id)
                )
                await self._redis.srem(self._prefix + "routers", self._router_id)

    async def _exchange(self, what: str, mine: object, ttl_ms: int) -> dict[str, Any] | None:
        """The others' words, by router; None if Redis does not answer."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.set(self._key(what, self._router_id), orjson.dumps(mine), px=ttl_ms)
                    pipe.sadd(self._prefix + "routers", self._router_id)
                    pipe.smembers(self._prefix + "routers")
                    names = (await pipe.execute())[2]
                others = sorted({name.decode() for name in names} - {self._router_id})[:_MAX_ROUTERS]
                found = await self._redis.mget([self._key(what, name) for name in others]) if others else []
                told = {name: raw for name, raw in zip(others, found, strict=True) if raw is not None}
                if what == "ledger" and (gone := [name for name in others if name not in told]):
                    await self._redis.srem(self._prefix + "routers", *gone)
        except (RedisError, OSError, TimeoutError):
            self.failures += 1
            return None
        read: dict[str, Any] = {}
        for name, raw in told.items():
            try:
                read[name] = orjson.loads(raw)
            except orjson.JSONDecodeError:
                self.unreadable += 1
        return read

    def _key(self, what: str, router: str) -> str:
        return f"{self._prefix}router-{what}:{router}"


@asynccontextmanager
async def sharing(
    url: str,
    *,
    namespace: str,
    router_id: str,
    ledger: InFlightLedger,
    lengths: LengthModel,
    meter: ServiceMeter | None = None,
) -> AsyncIterator[Sharing]:
    """Exchange with the other routers until the block ends."""
    redis = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
    desk = Sharing(
        redis, namespace=namespace, router_id=router_id, ledger=ledger, lengths=lengths, meter=meter
    )
    task = asyncio.create_task(desk.run(), name="router-sharing")
    try:
        yield desk
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=2 * _TIMEOUT_S)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the exchange with other routers broke off", exc_info=error)
        await desk.leave()
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await redis.aclose()


def _add_ledger(total: dict[str, InFlight], said: Mapping[str, Any]) -> None:
    """Add one router's ledger.

    Raises:
        TypeError, ValueError: It is none; nothing of it has been added then.
    """
    if not isinstance(said, dict):
        raise ValueError("not a ledger")
    rows: dict[str, InFlight] = {}
    for worker, (requests, tokens, output_tokens) in said.items():
        rows[worker] = InFlight(int(requests), int(tokens), float(output_tokens))
    if any(min(row.requests, row.tokens, row.output_tokens) < 0 for row in rows.values()):
        raise ValueError("a ledger has no negative loads")
    for worker, row in rows.items():
        known = total.setdefault(worker, InFlight())
        known.requests += row.requests
        known.tokens += row.tokens
        known.output_tokens += row.output_tokens


def _service(said: Any) -> dict[str, tuple[float, float]]:
    """What one router says of tenants.

    Raises:
        TypeError, ValueError: It is none.
    """
    if not isinstance(said, dict):
        raise ValueError("not a list of tenants")
    rows = {str(name): (float(asked), float(given)) for name, (asked, given) in said.items()}
    if not all(math.isfinite(value) and value >= 0 for row in rows.values() for value in row):
        raise ValueError("tenants have had no such thing")
    return rows


def _cells(said: Any) -> dict[CellKey, tuple[float, ...]]:
    """A length model's snapshot.

    Raises:
        TypeError, ValueError: It is none.
    """
    if not isinstance(said, list):
        raise ValueError("not a list of cells")
    cells: dict[CellKey, tuple[float, ...]] = {}
    for key, counts in said:
        if not isinstance(counts, dict):
            raise ValueError("not a histogram")
        row = [0.0] * BINS
        for at, count in counts.items():
            if not 0 <= int(at) < BINS:
                raise ValueError(f"no bin {at}")
            row[int(at)] = float(count)
        cells[tuple(map(str, key))] = tuple(row)
    return cells
