"""Embeddings for prompts of this worker: lent by whoever has them, pulled, verified, given back.

Runs on the event loop; the step loop is told when an image has arrived, and goes on with the text before it meanwhile.
What goes wrong is told as an error that names the encode worker, so that the router can try another one. A destination
whose transfer is not over is quarantined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from epdserve.kvstore.clock import Clock
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.staging import StagingPool
from epdserve.kvstore.transfer.base import Copy
from epdserve.services.engine.embedding_store import EmbeddingStore, gather_rows, slot_checksum
from epdserve.services.engine.image_config import PrefillImages
from epdserve.services.engine.image_encoding import ImageEncoding
from epdserve.services.engine.image_metrics import ImageFetchMetrics
from epdserve.services.engine.image_peers import EncodePeer, EncodePeers
from epdserve.services.engine.image_recent import RecentEmbeddings
from epdserve.services.engine.transfer_thread import PendingRead, ReadOutcome, TransferThread
from epdserve.services.errors import DeadlineExceeded, Internal, ServiceError, Unavailable, WorkerLost
from epdserve.services.image_types import EMBEDDINGS, SPAN_ROWS, EmbeddingWish, LentEmbeddings
from epdserve.services.types import PlacedImage

_VALUE_BYTES: Final = 2  # bfloat16
_END_LOAN_S: Final = 2.0

Arrived = Callable[[torch.Tensor], None]
Failed = Callable[[ServiceError], None]


class LocalSource:
    """Embeddings made in this process."""

    def __init__(self, worker: str, encoding: ImageEncoding, store: EmbeddingStore) -> None:
        self.worker, self._encoding, self._store = worker, encoding, store

    async def get(self, wish: EmbeddingWish, *, deadline_s: float) -> torch.Tensor:
        """(tokens, hidden) bfloat16. Raises as ``ImageEncoding.lend``."""
        held = await self._encoding.wait_for(wish, deadline_s=deadline_s)
        try:
            return await asyncio.to_thread(self._store.read, held)
        finally:
            self._store.unpin(held)


class RemoteSource:
    """Embeddings lent by encode workers, pulled into slots of ``pool``."""

    def __init__(
        self, peers: EncodePeers, transfers: TransferThread, pool: StagingPool, *, hidden: int, most: int
    ) -> None:
        self._peers, self._transfers, self._pool, self._hidden = peers, transfers, pool, hidden
        self._places = asyncio.Semaphore(most)

    async def get(self, place: PlacedImage, wish: EmbeddingWish, *, deadline_s: float) -> torch.Tensor:
        """(tokens, hidden) bfloat16.

        Raises:
            ServiceError: The worker is gone or refuses, or the bytes are not those that were promised.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + deadline_s
        peer = await self._peers.peer(place.encoder, place.incarnation, deadline_s=deadline_s)
        lent = await peer.client.lend(wish, deadline_s=deadline_s)
        ended = False
        try:
            if not self._fits(lent, wish):
                raise Internal(f"{place.encoder} lends what cannot be", worker=place.encoder)
            async with self._places:
                embeddings_ND, sound = await self._pull(peer, lent, wish, max(0.001, ends_at - loop.time()))
            ended = True
            held = await peer.client.end_loan(
                lent.lease, incarnation=lent.incarnation, deadline_s=_END_LOAN_S
            )
        finally:
            if not ended:
                self._peers.end_soon(peer, lent)
        if not sound or not held:
            why = "were recycled while they were read" if sound else "are not those that were promised"
            raise Unavailable(f"the embeddings of {place.encoder} {why}", worker=place.encoder)
        return embeddings_ND

    def _fits(self, lent: LentEmbeddings, wish: EmbeddingWish) -> bool:
        rows = -(-wish.tokens // SPAN_ROWS)
        return len(lent.slots) == rows and lent.nbytes == wish.tokens * self._hidden * _VALUE_BYTES

    def _used(self, index: int, tokens: int) -> int:
        return min(SPAN_ROWS, tokens - index * SPAN_ROWS) * self._hidden * _VALUE_BYTES

    async def _pull(
        self, peer: EncodePeer, lent: LentEmbeddings, wish: EmbeddingWish, deadline_s: float
    ) -> tuple[torch.Tensor, bool]:
        slots = self._acquire(len(lent.slots))
        read: PendingRead | None = None
        try:
            copies = [
                Copy(EMBEDDINGS, theirs, EMBEDDINGS, ours.index, self._used(index, wish.tokens))
                for index, (theirs, ours) in enumerate(zip(lent.slots, slots, strict=True))
            ]
            read = self._transfers.read(peer.endpoint, copies, deadline_s=deadline_s)
            outcome = await asyncio.wrap_future(read.future)
            if outcome is not ReadOutcome.DONE:
                raise WorkerLost(f"embeddings of {peer.worker}: {outcome.value}", worker=peer.worker)
            return await asyncio.to_thread(self._take, slots, lent, wish)
        finally:
            self._give_back(slots, read)

    def _take(
        self, slots: tuple[Slot, ...], lent: LentEmbeddings, wish: EmbeddingWish
    ) -> tuple[torch.Tensor, bool]:
        """Copy out and compare with the promise; in a thread."""
        sums = tuple(
            slot_checksum(self._pool.bytes_of(slot), self._used(index, wish.tokens), wish.digest)
            for index, slot in enumerate(slots)
        )
        return gather_rows(self._pool, slots, wish.tokens, self._hidden), sums == lent.checksums

    def _acquire(self, count: int) -> tuple[Slot, ...]:
        slots: list[Slot] = []
        while len(slots) < count and (slot := self._pool.acquire()) is not None:
            slots.append(slot)
        if len(slots) < count:
            self._give_back(tuple(slots), None)
            raise Unavailable("no room for embeddings", retry_after_s=1.0)
        return tuple(slots)

    def _give_back(self, slots: tuple[Slot, ...], read: PendingRead | None) -> None:
        if read is None or read.over:
            for slot in slots:
                self._pool.release(slot)
            return
        for slot in slots:
            self._pool.quarantine(slot)

        def over() -> None:
            for slot in slots:
                self._pool.transfer_over(slot)

        if self._transfers.settle(read, over):
            over()


class ImageFetcher:
    """Fetches images of requests. ``start`` and ``cancel`` may be called from any thread.

    Args:
        local: The vision encoder of this process, if there is one.
        remote: Encode workers, if they are to be asked.
        fingerprint: Of the vision encoder that this worker's model goes with.
    """

    def __init__(
        self,
        local: LocalSource | None,
        remote: RemoteSource | None,
        *,
        fingerprint: bytes,
        use: PrefillImages,
        clock: Clock,
        metrics: ImageFetchMetrics,
    ) -> None:
        self._local, self._remote, self._fingerprint, self._use = local, remote, fingerprint, use
        self._clock, self._metrics = clock, metrics
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[object, set[asyncio.Task[None]]] = {}
        self._recent = RecentEmbeddings(use.recent_bytes)
        metrics.watch(recent_bytes=lambda: self._recent.nbytes)

    @property
    def fetching(self) -> int:
        """Requests with images on the way."""
        return len(self._tasks)

    def start(self, key: object, place: PlacedImage, arrived: Arrived, failed: Failed) -> None:
        """Fetch one image of the request ``key``; one of the two is called on the event loop unless cancelled."""
        self._loop.call_soon_threadsafe(self._start, key, place, arrived, failed)

    def cancel(self, key: object) -> None:
        """Stop fetching for a request."""
        self._loop.call_soon_threadsafe(self._cancel, key)

    async def stop(self) -> None:
        """Cancel everything and wait for it."""
        tasks = [task for some in self._tasks.values() for task in some]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)

    def _start(self, key: object, place: PlacedImage, arrived: Arrived, failed: Failed) -> None:
        task = self._loop.create_task(self._fetch(place, arrived, failed), name="fetch-image")
        self._tasks.setdefault(key, set()).add(task)
        task.add_done_callback(partial(self._ended, key))

    def _ended(self, key: object, task: asyncio.Task[None]) -> None:
        some = self._tasks[key]
        some.discard(task)
        if not some:
            del self._tasks[key]

    def _cancel(self, key: object) -> None:
        for task in self._tasks.get(key, ()):
            task.cancel()

    async def _fetch(self, place: PlacedImage, arrived: Arrived, failed: Failed) -> None:
        began = self._clock.monotonic()
        try:
            embeddings_ND, how = await self._get(place)
        except ServiceError as error:
            self._metrics.fetches.labels(outcome=error.code).inc()
            failed(error)
            return
        self._metrics.fetches.labels(outcome=how).inc()
        self._metrics.seconds.observe(self._clock.monotonic() - began)
        arrived(embeddings_ND)

    async def _get(self, place: PlacedImage) -> tuple[torch.Tensor, str]:
        wish = EmbeddingWish(place.digest, place.tokens, self._fingerprint)
        deadline_s = self._use.fetch_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                if self._local is not None and place.encoder == self._local.worker:
                    return await self._local.get(wish, deadline_s=deadline_s), "local"
                if self._remote is None or not place.encoder:
                    raise Unavailable(f"no embeddings from {place.encoder!r} here", worker=place.encoder)
                if (recent_ND := self._recent.get(place.digest, place.tokens)) is not None:
                    return recent_ND, "recent"
                embeddings_ND = await self._remote.get(place, wish, deadline_s=deadline_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no embeddings of {place.encoder} within {deadline_s} s", worker=place.encoder
            ) from None
        self._metrics.bytes.inc(embeddings_ND.nbytes)
        self._recent.put(place.digest, embeddings_ND)
        return embeddings_ND, "pulled"
