"""Many callers at once, pages recycled under offers, deletions, evictions, callers that go away: never a wrong byte."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.store_types import FetchRequest
from support.store import Stage, offload, role_table, stage
from support.store_worker import CALL_S, OTHER, OWNER, FakeWorker, chain

SECONDS = 3.0
CHAINS = [chain(f"{label}-", 12) for label in "abcdefgh"]


class Lives:
    """What random callers do to two stores, and what came of it."""

    def __init__(self, scene: Stage, clients: list[StoreClient], seed: int) -> None:
        self.scene, self.clients, self.dice = scene, clients, random.Random(seed)
        self.right = self.lost = self.offered = self.refused = self.cancelled = 0
        self.ends_at = asyncio.get_running_loop().time() + SECONDS

    def going(self) -> bool:
        return asyncio.get_running_loop().time() < self.ends_at

    async def offer(self, worker: FakeWorker, number: int) -> None:
        """Offer chains; some pages change while the store reads them, as a worker that is not to be trusted would."""
        first = number * 16
        while self.going():
            hashes = self.dice.choice(CHAINS)
            owner = self.dice.choice((OWNER, OTHER))
            request = worker.offer(hashes, first_page=first, owner=owner)
            calls = asyncio.create_task(offload(self.dice.choice(self.clients), request))
            if self.dice.random() < 0.5:
                await asyncio.sleep(self.dice.random() * 0.01)
                page = first + self.dice.randrange(12)
                worker.fill(page, chain("foreign-", 3)[self.dice.randrange(3)])  # another valid block
                worker.page_of[first + self.dice.randrange(12)][self.dice.randrange(8000)] ^= 1
            results = await calls
            self.offered += len(results)
            self.refused += results.count("refused")

    async def fetch(self, reader: FakeWorker, places: range) -> None:
        """Fetch chains, read what is lent and compare it with what its names promise."""
        while self.going():
            at = self.dice.randrange(2)
            client, hashes = self.clients[at], self.dice.choice(CHAINS)
            endpoint = (await client.describe(deadline_s=CALL_S)).endpoint
            request = FetchRequest(OWNER, hashes, max_wait_s=1.0)
            lease, incarnation, wrong = "", "", []
            async for batch in client.fetch(request, deadline_s=CALL_S):
                lease, incarnation = batch.lease, batch.incarnation
                wrong += await reader.wrong(endpoint, batch.blocks, places)
                if self.dice.random() < 0.1:
                    self.cancelled += 1
                    break
                self.right += len(batch.blocks)
            assert wrong == []
            if lease:
                held = await client.end_fetch(lease, incarnation=incarnation, deadline_s=CALL_S)
                self.lost += not held

    async def disturb(self) -> None:
        """Delete, evict, expire."""
        while self.going():
            await asyncio.sleep(self.dice.random() * 0.2)
            client = self.dice.choice(self.clients)
            memory = self.scene.parts(self.dice.choice(("store-0", "store-1"))).memory
            match self.dice.randrange(3):
                case 0:
                    await client.delete_tenant(OTHER.tenant, deadline_s=CALL_S)
                case 1:
                    memory.cache.delete(list(self.dice.choice(CHAINS)[6:]))
                case 2:
                    await client.touch(self.dice.choice(CHAINS), deadline_s=CALL_S)


async def test_random_callers_never_get_a_wrong_byte(tmp_path: Path) -> None:
    async with stage(tmp_path) as scene:
        for number in (0, 1):
            table = role_table(tmp_path / f"s{number}", blocks=48, batch_blocks=4)
            await scene.store(f"store-{number}", machine=f"m{number}", **table)
        worker, reader = await scene.worker("prefill-0"), await scene.worker("decode-0")
        lives = Lives(scene, [await scene.client("store-0"), await scene.client("store-1")], seed=1)
        callers = [lives.offer(worker, number) for number in range(3)]
        callers += [lives.fetch(reader, range(at, at + 16)) for at in (0, 16, 32)]
        async with asyncio.timeout(60):
            await asyncio.gather(*callers, lives.disturb())
        print(
            f"{lives.offered} offered, {lives.refused} refused, {lives.right} read, {lives.cancelled} gave up"
        )
        assert lives.right > 50
        assert lives.refused > 0
        for client in lives.clients:
            assert await client.locate(chain("foreign-", 3), deadline_s=CALL_S) == ()
