"""A host cache whose blocks come from transfers and disks and are lent to others: filled in place, pinned at once.

Beyond ``HostCache``: a filled slot is sealed and pinned in one step, so that it cannot be evicted in between; blocks
have owners, so that a tenant's or a model's can be deleted; and one can ask what is held without touching it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epdserve.kvstore.block_header import BlockHeader, Checksum
from epdserve.kvstore.checksums import require_header, require_sum, sum_blocks
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.host_cache import HostCache
from epdserve.kvstore.host_pins import PinnedBlock
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.staging import Bytes
from epdserve.kvstore.types import BlockHash, BlockOwner


@dataclass(frozen=True, slots=True)
class Filled:
    """A slot that was filled in place, and what it has to hold."""

    slot: Slot
    header: BlockHeader
    parent: BlockHash | None


class LendingCache(HostCache):
    """A ``HostCache`` for a store. Thread-safe."""

    def seal_pinned(
        self, filled: Sequence[Filled], *, owner: BlockOwner | None, checksum: Checksum | None = None
    ) -> list[PinnedBlock | None]:
        """Let filled slots be found, each pinned until its ``release``; None for one that holds something else.

        Where a block is held already, that one is pinned, and the slot is free again; so is a corrupt one's.

        Args:
            filled: Slots from ``reserve``.
            owner: Of all of them.
            checksum: Verifies the payloads; without it only headers are compared.
        """
        sound = self._verify_filled(filled, checksum)
        pinned: list[PinnedBlock | None] = []
        kept = 0
        with self._lock:
            now = self._clock.monotonic()
            for item, good in zip(filled, sound, strict=True):
                if not good:
                    self._shelf.abort(item.slot)
                    pinned.append(None)
                    continue
                kept += self._shelf.insert(item.slot, item.header, item.parent, now, owner)
                entry = self._shelf.find(item.header.block_hash)
                assert entry is not None, "a block that was just inserted is held"
                self._shelf.pin(entry)
                pinned.append(PinnedBlock(self, entry, self._slots.readable(entry.slot)))
        self._metrics.put_new.inc(kept)
        self._metrics.put_again.inc(sum(sound) - kept)
        self._metrics.put_corrupt.inc(len(sound) - sum(sound))
        return pinned

    def held(self, hashes: Sequence[BlockHash], *, exact: bool = False) -> list[bool]:
        """Whether each block is held, as an exact one if asked so; pins nothing and counts nothing."""
        with self._lock:
            entries = [self._shelf.find(block_hash) for block_hash in hashes]
            return [entry is not None and (entry.header.exact or not exact) for entry in entries]

    def recheck(self, hashes: Sequence[BlockHash], checksum: Checksum) -> int:
        """Verify blocks that a reader found wrong, and drop those that are; returns how many were."""
        dropped = 0
        for block_hash in hashes:
            for block in self._pin([block_hash], exact=False):
                sums = sum_blocks(checksum, [block.page], [block.header])
                dropped += not self._sound(block, block.page, sums[0])
                self.release([block])
        return dropped

    def delete_owned(self, condemned: Callable[[BlockOwner], bool]) -> int:
        """``delete`` for all blocks whose owner is condemned; returns how many were held."""
        with self._lock:
            entries = self._shelf.owned(condemned)
            for entry in entries:
                self._shelf.drop(entry)
        self._metrics.evicted["deleted"].inc(len(entries))
        return len(entries)

    def _verify_filled(self, filled: Sequence[Filled], checksum: Checksum | None) -> list[bool]:
        """Whether each slot holds what it has to; frees all of them if that cannot be told."""
        try:
            pages = [self._slots.bytes_of(item.slot) for item in filled]
            headers = [item.header for item in filled]
            sums = None if checksum is None else sum_blocks(checksum, pages, headers)
            return [
                _holds(page, header, None if sums is None else sums[number])
                for number, (page, header) in enumerate(zip(pages, headers, strict=True))
            ]
        except BaseException:
            for item in filled:
                self.abort(item.slot)
            raise


def _holds(page: Bytes, header: BlockHeader, total: int | None) -> bool:
    try:
        require_header(page, header)
        if total is not None:
            require_sum(total, header)
    except CorruptBlock:
        return False
    return True
