from __future__ import annotations

import numpy as np
import pytest
from epdserve.kvstore.block_header import BlockHeader
from epdserve.kvstore.lending_cache import Filled, LendingCache
from epdserve.kvstore.staging import StagingPool
from epdserve.kvstore.types import BlockHash, BlockOwner
from support.kv_blocks import block, toy_checksum
from support.manual_clock import ManualClock

PAGE = 4096
ME, YOU = BlockOwner(b"a" * 16, b"r" * 32), BlockOwner(b"b" * 16, b"r" * 32)


@pytest.fixture
def pool() -> StagingPool:
    return StagingPool("blocks", slot_bytes=PAGE, count=4)


@pytest.fixture
def cache(pool: StagingPool) -> LendingCache:
    return LendingCache(pool, clock=ManualClock())


def fill(
    cache: LendingCache, pool: StagingPool, *seeds: int, parent: BlockHash | None = None
) -> list[Filled]:
    """Slots that hold a chain of blocks, as a transfer would leave them."""
    filled = []
    for seed in seeds:
        header, page = block(seed, PAGE)
        slot = cache.reserve()
        assert slot is not None
        np.copyto(pool.bytes_of(slot), page)
        filled.append(Filled(slot, header, filled[-1].header.block_hash if filled else parent))
    return filled


def headers(*seeds: int) -> list[BlockHeader]:
    return [block(seed, PAGE)[0] for seed in seeds]


def test_sealed_blocks_are_pinned_and_know_parent_and_owner(cache: LendingCache, pool: StagingPool) -> None:
    first, second = cache.seal_pinned(fill(cache, pool, 1, 2), owner=ME, checksum=toy_checksum)
    assert first is not None
    assert second is not None
    assert (second.parent, second.owner) == (first.header.block_hash, ME)
    assert first.parent is None
    assert cache.pinned() == 2
    for number in (3, 4):
        cache.release([b for b in cache.seal_pinned(fill(cache, pool, number), owner=ME) if b])
    # both free places went to unpinned blocks: what is pinned stays, however long ago it was used
    cache.release([b for b in cache.seal_pinned(fill(cache, pool, 5), owner=ME) if b])
    assert cache.held([h.block_hash for h in headers(1, 2)]) == [True, True]
    cache.release([first, second])
    cache.check()


def test_a_wrong_block_is_refused_alone(cache: LendingCache, pool: StagingPool) -> None:
    filled = fill(cache, pool, 1, 2, 3)
    pool.bytes_of(filled[1].slot)[7] ^= 1
    pinned = cache.seal_pinned(filled, owner=ME, checksum=toy_checksum)
    assert [b is None for b in pinned] == [False, True, False]
    assert pool.counts().held == len(cache) == 2
    cache.release([b for b in pinned if b])
    # without a checksum only the header shows
    filled = fill(cache, pool, 4)
    pool.bytes_of(filled[0].slot)[filled[0].header.payload_bytes] ^= 1
    assert cache.seal_pinned(filled, owner=ME) == [None]
    cache.check()


def test_a_block_that_is_held_is_pinned_where_it_lies(cache: LendingCache, pool: StagingPool) -> None:
    (first,) = cache.seal_pinned(fill(cache, pool, 1), owner=ME)
    (again,) = cache.seal_pinned(fill(cache, pool, 1), owner=YOU)
    assert first is not None
    assert again is not None
    assert again.slot == first.slot
    assert pool.counts().held == 1
    cache.release([first, again])


def test_a_checksum_that_breaks_leaves_no_slot_behind(cache: LendingCache, pool: StagingPool) -> None:
    def broken(payload: memoryview, block_hash: bytes) -> int:
        raise RuntimeError("no sum today")

    with pytest.raises(RuntimeError):
        cache.seal_pinned(fill(cache, pool, 1, 2), owner=ME, checksum=broken)
    assert pool.counts().held == 0
    cache.check()


def test_held_tells_exact_ones_apart_and_counts_no_use(cache: LendingCache, pool: StagingPool) -> None:
    (filled,) = fill(cache, pool, 1)
    tainted = BlockHeader(
        filled.header.block_hash, filled.header.checksum, filled.header.payload_bytes, False
    )
    end = tainted.payload_bytes
    pool.bytes_of(filled.slot)[end : end + 64] = np.frombuffer(tainted.encode(), np.uint8)
    cache.release([b for b in cache.seal_pinned([Filled(filled.slot, tainted, None)], owner=ME) if b])
    hashes = [tainted.block_hash, BlockHash(bytes(16))]
    assert cache.held(hashes) == [True, False]
    assert cache.held(hashes, exact=True) == [False, False]


def test_rechecking_drops_what_is_wrong_and_keeps_what_is_right(
    cache: LendingCache, pool: StagingPool
) -> None:
    pinned = cache.seal_pinned(fill(cache, pool, 1, 2), owner=ME)
    cache.release([b for b in pinned if b])
    hashes = [h.block_hash for h in headers(1, 2, 3)]
    found = cache.get(hashes[1])
    assert found is not None
    pool.bytes_of(found.slot)[3] ^= 1
    cache.release([found])
    assert cache.recheck(hashes, toy_checksum) == 1
    assert cache.held(hashes) == [True, False, False]
    cache.check()


def test_an_owners_blocks_go_at_once_and_readers_keep_their_bytes(
    cache: LendingCache, pool: StagingPool
) -> None:
    (mine,) = cache.seal_pinned(fill(cache, pool, 1), owner=ME)
    (yours,) = cache.seal_pinned(fill(cache, pool, 2), owner=YOU)
    (nobodys,) = cache.seal_pinned(fill(cache, pool, 3), owner=None)
    assert mine is not None
    assert yours is not None
    assert nobodys is not None
    assert cache.delete_owned(lambda owner: owner == ME) == 1
    assert cache.held([h.block_hash for h in headers(1, 2, 3)]) == [False, True, True]
    assert mine.page.tobytes() == block(1, PAGE)[1].tobytes()
    cache.release([mine, yours, nobodys])
    assert pool.counts().held == 2
    cache.check()
