"""Tails: taken from workers, lent to workers and stores, found on other machines through the directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor

from epdserve.kvstore.clock import Clock
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.tail_directory import TailDirectory
from epdserve.kvstore.tail_index import fitting
from epdserve.kvstore.tails import TailEntry, TailId, TailInfo, TailLocation, TailPlace, rest_digest
from epdserve.kvstore.types import BlockOwner, Endpoint
from epdserve.services.engine.transfer_thread import ReadOutcome
from epdserve.services.errors import ServiceError
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.store.config import StoreSettings
from epdserve.services.store.memory import CHECKSUM, StoreMemory
from epdserve.services.store.metrics import StoreMetrics
from epdserve.services.store.peers import PeerBook
from epdserve.services.store.pulls import Puller
from epdserve.services.store.tasks import Tasks
from epdserve.services.store_types import (
    TAILS,
    CacheTier,
    FoundTail,
    OffloadResult,
    TailCandidate,
    TailOffer,
    TailQuery,
)
from epdserve.services.types import TailRef

log = logging.getLogger(__name__)

ASKED_AT_MOST = 2  # stores for one question: replaying a window costs not much more
DIRECTORY_CANDIDATES = 8  # of a question, deepest first, that the directory is asked for


class TailDesk:
    """Owned by one event loop. What fills a slot is a task that runs to its end, also when its caller goes away.

    Args:
        worker: Name of this store.
        incarnation: This life of it.
        directory: Where tails of other machines are found, None on a machine alone.
    """

    def __init__(
        self,
        memory: StoreMemory,
        book: PeerBook,
        puller: Puller,
        executor: Executor,
        settings: StoreSettings,
        metrics: StoreMetrics,
        clock: Clock,
        *,
        worker: str,
        incarnation: str,
        directory: TailDirectory | None,
    ) -> None:
        self._memory, self._book, self._puller, self._executor = memory, book, puller, executor
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._worker, self._incarnation, self._directory = worker, incarnation, directory
        self._tasks = Tasks()

    async def stop(self) -> None:
        """Wait for what is being read; each has its deadline."""
        await self._tasks.wait(2 * self._settings.offload_deadline_s)

    # -- in -------------------------------------------------------------------------------------------------

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
        left_s = max(0.0, ends_at - self._clock.monotonic())
        endpoint = await self._book.endpoint(offer.worker, incarnation=offer.incarnation, deadline_s=left_s)
        left_s = max(0.0, ends_at - self._clock.monotonic())
        outcome = await self._read(endpoint, offer.tail.slot, info, left_s)
        if outcome == "done":
            self._tell_soon(info)
            return "taken"
        return outcome

    async def _read(
        self,
        endpoint: Endpoint,
        place: int,
        info: TailInfo,
        deadline_s: float,
        *,
        held: Callable[[], Awaitable[bool]] | None = None,
    ) -> str:
        """Read a tail and keep it if ``held`` says so; ``done``, or what went wrong."""
        slot = self._memory.tails.reserve()
        if slot is None:
            return "no_room"
        outcome = await self._puller.fill(
            endpoint,
            TAILS,
            [place],
            [slot],
            into=TAILS,
            owner=self._memory.tails,
            nbytes=self._memory.geometry.tail_bytes,
            deadline_s=deadline_s,
        )
        if outcome is not ReadOutcome.DONE:
            return "late" if outcome is ReadOutcome.LATE else "unread"
        if held is not None and not await held():
            self._memory.tails.abort(slot)
            return "lease_lost"
        sealed = await asyncio.get_running_loop().run_in_executor(self._executor, self._seal, slot, info)
        return "done" if sealed else "corrupt"

    def _seal(self, slot: Slot, info: TailInfo) -> bool:
        try:
            self._memory.tails.seal(slot, info, checksum=CHECKSUM)
        except CorruptBlock:
            return False
        return True

    # -- out ------------------------------------------------------------------------------------------------

    async def find(self, query: TailQuery, *, deadline_s: float | None) -> FoundTail | None:
        """See ``StoreHandler.fetch_tail``: of the deepest candidate that has one, wherever it lies, the longest."""
        here = self._best_here(query)
        tier = CacheTier.HOST
        if not query.local_only and self._directory is not None:
            limit_s = self._settings.peer_deadline_s
            limit_s = limit_s if deadline_s is None else min(limit_s, deadline_s)
            better = await self._tasks.run(
                self._from_peers(query, here, self._clock.monotonic() + limit_s), "find-tail"
            )
            if better is not None:
                here, tier = better, CacheTier.PEER
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

    async def _from_peers(
        self, query: TailQuery, here: tuple[int, TailInfo] | None, ends_at: float
    ) -> tuple[int, TailInfo] | None:
        """A tail that is better than the one here, now here; None if there is none."""
        assert self._directory is not None, "asked without a directory"
        # of candidates behind the one that was found here none can be better
        last = len(query.candidates) if here is None else here[0] + 1
        candidates = query.candidates[: min(last, DIRECTORY_CANDIDATES)]
        entries = await self._directory.find([candidate.parent for candidate in candidates])
        asked = 0
        for number, entry in _ranked(candidates, entries, exact=query.exact):
            if here is not None and (number, -entry.place.after_tokens) >= (here[0], -_tokens(here[1])):
                return None
            if entry.location.store == self._worker or asked == ASKED_AT_MOST:
                continue
            asked += 1
            info = await self._pull(query, number, entry, ends_at)
            if info is not None:
                return number, info
        return None

    async def _pull(self, query: TailQuery, number: int, entry: TailEntry, ends_at: float) -> TailInfo | None:
        candidate, where = query.candidates[number], entry.location
        asked = TailCandidate(candidate.parent, candidate.after[: entry.place.after_tokens])
        wish = TailQuery(query.owner, (asked,), exact=query.exact, local_only=True)
        left_s = max(0.0, ends_at - self._clock.monotonic())
        try:
            async with asyncio.timeout(left_s):
                store = await self._book.store(where.store, incarnation=where.incarnation, deadline_s=left_s)
                endpoint = await self._book.endpoint(
                    where.store, incarnation=where.incarnation, deadline_s=left_s
                )
                found = await store.fetch_tail(wish, deadline_s=left_s)
        except (ServiceError, TimeoutError):
            self._metrics.peer_tails.labels(outcome="unreached").inc()
            return None
        info = self._info(asked, found, query) if found is not None else None
        outcome = "missing"
        if found is not None and info is not None:
            outcome = await self._read_lent(store, endpoint, found, info, ends_at)
        self._metrics.peer_tails.labels(outcome=outcome).inc()
        if info is None or outcome != "done":
            return None
        self._tell_soon(info)
        return info

    def _info(self, asked: TailCandidate, found: FoundTail, query: TailQuery) -> TailInfo | None:
        """What a peer lends, None if it is not what was asked for."""
        if found.tail.nbytes != self._memory.geometry.tail_bytes or found.after_tokens > len(asked.after):
            return None
        rest = rest_digest(asked.after[: found.after_tokens])
        return TailInfo(
            TailId(found.identity),
            found.tail.checksum,
            found.tail.exact,
            TailPlace(asked.parent, found.after_tokens, rest),
            BlockOwner(query.owner.tenant, query.owner.root),
        )

    async def _read_lent(
        self, store: StoreClient, endpoint: Endpoint, found: FoundTail, info: TailInfo, ends_at: float
    ) -> str:
        """Read a tail that a peer lends, and end the lease, which must have held."""

        async def end() -> bool:
            try:
                return await store.end_fetch(
                    found.lease,
                    incarnation=found.incarnation,
                    deadline_s=self._settings.peer_deadline_s,
                )
            except ServiceError:
                return False

        left_s = max(0.0, ends_at - self._clock.monotonic())
        outcome = await self._read(endpoint, found.tail.slot, info, left_s, held=end)
        if outcome in ("no_room", "unread", "late"):
            await end()
        return outcome

    # -- directory ------------------------------------------------------------------------------------------

    async def tell_all(self) -> int:
        """Tell the directory of every tail held, as after it was emptied; returns how many it took."""
        told = 0
        for info, left_s in self._memory.tails.held():
            told += await self._tell(info, left_s)
        return told

    async def withdraw(self, infos: Sequence[TailInfo]) -> None:
        """Take tails that were deleted out of the directory, as far as it answers."""
        for info in infos:
            if self._directory is not None and (entry := self._entry(info)) is not None:
                await self._directory.withdraw(entry)

    def _tell_soon(self, info: TailInfo) -> None:
        self._tasks.start(self._tell(info, self._settings.tail_ttl_s), "tell-tail")

    async def _tell(self, info: TailInfo, left_s: float) -> bool:
        entry = self._entry(info)
        if self._directory is None or entry is None:
            return False
        told = await self._directory.publish(entry, left_s)
        self._metrics.published.labels(result="done" if told else "failed").inc()
        return told

    def _entry(self, info: TailInfo) -> TailEntry | None:
        if info.place is None:
            return None
        nbytes = self._memory.geometry.tail_bytes
        location = TailLocation(self._worker, self._incarnation, nbytes, info.exact)
        return TailEntry(info.identity, info.place, location)


def _tokens(info: TailInfo) -> int:
    return 0 if info.place is None else info.place.after_tokens


def _ranked(
    candidates: Sequence[TailCandidate], entries: Sequence[TailEntry], *, exact: bool
) -> Iterator[tuple[int, TailEntry]]:
    """Entries that fit, best first: of the deepest candidate, and there the longest; ties by name."""
    for number, candidate in enumerate(candidates):
        listed = sorted(
            (e for e in entries if e.place.parent == candidate.parent and (e.location.exact or not exact)),
            key=lambda entry: entry.location.store,
        )
        places = {entry.identity: entry.place for entry in listed}
        for identity, _ in fitting(places.items(), candidate.after):
            yield from ((number, entry) for entry in listed if entry.identity == identity)
