"""Limits of one tenant as arithmetic: token buckets that refill, places that come free. Time is an argument.

Redis runs the same arithmetic for all routers together (``shared.py``); this is what one router does without it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from epdserve.services.router.tenancy.tenant import TenantLimits

_MINUTE_S: Final = 60.0
_TENANTS: Final = 4096  # buckets kept; one that is dropped is full again, as an idle one would be


class Limit(StrEnum):
    """What stood in the way."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not enter, and after how long it may, if nothing else happens meanwhile."""

    limit: Limit
    retry_after_s: float


@dataclass(slots=True)
class Bucket:
    """A level that rises by ``per_minute`` a minute up to as much. May be below zero: that is debt."""

    per_minute: int
    level: float
    at: float

    def refill(self, now: float) -> None:
        """Let time pass."""
        rise = (now - self.at) * self.per_minute / _MINUTE_S
        self.level, self.at = min(float(self.per_minute), self.level + max(0.0, rise)), now

    def wait_s(self, wanted: float) -> float:
        """Time until the level is ``wanted``; 0 if it is."""
        return max(0.0, (wanted - self.level) * _MINUTE_S / self.per_minute)


@dataclass(slots=True)
class _Books:
    requests: Bucket
    tokens: Bucket
    inside: dict[str, float] = field(default_factory=dict)


class LocalBuckets:
    """Books of all tenants of one router. Owned by the event loop."""

    def __init__(self) -> None:
        self._books: OrderedDict[str, _Books] = OrderedDict()

    def enter(
        self, name: str, limits: TenantLimits, stay: str, *, ttl_s: float, now: float
    ) -> Refusal | None:
        """Take a place for a request, or say why not. A place that nobody gives back is free after ``ttl_s``."""
        books = self._of(name, limits, now)
        if limits.requests_per_minute and (wait_s := books.requests.wait_s(1.0)) > 0:
            return Refusal(Limit.REQUESTS, wait_s)
        if limits.tokens_per_minute and (wait_s := books.tokens.wait_s(1.0)) > 0:
            return Refusal(Limit.TOKENS, wait_s)
        if limits.concurrent:
            books.inside = {each: until for each, until in books.inside.items() if until > now}
            if len(books.inside) >= limits.concurrent:
                return Refusal(Limit.CONCURRENT, 1.0)
        books.requests.level -= 1.0
        books.inside[stay] = now + ttl_s
        return None

    def leave(self, name: str, limits: TenantLimits, stay: str, *, tokens: int, now: float) -> None:
        """Give the place back, and take what the request has used."""
        books = self._of(name, limits, now)
        books.inside.pop(stay, None)
        books.tokens.level -= tokens

    def _of(self, name: str, limits: TenantLimits, now: float) -> _Books:
        books = self._books.get(name)
        if books is None:
            books = self._books[name] = _Books(
                Bucket(limits.requests_per_minute, float(limits.requests_per_minute), now),
                Bucket(limits.tokens_per_minute, float(limits.tokens_per_minute), now),
            )
            if len(self._books) > _TENANTS:
                self._books.popitem(last=False)
        self._books.move_to_end(name)
        # limits may have been changed meanwhile
        books.requests.per_minute, books.tokens.per_minute = (
            limits.requests_per_minute,
            limits.tokens_per_minute,
        )
        books.requests.refill(now)
        books.tokens.refill(now)
        return books
