"""Tails: taken from workers, lent to workers and stores, found on other machines through the directory."""

from __future__ import annotations

from epdserve.kvstore.clock import Clock
from epdserve.kvstore.tails import TailId, TailInfo, TailPlace
from epdserve.kvstore.types import BlockOwner
from epdserve.services.engine.peer_book import PeerBook
from epdserve.services.store.config import StoreSettings
from epdserve.services.store.deletions import Deletions
from epdserve.services.store.memory import StoreMemory
from epdserve.services.store.metrics import StoreMetrics
from epdserve.services.store.tail_notices import TailNotices
from epdserve.services.store.tail_reader import TailReader
from epdserve.services.store.tail_search import TailSearch
from epdserve.services.store.tasks import Tasks
from epdserve.services.store_types import (
    CacheTier,
    FoundTail,
    OffloadResult,
    TailOffer,
    TailQuery,
)
from epdserve.services.types import TailRef


class TailDesk:
    """Owned by one event loop. What fills a slot is a task that runs to its end, also when its caller goes away.

    Args:
        search: Finds tails on other machines; None if they are not asked.
    """

    def __init__(
        self,
        memory: StoreMemory,
        book: PeerBook,
        reader: TailReader,
        notices: TailNotices,
        search: TailSearch | None,
        settings: StoreSettings,
        metrics: StoreMetrics,
        clock: Clock,
        deletions: Deletions,
        *,
        incarnation: str,
    ) -> None:
        self._deletions = deletions
        self._memory, self._book, self._reader = memory, book, reader
        self._notices, self._search = notices, search
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._incarnation = incarnation
        self._tasks = Tasks()

    async def stop(self) -> None:
        """Wait for what is being read; each has its deadline."""
        await self._tasks.wait(2 * self._settings.offload_deadline_s)

    async def take(self, offer: TailOffer, *, deadline_s: float | None) -> OffloadResult:
        """See ``StoreHandler.offload_tail``.

        Raises:
            WorkerLost: No such life of the worker is known, or it does not answer.
        """
        limit_s = self._settings.offload_deadline_s
        limit_s = limit_s if deadline_s is None else min(limit_s, deadline_s)
        reason = await self._tasks.run(self._take(offer, self._clock.monotonic() + limit_s), "take-tail")
        self._metrics.offloaded_tails.labels(result=reason).inc()
        return OffloadResult.TAKEN if reason == "taken" else OffloadResult.REFUSED

    async def _take(self, offer: TailOffer, ends_at: float) -> str:
        if offer.tail.nbytes != self._memory.geometry.tail_bytes:
            return "misfit"
        info = TailInfo(
            TailId(offer.identity),
            offer.tail.checksum,
            offer.tail.exact,
            TailPlace(offer.parent, offer.after_tokens, offer.rest),
            BlockOwner(offer.owner.tenant, offer.owner.root),
        )
        began = self._clock.monotonic()
        left_s = max(0.0, ends_at - began)
        endpoint = await self._book.endpoint(offer.worker, incarnation=offer.incarnation, deadline_s=left_s)
        left_s = max(0.0, ends_at - self._clock.monotonic())
        outcome = await self._reader.read(endpoint, offer.tail.slot, info, left_s)
        if outcome == "done" and self._deletions.since(offer.owner, began):
            self._memory.tails.delete([info.identity])  # of its owner, while it was on its way
            return "unread"
        if outcome == "done":
            self._tell_soon(info)
            return "taken"
        return outcome

    async def find(self, query: TailQuery, *, deadline_s: float | None) -> FoundTail | None:
        """See ``StoreHandler.fetch_tail``: of the deepest candidate that has one, wherever it lies, the longest."""
        here = self._best_here(query)
        tier = CacheTier.HOST
        if self._search is not None:
            limit_s = self._settings.peer_deadline_s
            limit_s = limit_s if deadline_s is None else min(limit_s, deadline_s)
            better = await self._tasks.run(self._search.better(query, here, deadline_s=limit_s), "find-tail")
            if better is not None:
                here, tier = better, CacheTier.PEER
                self._tell_soon(better[1])
        found = None if here is None else self._lend(query, *here, tier=tier)
        self._metrics.tail_lookups.labels(result="miss" if found is None else found.tier.value).inc()
        return found

    def _best_here(self, query: TailQuery) -> tuple[int, TailInfo] | None:
        for number, candidate in enumerate(query.candidates):
            info = self._memory.tails.longest(candidate.parent, candidate.after, exact=query.exact)
            if info is not None:
                return number, info
        return None

    def _lend(self, query: TailQuery, number: int, info: TailInfo, *, tier: CacheTier) -> FoundTail | None:
        lent = self._memory.tails.lend(info.identity, self._settings.lease_ttl_s, exact=query.exact)
        if lent is None or lent.info.place is None:
            return None
        return FoundTail(
            lease=str(lent.lease),
            incarnation=self._incarnation,
            tail=TailRef(
                lent.slot.index,
                lent.slot.generation,
                self._memory.geometry.tail_bytes,
                lent.info.checksum,
                lent.info.exact,
            ),
            identity=lent.info.identity,
            candidate=number,
            after_tokens=lent.info.place.after_tokens,
            tier=tier,
        )

    def _tell_soon(self, info: TailInfo) -> None:
        self._tasks.start(self._notices.tell(info, self._settings.tail_ttl_s), "tell-tail")
