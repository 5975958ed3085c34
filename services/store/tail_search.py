"""Tails that other machines' stores hold: found through the directory, pulled store to store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from epdserve.kvstore.clock import Clock
from epdserve.kvstore.tail_directory import TailDirectory
from epdserve.kvstore.tail_index import fitting
from epdserve.kvstore.tails import TailEntry, TailId, TailInfo, TailPlace, rest_digest
from epdserve.kvstore.types import BlockOwner, Endpoint
from epdserve.services.engine.peer_book import PeerBook
from epdserve.services.errors import ServiceError
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.store.config import StoreSettings
from epdserve.services.store.deletions import Deletions
from epdserve.services.store.memory import StoreMemory
from epdserve.services.store.metrics import StoreMetrics
from epdserve.services.store.tail_reader import TailReader
from epdserve.services.store_types import FoundTail, TailCandidate, TailQuery

ASKED_AT_MOST = 2  # stores for one question: replaying a window costs not much more
DIRECTORY_CANDIDATES = 8  # of a question, deepest first, that the directory is asked for

Here = tuple[int, TailInfo]  # a tail of this store and the candidate that it fits


class TailSearch:
    """Owned by one event loop.

    Args:
        worker: Name of this store, which is not asked.
        useful: Whether asking the directory may find something: it answers, and there are other machines.
    """

    def __init__(
        self,
        memory: StoreMemory,
        book: PeerBook,
        reader: TailReader,
        directory: TailDirectory,
        settings: StoreSettings,
        metrics: StoreMetrics,
        clock: Clock,
        deletions: Deletions,
        *,
        worker: str,
        useful: Callable[[], bool],
    ) -> None:
        self._memory, self._book, self._reader, self._directory = memory, book, reader, directory
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._deletions, self._worker, self._useful = deletions, worker, useful

    async def better(self, query: TailQuery, here: Here | None, *, deadline_s: float) -> Here | None:
        """A tail that fits better than the one here, now here as well; None if there is none.

        Not to be cancelled: run it in a task that is awaited to its end.
        """
        if query.local_only or not self._useful() or self._deletions.recent(query.owner):
            return None
        ends_at = self._clock.monotonic() + deadline_s
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
        outcome = await self._reader.read(endpoint, found.tail.slot, info, left_s, held=end)
        if outcome in ("no_room", "unread", "late"):
            await end()
        return outcome


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
