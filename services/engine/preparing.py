"""Ahead of the step loop: while a request waits, what the machine's store has of its prompt comes up.

Blocks are fetched into pages of their own and shared like any others, so that the step loop finds them when the
request starts; a tail waits in a staging slot. Whatever goes wrong or takes too long costs hits and nothing else.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from epdserve.kvstore.hashing import tenant_label
from epdserve.kvstore.types import BlockHash, PageId
from epdserve.services.engine.block_fetch import BlockFetcher, Wish
from epdserve.services.engine.config import StoreUse
from epdserve.services.engine.offload import Offloader
from epdserve.services.engine.onboard import hittable_blocks, plan_start
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Runner
from epdserve.services.engine.speeds import SpeedMeter
from epdserve.services.engine.store_link import Store, StoreLink
from epdserve.services.engine.store_metrics import StoreMetrics
from epdserve.services.engine.tail_fetch import StagedTail, TailFetcher
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.errors import ServiceError
from epdserve.services.policy.fetching import Chain, Speeds, blocks_to_fetch, tail_is_worth_it
from epdserve.services.store_types import CacheOwner, CacheTier
from epdserve.services.types import TokenSources

_IN_THREAD_ABOVE_TOKENS: Final = 16_384
_AT_ONCE: Final = 8  # requests whose blocks are being brought up; the others wait for that
_LEAST_WAIT_S: Final = 0.05  # for blocks that are quickly computed, too


@dataclass(slots=True, eq=False)
class Prepared:
    """What was brought up for a request.

    Attributes:
        tiers: By block, where those come from that were not in this worker's pages.
        tail: In a staging slot that whoever takes this gives back.
    """

    tiers: dict[int, CacheTier] = field(default_factory=dict)
    tail: StagedTail | None = None


def sources_of(runner: Runner, request: RunningRequest, prepared: Prepared) -> TokenSources:
    """Where the KV of a request came from that has just been given its place."""
    counts = Counter(prepared.tiers.get(block) for block in range(request.sealed_blocks))
    size, hit = runner.block_tokens, request.span.publish_from
    return TokenSources(
        device=counts[None] * size,
        tail=hit - request.sealed_blocks * size,
        host=counts[CacheTier.HOST] * size,
        ssd=counts[CacheTier.SSD] * size,
        peer=counts[CacheTier.PEER] * size,
        computed=request.length - hit,
    )


class Preparer:
    """Owned by the event loop; ``start`` and ``cancel`` may be called from any thread.

    Args:
        offloader: Is offered again what is held here and the store has lost.
    """

    def __init__(
        self,
        runner: Runner,
        transfers: TransferThread,
        link: StoreLink,
        use: StoreUse,
        offloader: Offloader,
        *,
        speeds: SpeedMeter,
        metrics: StoreMetrics,
    ) -> None:
        self._runner, self._link, self._use, self._offloader = runner, link, use, offloader
        self._speeds, self._metrics = speeds, metrics
        self._blocks = BlockFetcher(runner, transfers, link, use, speeds=speeds, metrics=metrics)
        self._tails = TailFetcher(runner, transfers, link, use, metrics=metrics)
        self.loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._tasks: dict[RunningRequest, asyncio.Task[None]] = {}

    @property
    def preparing(self) -> int:
        """Requests whose blocks are being brought up."""
        return len(self._tasks)

    def start(self, request: RunningRequest, on_ready: Callable[[Prepared], None]) -> None:
        """Bring up what there is; ``on_ready`` is called on the event loop exactly once, soon in any case."""
        self.loop.call_soon_threadsafe(self._start, request, on_ready)

    def cancel(self, request: RunningRequest) -> None:
        """Stop at once; ``on_ready`` still comes."""
        self.loop.call_soon_threadsafe(self._cancel, request)

    async def stop(self) -> None:
        """Cancel everything."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
        self._blocks.close()

    def _start(self, request: RunningRequest, on_ready: Callable[[Prepared], None]) -> None:
        prepared = Prepared()
        task = self.loop.create_task(self._prepare(request, prepared), name="prepare")
        self._tasks[request] = task

        def ended(task: asyncio.Task[None]) -> None:
            """A callback and no ``finally``: a task that is cancelled before its first step runs none."""
            self._tasks.pop(request, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.loop.call_exception_handler({"message": "preparing broke", "exception": error})
            on_ready(prepared)

        task.add_done_callback(ended)

    def _cancel(self, request: RunningRequest) -> None:
        if (task := self._tasks.get(request)) is not None:
            task.cancel()

    async def _prepare(self, request: RunningRequest, prepared: Prepared) -> None:
        if not request.hashes:
            if request.length > _IN_THREAD_ABOVE_TOKENS:
                request.hashes = await asyncio.to_thread(self._runner.chain_of, request)
            else:
                request.hashes = self._runner.chain_of(request)
        if request.every_row or self._link.store() is None:
            return
        began = self._runner.clock.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._use.transfer_deadline_s), self._places:
                if (store := self._link.store()) is not None:
                    await self._bring_up(store, request, prepared)
        self._metrics.prepare_seconds.observe(self._runner.clock.monotonic() - began)

    async def _bring_up(self, store: Store, request: RunningRequest, prepared: Prepared) -> None:
        """Pages that are needed stay referenced until all of it is here."""
        hashes = request.hashes[: hittable_blocks(self._runner, request)]
        pages = self._runner.blocks.match(hashes, exact=request.exact, counted=False)
        try:
            held = len(pages)
            owner = CacheOwner(tenant_label(request.tenant_key), self._runner.names_of(request).root)
            speeds = self._speeds.speeds()
            if held == len(hashes):  # what the store has of it matters for the next prompt only
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._fetch_tail(store, request, owner, held, speeds, prepared))
                    runs = await self._locate(store, request, hashes)
            else:
                runs = await self._locate(store, request, hashes)
                count = self._worth_fetching(request, held, runs or [], speeds)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._fetch_tail(store, request, owner, held + count, speeds, prepared))
                    await self._fetch(store, request, owner, pages, count, speeds, prepared)
            if runs is not None and (located := sum(blocks for _, blocks in runs)) < held:
                self._offloader.offer_pages(request, pages[:held], located)
        finally:
            self._runner.blocks.release(pages)

    async def _locate(
        self, store: Store, request: RunningRequest, hashes: list[BlockHash]
    ) -> list[tuple[str, int]] | None:
        """Where the chain lies, from its beginning on: (tier, blocks); None if nobody says so."""
        if not hashes:
            return []
        began = self._runner.clock.monotonic()
        try:
            runs = await store.client.locate(
                tuple(hashes), exact=request.exact, deadline_s=self._use.call_deadline_s
            )
        except ServiceError as error:
            self._link.failed(store, error)
            return None
        self._speeds.waited(self._runner.clock.monotonic() - began)
        return [(run.tier.value, run.blocks) for run in runs]

    def _worth_fetching(
        self, request: RunningRequest, held: int, runs: list[tuple[str, int]], speeds: Speeds
    ) -> int:
        runner = self._runner
        chain = Chain(held, _after(runs, held), runner.block_tokens, runner.layout.page_bytes)
        rerun = runner.halo.encoder_tokens if request.exact else runner.window
        end = request.length if request.resumed else request.prompt_tokens
        return blocks_to_fetch(chain, speeds, prompt_tokens=end, rerun_tokens=rerun)

    async def _fetch(
        self,
        store: Store,
        request: RunningRequest,
        owner: CacheOwner,
        pages: list[PageId],
        count: int,
        speeds: Speeds,
        prepared: Prepared,
    ) -> None:
        if not count:
            return
        held = len(pages)
        saved_s = speeds.compute_s(count * self._runner.block_tokens)
        wish = Wish(
            owner,
            tuple(request.hashes[held : held + count]),
            request.hashes[held - 1] if held else None,
            request.exact,
            max_wait_s=min(max(saved_s, _LEAST_WAIT_S), self._use.transfer_deadline_s),
        )
        tiers = await self._blocks.fetch(store, wish, pages)
        prepared.tiers.update(enumerate(tiers, held))

    async def _fetch_tail(
        self,
        store: Store,
        request: RunningRequest,
        owner: CacheOwner,
        blocks: int,
        speeds: Speeds,
        prepared: Prepared,
    ) -> None:
        if request.cuts is not None:
            return  # hits of deterministic requests end at cuts
        bare = plan_start(self._runner, request, blocks, None)
        saved = bare.prompt_tokens - 1 - bare.span.first_row
        nbytes = self._runner.tail_layout.nbytes
        if not tail_is_worth_it(speeds, tail_bytes=nbytes, saved_tokens=saved):
            self._metrics.tails.labels(outcome="not_worth_it").inc()
            return
        candidates = self._tails.candidates(request, blocks)
        prepared.tail = await self._tails.fetch(store, request, owner, candidates)


def _after(runs: list[tuple[str, int]], held: int) -> list[tuple[str, int]]:
    """The runs without the first ``held`` blocks."""
    rest = []
    for tier, blocks in runs:
        skipped = min(held, blocks)
        held -= skipped
        if blocks > skipped:
            rest.append((tier, blocks - skipped))
    return rest
