"""Everything of a store that has no thread and no event loop of its own: pools, caches, disks, their metrics."""

from __future__ import annotations

import logging
from typing import Final

from epdserve.kernels.checksum import host_checksum
from epdserve.kvstore.block_header import HEADER_BYTES
from epdserve.kvstore.clock import Clock
from epdserve.kvstore.errors import ConservationError
from epdserve.kvstore.host_metrics import HostCacheMetrics, SwaPoolMetrics
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.lending_cache import LendingCache
from epdserve.kvstore.metrics import LeaseMetrics, SlotMetrics
from epdserve.kvstore.ssd.errors import NoUsableDirectory, SsdError
from epdserve.kvstore.ssd.metrics import SsdMetrics
from epdserve.kvstore.ssd.retention import RetentionPolicy
from epdserve.kvstore.ssd.tier import DirectorySpec, SsdSettings, SsdTier
from epdserve.kvstore.staging import StagingPool
from epdserve.kvstore.swa_pool import SwaPool
from epdserve.services.errors import Unavailable
from epdserve.services.store.config import StoreSettings
from epdserve.services.store.geometry import StoreGeometry
from epdserve.services.store_types import BLOCKS, TAILS
from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

CHECKSUM: Final = host_checksum


class StoreMemory:
    """Host pool, host cache, SWA pool, SSD tier and leases of one store. Thread-safe as its parts are.

    Attributes:
        cache: Blocks in the slots of ``block_slots``.
        tails: Tails in the slots of ``tail_slots``.
        tier: None without a directory that serves.
        leases: On both.
    """

    def __init__(
        self, settings: StoreSettings, geometry: StoreGeometry, clock: Clock, registry: CollectorRegistry
    ) -> None:
        """Map the memory, open the directories; takes as long as they are large.

        Raises:
            Unavailable: No room for one block and one tail, or a directory that is another store's.
        """
        self.geometry = geometry
        tail_slots = max(1, int(settings.host_bytes * settings.tail_share) // geometry.tail_bytes)
        block_slots = (settings.host_bytes - tail_slots * geometry.tail_bytes) // geometry.page_bytes
        if block_slots < 1:
            raise Unavailable(
                f"host_bytes={settings.host_bytes} holds no tail of {geometry.tail_bytes} bytes and block of "
                f"{geometry.page_bytes}"
            )
        try:
            self.block_slots = StagingPool(BLOCKS, slot_bytes=geometry.page_bytes, count=block_slots)
            self.tail_slots = StagingPool(TAILS, slot_bytes=geometry.tail_bytes, count=tail_slots)
        except (OSError, ValueError) as error:
            raise Unavailable(f"memory of {settings.host_bytes} bytes: {error}") from error
        leases, slots = LeaseMetrics(registry), SlotMetrics(registry)
        blocks, tails = HostCacheMetrics(registry), SwaPoolMetrics(registry)
        self.leases = LeaseTable(clock, metrics=leases)
        self.cache = LendingCache(self.block_slots, clock=clock, metrics=blocks)
        self.tails = SwaPool(
            self.tail_slots,
            payload_bytes=geometry.tail_payload_bytes,
            ttl_s=settings.tail_ttl_s,
            clock=clock,
            leases=self.leases,
            metrics=tails,
        )
        self.tier = _open_tier(settings, geometry, clock, SsdMetrics(registry))
        leases.watch(lambda: self.leases.counts().held)
        slots.watch("host_blocks", self.block_slots.counts)
        slots.watch("tails", self.tail_slots.counts)
        blocks.watch(held_bytes=self.cache.held_bytes, pinned=self.cache.pinned)
        tails.watch(held_bytes=self.tails.held_bytes, pinned=self.tails.pinned)

    def header_end(self) -> int:
        """Bytes of a page that count: payload and header."""
        return self.geometry.payload_bytes + HEADER_BYTES

    def check(self) -> None:
        """Recount everything in memory and on disk.

        Raises:
            ConservationError: Something does not add up.
        """
        self.cache.check()
        self.tails.check()
        if self.tier is not None:
            self.tier.check()

    def problems(self) -> int:
        """Parts whose memory does not add up; anything but 0 is a bug. For a gauge: looks at no disk."""
        count = 0
        for part in (self.cache, self.tails):
            try:
                part.check()
            except ConservationError:
                log.exception("store does not add up")
                count += 1
        return count

    def close(self) -> None:
        """Store what waits and give the directories back."""
        self.leases.end_all()
        if self.tier is not None:
            self.tier.close()


def _open_tier(
    settings: StoreSettings, geometry: StoreGeometry, clock: Clock, metrics: SsdMetrics
) -> SsdTier | None:
    ssd = settings.ssd
    if not ssd.directories:
        return None
    tier = SsdTier(
        [DirectorySpec(str(one.folder), one.capacity_bytes) for one in ssd.directories],
        payload_bytes=geometry.payload_bytes,
        checksum=CHECKSUM,
        policy=RetentionPolicy(
            floor_s=ssd.floor_s,
            mode=ssd.mode,
            reserve_ratio=ssd.reserve_ratio,
            low_free_ratio=ssd.low_free_ratio,
            high_free_ratio=ssd.high_free_ratio,
            default_quota_bytes=ssd.default_quota_bytes,
        ),
        settings=SsdSettings(
            write_behind_blocks=ssd.write_behind_blocks,
            io_threads=ssd.io_threads,
            bytes_per_day=ssd.bytes_per_day,
            second_hit_blocks=ssd.second_hit_blocks,
        ),
        clock=clock,
        metrics=metrics,
    )
    try:
        opened = tier.open()
    except NoUsableDirectory as error:
        # a machine whose disks fail still has its memory, and its peers
        log.error("no ssd directory serves", extra={"reason": str(error)})
        return None
    except (SsdError, ValueError) as error:
        raise Unavailable(f"ssd: {error}") from error
    log.info("ssd tier opened", extra={"blocks": opened.blocks, "failed": len(opened.failed)})
    metrics.watch(tier.figures)
    tier.start()
    return tier
