"""Blocks longer than a sector: pages on page boundaries are written from where they are, others are copied first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.ssd.record import RecordLayout
from epdserve.kvstore.ssd.retention import Admission
from epdserve.kvstore.ssd.slots import aligned
from epdserve.kvstore.ssd.tier import DirectorySpec, SsdSettings, SsdTier
from epdserve.kvstore.ssd.write_behind import BlockPut
from support.kv_blocks import toy_checksum
from support.ssd import ROOT, TENANT, name

COUNT = 12
BLOCKS = [name(number) for number in range(COUNT)]


def pages_of(payload_bytes: int, *, on_boundaries: bool) -> list[Bytes]:
    page_bytes = RecordLayout(payload_bytes).page_bytes
    memory = aligned(COUNT, 16384)
    pages = [row[:page_bytes] if on_boundaries else row[64 : 64 + page_bytes] for row in memory]
    for page, block in zip(pages, BLOCKS, strict=True):
        page[:payload_bytes] = np.frombuffer(np.random.default_rng([*block]).bytes(payload_bytes), np.uint8)
        header = BlockHeader(block, toy_checksum(page[:payload_bytes].data, block), payload_bytes, exact=True)
        page[payload_bytes:] = np.frombuffer(header.encode(), np.uint8)
    return pages


def open_tier(folder: Path, payload_bytes: int, threads: int = 2) -> SsdTier:
    tier = SsdTier(
        [DirectorySpec(str(folder), 16 * RecordLayout(payload_bytes).slot_bytes)],
        payload_bytes=payload_bytes,
        checksum=toy_checksum,
        settings=SsdSettings(write_behind_blocks=5, batch_blocks=3, io_threads=threads),
    )
    tier.open()
    return tier


# the name behind the header: in the payload's last sector, over its edge, in a sector of its own
@pytest.mark.parametrize("payload_bytes", [8192, 9000, 12288 - 100, 12288 - HEADER_BYTES, 12288 - 8])
@pytest.mark.parametrize("on_boundaries", [True, False], ids=["kept", "copied"])
def test_every_way_in_gives_the_same_bytes_out(
    tmp_path: Path, payload_bytes: int, on_boundaries: bool
) -> None:
    pages = pages_of(payload_bytes, on_boundaries=on_boundaries)
    before = [page.copy() for page in pages]
    tier = open_tier(tmp_path, payload_bytes)
    puts = [BlockPut(page, None, TENANT, ROOT) for page in pages]
    assert tier.put_batch(puts) == [Admission.ACCEPTED] * COUNT
    assert all(np.array_equal(page, old) for page, old in zip(pages, before, strict=True))
    for lose_table in (False, True):
        tier.close()
        if lose_table:
            (tmp_path / "names.tbl").unlink()
        tier = open_tier(tmp_path, payload_bytes)
        out = aligned(COUNT, tier.layout.slot_bytes)
        assert None not in tier.get_batch(BLOCKS, list(out))
        assert np.array_equal(out[:, : tier.layout.page_bytes], np.stack(before))
        assert not out[:, tier.layout.page_bytes :].any()
        tier.check(deep=True)
    tier.close()


def test_try_put_lets_go_of_the_page_at_once(tmp_path: Path) -> None:
    pages = pages_of(9000, on_boundaries=True)
    before = pages[0].copy()
    tier = open_tier(tmp_path, 9000, threads=0)
    assert tier.try_put(BlockPut(pages[0], None, TENANT, ROOT)) is Admission.ACCEPTED
    pages[0][:] = 0
    tier.flush()
    out = np.zeros((1, tier.layout.page_bytes), np.uint8)
    tier.get_batch(BLOCKS[:1], list(out))
    assert np.array_equal(out[0], before)
    tier.close()


def test_a_batch_that_ends_in_an_error_lets_go_of_its_pages(tmp_path: Path) -> None:
    pages = pages_of(9000, on_boundaries=True)
    pages[2][9000] ^= 1
    tier = open_tier(tmp_path, 9000, threads=0)
    with pytest.raises(CorruptBlock):
        tier.put_batch([BlockPut(page, None, TENANT, ROOT) for page in pages])
    assert tier.figures.queue_blocks() == 0
    assert [tier.contains(block) for block in BLOCKS[:3]] == [True, True, False]
    tier.close()
