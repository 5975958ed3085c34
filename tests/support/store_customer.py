"""A worker's side of a store without a registry to ask: what it knew of the store before stays good."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.store_types import FoundTail, TailCandidate, TailQuery
from epdserve.services.types import TransferEndpoint, token_ids
from support.store import Stage, fetch, offload
from support.store_worker import CALL_S, OWNER, FakeWorker, chain


@dataclass
class Customer:
    """Takes blocks and tails from one life of a store. Raises ``ServiceError`` as the calls do."""

    reader: FakeWorker
    client: StoreClient
    endpoint: TransferEndpoint
    incarnation: str

    @classmethod
    async def of(cls, scene: Stage, reader: FakeWorker, store: str) -> Self:
        """Of the present life of a store."""
        client = await scene.client(store)
        description = await client.describe(deadline_s=CALL_S)
        return cls(reader, client, description.endpoint, description.info.incarnation)

    async def take(self, hashes: Sequence[bytes]) -> list[str]:
        """Fetch a chain, prove every byte, end the lease; the tiers it came from."""
        blocks, lease = await fetch(self.client, hashes)
        assert [block.ref.block_hash for block in blocks] == list(hashes[: len(blocks)])
        if blocks:
            assert await self.reader.read(self.endpoint, blocks), "a wrong byte"
            assert await self.client.end_fetch(lease, incarnation=self.incarnation, deadline_s=CALL_S)
        return [str(block.tier) for block in blocks]

    async def find_tail(self, parent: bytes, after: Sequence[int]) -> FoundTail | None:
        """Look for a tail, prove it, end its lease."""
        query = TailQuery(OWNER, (TailCandidate(parent, token_ids(after)),))
        found = await self.client.fetch_tail(query, deadline_s=CALL_S)
        if found is not None:
            assert await self.reader.read_tail(self.endpoint, found), "a wrong byte"
            assert await self.client.end_fetch(found.lease, incarnation=found.incarnation, deadline_s=CALL_S)
        return found


@dataclass
class Traffic:
    """Offers to one store and takes from another one without a pause; an error or a wrong byte ends it.

    Attributes:
        tiers: Blocks taken, by tier; ``missed`` are those that did not come.
    """

    writer: FakeWorker
    offers_to: StoreClient
    customer: Customer
    tiers: Counter[str] = field(default_factory=Counter)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._task is not None
        failed = self._task.done()
        self._task.cancel()
        await asyncio.wait([self._task])
        if failed and kind is None:
            self._task.result()  # says why

    def so_far(self) -> Counter[str]:
        """What has been taken until now; no error has come."""
        assert self._task is not None
        if self._task.done():
            self._task.result()
        return Counter(self.tiers)

    async def _run(self) -> None:
        for number in itertools.count():
            hashes = chain(f"t{number}-", 2)
            results = await offload(self.offers_to, self.writer.offer(hashes, first_page=32))
            assert results == ["taken", "taken"]
            await asyncio.sleep(0.12)  # the news of it takes a moment
            for _ in range(2):  # from the other machine, then from the memory it was brought to
                tiers = await self.customer.take(hashes)
                self.tiers.update([*tiers, *["missed"] * (2 - len(tiers))])
