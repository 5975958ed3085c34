"""Blocks through a store: offered, found, lent, read over NIXL, kept on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.store import (
    Stage,
    chain,
    offload,
    role_table,
    stage,
    taken,
    taken_results,
)
from support.valkey import url_of, valkey_server


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with valkey_server() as server:
        yield url_of(server)


@pytest.fixture
async def scene(tmp_path: Path, redis_url: str) -> AsyncIterator[Stage]:
    async with stage(tmp_path, redis_url) as started:
        yield started


async def test_what_one_worker_offers_another_reads(scene: Stage) -> None:
    await scene.store(**role_table())
    writer, reader = await scene.worker("prefill-0"), await scene.worker("decode-0")
    client, hashes = await scene.client(), chain("a", 20)
    assert await offload(client, writer.offer(hashes)) == taken_results(20)
    assert await taken(scene, reader, hashes) == ["host"] * 20
