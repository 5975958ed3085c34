"""A tail of a prompt's prefix from the machine's store into a staging slot of this worker. Runs on the event loop."""

import asyncio
from dataclasses import dataclass
from typing import Final

from epdserve.kvstore.hashing import chain_start
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.transfer.base import Copy
from epdserve.services.engine.config import StoreUse
from epdserve.services.engine.offload import STAGING_RESERVE
from epdserve.services.engine.onboard import FoundTail, plan_start
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import TAILS, Runner
from epdserve.services.engine.store_link import Store, StoreLink
from epdserve.services.engine.store_metrics import StoreMetrics
from epdserve.services.engine.transfer_thread import PendingRead, ReadOutcome, TransferThread
from epdserve.services.errors import ServiceError
from epdserve.services.store_types import TAILS as STORED_TAILS
from epdserve.services.store_types import CacheOwner, TailCandidate, TailQuery
from epdserve.services.store_types import FoundTail as LentTail
from epdserve.services.types import token_ids

_MOST_CANDIDATES: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class StagedTail:
    """A tail and the slot that its record lies in, which whoever has this gives back."""

    tail: FoundTail
    staging: Slot


class TailFetcher:
    """Finds and brings tails. Owned by the event loop."""

    def __init__(
        self,
        runner: Runner,
        transfers: TransferThread,
        link: StoreLink,
        use: StoreUse,
        *,
        metrics: StoreMetrics,
    ) -> None:
        self._runner, self._transfers, self._link, self._use = runner, transfers, link, use
        self._metrics = metrics

    def candidates(self, request: RunningRequest, blocks: int) -> tuple[TailCandidate, ...]:
        """Places after a chain of ``blocks`` blocks where a tail would save rows, deepest first."""
        runner, size = self._runner, self._runner.block_tokens
        bare = plan_start(runner, request, blocks, None)
        last = bare.prompt_tokens - 1
        start = chain_start(
            block_tokens=size, root=runner.names_of(request).root, tenant_key=request.tenant_key
        )
        found: list[TailCandidate] = []
        for block in range(min(blocks, last // size), bare.span.first_row // size - 1, -1):
            after = request.tokens[block * size : min((block + 1) * size, last)]
            if block or len(after):
                parent = request.hashes[block - 1] if block else start
                found.append(TailCandidate(parent, token_ids(after)))
            if len(found) == _MOST_CANDIDATES:
                break
        return tuple(found)

    async def fetch(
        self, store: Store, request: RunningRequest, owner: CacheOwner, candidates: tuple[TailCandidate, ...]
    ) -> StagedTail | None:
        """The deepest tail there is for one of the candidates; None is a miss, whatever went wrong."""
        if not candidates:
            return None
        if self._runner.staging_slots.counts().free <= STAGING_RESERVE:
            self._metrics.tails.labels(outcome="no_room").inc()
            return None
        try:
            query = TailQuery(owner, candidates, request.exact)
            lent = await store.client.fetch_tail(query, deadline_s=self._use.call_deadline_s)
        except ServiceError as error:
            self._link.failed(store, error)
            self._metrics.tails.labels(outcome="failed").inc()
            return None
        if lent is None:
            self._metrics.tails.labels(outcome="miss").inc()
            return None
        staging = self._runner.staging_slots.acquire()
        if staging is None:
            self._link.later(self._end(store, lent))
            self._metrics.tails.labels(outcome="no_room").inc()
            return None
        outcome = "cancelled"
        read: list[PendingRead] = []
        try:
            outcome = await self._read(store, lent, staging, read)
        finally:
            self._metrics.tails.labels(outcome=outcome).inc()
            if outcome == "cancelled":
                self._link.later(self._end(store, lent))
            if outcome != "found":
                self._give_up(staging, read)
        if outcome != "found":
            return None
        record = self._runner.staging[staging.index]
        position = self._position(request, candidates, lent)
        return StagedTail(FoundTail(position, record, lent.tail.checksum, lent.tail.exact), staging)

    async def _read(self, store: Store, lent: LentTail, staging: Slot, read: list[PendingRead]) -> str:
        """Read the record and end the lease; what became of it."""
        deadline_s = self._use.transfer_deadline_s
        try:
            endpoint = await self._link.endpoint(store, deadline_s=self._use.call_deadline_s)
            copy = Copy(STORED_TAILS, lent.tail.slot, TAILS, staging.index, lent.tail.nbytes)
            read.append(self._transfers.read(endpoint, [copy], deadline_s=deadline_s))
            done = await asyncio.wrap_future(read[0].future)
            held = await self._end(store, lent)
        except ServiceError as error:
            self._link.failed(store, error)
            return "failed"
        if done is not ReadOutcome.DONE:
            return done.value
        return "found" if held else "lease_lost"

    async def _end(self, store: Store, lent: LentTail) -> bool:
        return await store.client.end_fetch(
            lent.lease, incarnation=lent.incarnation, deadline_s=self._use.call_deadline_s
        )

    def _position(
        self, request: RunningRequest, candidates: tuple[TailCandidate, ...], lent: LentTail
    ) -> int:
        """Tokens that the tail covers; a store that says nonsense is found out when the record is verified."""
        candidate = candidates[min(lent.candidate, len(candidates) - 1)]
        hashes = [bytes(block_hash) for block_hash in request.hashes]
        blocks = hashes.index(candidate.parent) + 1 if candidate.parent in hashes else 0
        return min(blocks * self._runner.block_tokens + lent.after_tokens, request.length)

    def _give_up(self, staging: Slot, read: list[PendingRead]) -> None:
        slots = self._runner.staging_slots
        if not read or read[0].over:
            slots.release(staging)
            return
        slots.quarantine(staging)
        if self._transfers.settle(read[0], lambda: slots.transfer_over(staging)):
            slots.transfer_over(staging)
