"""Puts the gate of a router together, keeps it up to date, and says how the server may listen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from epdserve.services.router.tenancy.admin import is_loopback
from epdserve.services.router.tenancy.config import TenancySettings
from epdserve.services.router.tenancy.directory import FileSource, RedisSource, Source, TenantDirectory
from epdserve.services.router.tenancy.epochs import CacheEpochs
from epdserve.services.router.tenancy.gate import TenantGate
from epdserve.services.router.tenancy.shared import SharedBuckets
from redis.asyncio import Redis
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_REDIS_S = 2.0


def build_gate(
    settings: TenancySettings,
    *,
    keys_file: Path | None,
    redis_url: str,
    namespace: str,
    stay_ttl_s: float,
) -> TenantGate:
    """A gate with the tenants of its files; those in Redis come with ``kept_fresh``.

    Raises:
        OSError, ValueError: A file of keys will not do.
    """
    limits = settings.default_limits
    needs_redis = settings.tenants_in_redis or settings.shared_limits
    redis = Redis.from_url(redis_url, socket_timeout=_REDIS_S) if needs_redis else None
    sources: list[Source] = []
    if keys_file is not None:
        sources.append(FileSource(keys_file, limits, plain=True))
    if settings.tenants_file is not None:
        sources.append(FileSource(settings.tenants_file, limits))
    if settings.tenants_in_redis and redis is not None:
        sources.append(RedisSource(redis, f"{{{namespace}}}:tenants", limits))
    directory = TenantDirectory(sources)
    directory.load_files()
    shared = (
        SharedBuckets(redis, namespace=namespace) if settings.shared_limits and redis is not None else None
    )
    return TenantGate(
        directory,
        CacheEpochs(redis, namespace=namespace),
        shared=shared,
        stay_ttl_s=stay_ttl_s,
    )


@asynccontextmanager
async def kept_fresh(gate: TenantGate, *, refresh_s: float) -> AsyncIterator[None]:
    """Read keys, limits and epochs now, and again and again until the block ends."""
    await _refresh(gate)  # a request before the epochs are known could hit what was reset
    task = asyncio.create_task(_refresh_regularly(gate, refresh_s), name="tenants")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=2 * _REDIS_S)
        await gate.close()


async def _refresh_regularly(gate: TenantGate, refresh_s: float) -> None:
    while True:
        await asyncio.sleep(refresh_s)
        await _refresh(gate)


async def _refresh(gate: TenantGate) -> None:
    """What cannot be read stays as it was."""
    if not gate.directory.open:
        await gate.directory.refresh()
    with contextlib.suppress(RedisError, OSError, TimeoutError):
        await gate.epochs.refresh()


def listening_host(host: str, settings: TenancySettings, *, keyless: bool) -> str:
    """Where to listen: not beyond loopback if nobody needs a key, unless the settings say so."""
    if not keyless or is_loopback(host) or settings.open_without_keys:
        return host
    log.warning(
        "no API keys are set, so the server listens on loopback only",
        extra={"asked": host, "listens": _LOOPBACK},
    )
    return _LOOPBACK
