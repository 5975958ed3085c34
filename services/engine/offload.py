"""Write-behind of sealed blocks and tails to the machine's store, which reads them out of this worker's memory.

Offers come from the step loop and never wait: pages are referenced and staging slots held until the store has answered,
within a bound in bytes; what is beyond the bound is dropped and counted. Calls run on the event loop. When a call has
failed the store may still be reading until its deadline, which does no harm: it verifies what it got.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from epdserve.kvstore.hashing import chain_start, tenant_label
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.tails import rest_digest
from epdserve.kvstore.types import PageId
from epdserve.services.engine.config import StoreUse
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Runner
from epdserve.services.engine.store_link import Store, StoreLink
from epdserve.services.engine.store_metrics import StoreMetrics
from epdserve.services.errors import ServiceError
from epdserve.services.store_types import (
    CacheOwner,
    OffloadBlock,
    OffloadRequest,
    OffloadResult,
    TailOffer,
)
from epdserve.services.types import BlockRef

STAGING_RESERVE: Final = 4  # staging slots that hand-offs keep to themselves
_CALLS: Final = 2  # at once: the store reads one offer while the next one is on its way
_TOUCHED: Final = 4096  # chains remembered as touched lately
_TOUCH_EVERY_S: Final = 60.0  # last use is kept coarsely
# Somebody waits for his first token while a hand-off lasts, and nobody for the store: offers let it pass, this long
_YIELD_S: Final = 0.05
_YIELD_POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class _Blocks:
    """An offer of blocks, their pages referenced."""

    owner: CacheOwner
    pages: tuple[PageId, ...]
    blocks: tuple[OffloadBlock, ...]
    running: bool
    offered_at: float


@dataclass(frozen=True, slots=True)
class _Tail:
    """An offer of a tail in a staging slot."""

    offer: TailOffer
    staging: Slot
    offered_at: float


class Offloader:
    """``offer_*`` and ``touch`` are for the step loop; everything else is on the event loop.

    Args:
        worker, incarnation: Whose memory the store is to read.
        running: Whether the blocks belong to requests that are answered right now.
        on_call: Told that the store is about to read: over some transports the source has to take part.
        handing_off: Whether a decode worker may be reading here; offers let it go first for a moment.
    """

    def __init__(
        self,
        runner: Runner,
        link: StoreLink,
        use: StoreUse,
        *,
        worker: str,
        incarnation: str,
        running: bool,
        on_call: Callable[[], None],
        metrics: StoreMetrics,
        handing_off: Callable[[], bool] = lambda: False,
    ) -> None:
        self._runner, self._link, self._use, self._metrics = runner, link, use, metrics
        self._worker, self._incarnation, self._running = worker, incarnation, running
        self._on_call, self._handing_off = on_call, handing_off
        self._lock = threading.Lock()
        self._queue: deque[_Blocks | _Tail] = deque()
        self._touches: deque[tuple[bytes, ...]] = deque(maxlen=64)
        self._touched_at: dict[bytes, float] = {}
        self._pending_bytes = 0
        self._calls = 0
        self._owners: dict[tuple[bytes, bytes], CacheOwner] = {}
        self._open = False
        self._wake = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def pending_bytes(self) -> int:
        """Bytes queued or being read by the store."""
        return self._pending_bytes

    @property
    def busy(self) -> bool:
        """Whether the store may be reading this worker's memory."""
        return self._calls > 0

    def start(self) -> None:
        """Begin to pass offers on."""
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._pumps = [
            self._loop.create_task(self._pump(), name=f"offload-{number}") for number in range(_CALLS)
        ]

    async def stop(self) -> None:
        """Drop what is queued and wait for the calls under way to end, or their deadline."""
        self._open = False
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)
        self.drop_queued()

    def drop_queued(self) -> None:
        """Offer nothing of what waits."""
        while self._queue:
            self._drop(self._queue.popleft(), "dropped")

    # -- for the step loop ----------------------------------------------------------------------------------

    def offer_blocks(self, request: RunningRequest, start: int, end: int) -> None:
        """Offer a request's sealed blocks [start, end); returns at once, whatever becomes of them."""
        self.offer_pages(request, request.pages[:end], start)

    def offer_pages(self, request: RunningRequest, pages: Sequence[PageId], start: int) -> None:
        """Offer the blocks of a request from ``start`` on that lie in ``pages``, which the caller holds.

        Thread-safe.
        """
        end = len(pages)
        nbytes = (end - start) * self._runner.layout.page_bytes
        if not self._open or not self._take(nbytes):
            self._metrics.offloads.labels(outcome="dropped").inc(end - start)
            return
        pages = pages[start:]
        self._runner.blocks.pin(pages)
        infos = self._runner.blocks.describe_all(pages)
        parents = [request.hashes[start - 1] if start else None, *request.hashes[start : end - 1]]
        blocks = tuple(
            OffloadBlock(BlockRef(*info), parent) for info, parent in zip(infos, parents, strict=True)
        )
        owner = self._owner(request)
        size, now = self._use.portion_blocks, self._runner.clock.monotonic()
        for at in range(0, len(pages), size):
            part = slice(at, at + size)
            self._queue.append(_Blocks(owner, tuple(pages[part]), blocks[part], self._running, now))
        self._ring()

    def offer_tail(self, request: RunningRequest) -> None:
        """Offer the tail of a request that stands at ``next_row``: its state is copied now, if there is room."""
        runner = self._runner
        free = runner.staging_slots.counts().free
        staging = runner.staging_slots.acquire() if self._open and free > STAGING_RESERVE else None
        if staging is None or not self._take(runner.tail_layout.nbytes):
            if staging is not None:
                runner.staging_slots.release(staging)
            self._metrics.tail_offloads.labels(outcome="dropped").inc()
            return
        tail = runner.stage_tail(request, staging, None)
        tokens = request.tokens[: request.next_row]
        blocks = len(tokens) // runner.block_tokens
        rest = tokens[blocks * runner.block_tokens :]
        owner, key = self._owner(request), request.tenant_key
        start = chain_start(block_tokens=runner.block_tokens, root=owner.root, tenant_key=key)
        offer = TailOffer(
            worker=self._worker,
            incarnation=self._incarnation,
            owner=owner,
            tail=tail,
            identity=runner.tail_name(request, tokens),
            parent=request.hashes[blocks - 1] if blocks else start,
            after_tokens=len(rest),
            rest=rest_digest(rest),
        )
        self._queue.append(_Tail(offer, staging, runner.clock.monotonic()))
        self._ring()

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Say that blocks were used here, so that the store does not age them; once a minute for each chain."""
        if not hashes or not self._open:
            return
        now = self._runner.clock.monotonic()
        if now - self._touched_at.get(hashes[-1], float("-inf")) < _TOUCH_EVERY_S:
            return
        if len(self._touched_at) >= _TOUCHED:
            self._touched_at.clear()
        self._touched_at[hashes[-1]] = now
        self._touches.append(tuple(hashes))
        self._ring()

    # -- on the event loop ----------------------------------------------------------------------------------

    async def _pump(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._touches:
                await self._touch(self._touches.popleft())
            while self._queue:
                if self._yields(self._queue[0]):
                    await asyncio.sleep(_YIELD_POLL_S)
                    continue
                offer = self._queue.popleft()
                if self._queue:
                    self._wake.set()  # for the other pump
                await self._carry(offer)

    def _yields(self, offer: _Blocks | _Tail) -> bool:
        return self._handing_off() and self._runner.clock.monotonic() < offer.offered_at + _YIELD_S

    async def _carry(self, offer: _Blocks | _Tail) -> None:
        """Make one offer; its memory is given back however it ends."""
        outcome = "failed"
        store = self._link.store()
        self._calls += 1
        self._on_call()
        try:
            if store is None:
                outcome = "no_store"
            elif isinstance(offer, _Tail):
                outcome = (
                    await store.client.offload_tail(offer.offer, deadline_s=self._use.transfer_deadline_s)
                ).value
            else:
                outcome = await self._offload(store, offer)
        except ServiceError as error:
            assert store is not None
            self._link.failed(store, error)
        finally:
            self._calls -= 1
            self._drop(offer, outcome)

    async def _offload(self, store: Store, offer: _Blocks) -> str:
        request = OffloadRequest(
            self._worker, self._incarnation, offer.owner, offer.blocks, running=offer.running
        )
        results = await store.client.offload(request, deadline_s=self._use.transfer_deadline_s)
        for result in OffloadResult:
            if count := results.count(result):
                self._metrics.offloads.labels(outcome=result.value).inc(count)
        return ""

    async def _touch(self, hashes: tuple[bytes, ...]) -> None:
        store = self._link.store()
        if store is not None:
            with contextlib.suppress(ServiceError):  # it ages a little early
                await store.client.touch(hashes, deadline_s=self._use.call_deadline_s)

    def _drop(self, offer: _Blocks | _Tail, outcome: str) -> None:
        """Give an offer's memory back, and count it unless that has been done."""
        if isinstance(offer, _Tail):
            self._runner.staging_slots.release(offer.staging)
            self._give(self._runner.tail_layout.nbytes)
            self._metrics.tail_offloads.labels(outcome=outcome).inc()
            return
        self._runner.blocks.release(offer.pages)
        self._give(len(offer.pages) * self._runner.layout.page_bytes)
        if outcome:
            self._metrics.offloads.labels(outcome=outcome).inc(len(offer.pages))

    def _owner(self, request: RunningRequest) -> CacheOwner:
        key, root = request.tenant_key, self._runner.names_of(request).root
        owner = self._owners.get((key, root))
        if owner is None:
            if len(self._owners) >= _TOUCHED:
                self._owners.clear()
            owner = self._owners[key, root] = CacheOwner(tenant_label(key), root)
        return owner

    def _take(self, nbytes: int) -> bool:
        with self._lock:
            if self._pending_bytes + nbytes > self._use.offload_pending_bytes:
                return False
            self._pending_bytes += nbytes
            return True

    def _give(self, nbytes: int) -> None:
        with self._lock:
            self._pending_bytes -= nbytes

    def _ring(self) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # the loop has ended; ``stop`` has or will let go of the queue
            self._loop.call_soon_threadsafe(self._wake.set)
