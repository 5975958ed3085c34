"""Index scores from packed pages in Triton's interpreter."""

import pytest
import torch
from epdserve.kernels.indexer import score
from epdserve.kernels.indexer.pages import IndexPages, RowTiles
from epdserve.kernels.indexer.reference import score_entries_ref
from epdserve.kernels.indexer.score import score_blocks, score_pages
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.quant.reference import dequantize_fp4_e8m0_ref, quantize_fp4_e8m0_ref
from support.kernel_rows import randn
from support.packed_pages import packed_pool
from support.triton_rows import assert_same_bits
from torch import Tensor

HEADS, DIM, TILE = 16, 32, 16
MINUS_INF = float("-inf")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "BLOCK_ENTRIES", TILE)


def queries(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    packed, scales = quantize_fp4_e8m0_ref(randn(rows, HEADS, DIM, seed=3))
    return packed, scales, randn(rows, HEADS, seed=4)


def index_pages(segments: int, entries: int) -> tuple[IndexPages, Tensor]:
    pool = packed_pool("index", segments, entries, DIM)
    pages = IndexPages(
        pool.pages_PB, pool.table_SP, pool.values_offset, pool.scales_offset, pool.entries_per_page
    )
    return pages, pool.values_SED


def expected(packed: Tensor, scales: Tensor, w: Tensor, keys_ED: Tensor) -> Tensor:
    q = dequantize_fp4_e8m0_ref(packed, scales)
    return score_entries_ref(q.double()[None], w.double()[None], keys_ED.double()[None])[0].float()


@pytest.mark.parametrize("entries", [1, TILE - 1, TILE, TILE + 1])
def test_scores_equal_the_reference(entries: int) -> None:
    """Sums of 16 x 32 products in float32, against float64: 512 roundings of 2**-24 of sums of magnitudes."""
    pages, keys_SED = index_pages(2, entries)
    packed, scales, w = queries(5)
    visible = torch.tensor([max(0, entries - 1), entries, 0, max(1, entries - 2), entries])
    got = score_pages(packed, scales, w, pages, RowTiles.of([2, 3], "cpu", most=2), visible, entries)
    for segment, rows in ((0, range(0, 2)), (1, range(2, 5))):
        whole = expected(packed, scales, w, keys_SED[segment])
        for row in rows:
            seen = int(visible[row])
            bound = 512 * 2.0**-24 * float(w[row].abs().sum()) * DIM * 36
            torch.testing.assert_close(got[row, :seen], whole[row, :seen], rtol=0.0, atol=bound)
            torch.testing.assert_close(got[row, :seen], whole[row, :seen], rtol=1e-5, atol=1e-5)


def test_no_row_and_no_entry_are_legal() -> None:
    pages, _ = index_pages(1, 3)
    packed, scales, w = queries(0)
    none = torch.zeros(0, dtype=torch.int64)
    assert score_pages(packed, scales, w, pages, RowTiles.of([], "cpu"), none, 3).shape == (0, 3)
    assert score_blocks(packed, scales, w, pages, none, none, none.view(0, 4), 2).shape == (0, 8)


def test_a_row_has_the_same_bits_alone_and_in_any_tile_of_rows() -> None:
    pages, _ = index_pages(3, 37)
    packed, scales, w = queries(7)
    visible = torch.tensor([30, 31, 9, 35, 36, 37, 1])
    together = score_pages(packed, scales, w, pages, RowTiles.of([2, 4, 1], "cpu", most=3), visible, 37)
    segment_T = torch.tensor([0, 0, 1, 1, 1, 1, 2])
    for row in range(7):
        one = slice(row, row + 1)
        table = pages.table_SP[segment_T[one]]
        single = IndexPages(pages.pages_PB, table, pages.values_offset, pages.scales_offset, 4)
        alone = score_pages(
            packed[one], scales[one], w[one], single, RowTiles.of([1], "cpu"), visible[one], 37
        )
        seen = int(visible[row])
        assert_same_bits(alone[0, :seen], together[row, :seen])


def test_candidate_scores_are_the_scores_of_those_entries() -> None:
    pages, _ = index_pages(2, 40)
    packed, scales, w = queries(3)
    visible, segment = torch.tensor([40, 13, 2]), torch.tensor([0, 1, 1])
    blocks = torch.tensor([[0, 3, 9], [1, 3, -1], [0, -1, -1]])
    whole = score_pages(
        packed, scales, w, pages, RowTiles.of([1, 2], "cpu"), visible.sort().values.flip(0), 40
    )
    whole = torch.full((3, 40), MINUS_INF)
    for row in range(3):
        one = slice(row, row + 1)
        single = IndexPages(
            pages.pages_PB, pages.table_SP[segment[one]], pages.values_offset, pages.scales_offset, 4
        )
        whole[row] = score_pages(
            packed[one], scales[one], w[one], single, RowTiles.of([1], "cpu"), torch.tensor([40]), 40
        )
    got = score_blocks(packed, scales, w, pages, segment, visible, blocks, 4)
    for row in range(3):
        for slot in range(12):
            entry = int(blocks[row, slot // 4]) * 4 + slot % 4
            seen = blocks[row, slot // 4] >= 0 and entry < visible[row]
            assert got[row, slot] == (whole[row, entry] if seen else MINUS_INF)


def test_a_page_out_of_range_is_missing_and_not_read() -> None:
    pages, _ = index_pages(1, 12)
    table = pages.table_SP.clone()
    table[0, 1] = -1
    holed = IndexPages(pages.pages_PB, table, pages.values_offset, pages.scales_offset, 4)
    packed, scales, w = queries(1)
    got = score_pages(packed, scales, w, holed, RowTiles.of([1], "cpu"), torch.tensor([12]), 12)
    assert bool((got[0, 4:8] == MINUS_INF).all())
    assert bool(got[0, :4].isfinite().all())
    assert bool(got[0, 8:].isfinite().all())


def test_bad_arguments_are_refused_with_their_value() -> None:
    pages, _ = index_pages(1, 4)
    packed, scales, w = queries(2)
    tiles, visible = RowTiles.of([2], "cpu"), torch.tensor([1, 2])
    with pytest.raises(LaunchRefusedError, match=r"got torch\.float32"):
        score_pages(packed.float(), scales, w, pages, tiles, visible, 4)
    with pytest.raises(LaunchRefusedError, match="heads must be a power of two of at least 16, got 3"):
        score_pages(
            packed[:, :3].contiguous(),
            scales[:, :3].contiguous(),
            w[:, :3].contiguous(),
            pages,
            tiles,
            visible,
            4,
        )
    with pytest.raises(LaunchRefusedError, match=r"w_TH must have the shape \(2, 16\), got \(1, 16\)"):
        score_pages(packed, scales, w[:1], pages, tiles, visible, 4)
    with pytest.raises(LaunchRefusedError, match="table_SP holds 9, of"):
        IndexPages(pages.pages_PB, torch.full((1, 1), 9), 0, 0, 4)
    with pytest.raises(LaunchRefusedError, match="block_size must be a power of two, got 3"):
        score_blocks(packed, scales, w, pages, visible, visible, torch.zeros(2, 1, dtype=torch.int64), 3)


def test_pages_beyond_two_gigabytes_are_reached() -> None:
    """Page 2 of pages of a gigabyte lies beyond what 32 bits count; only the bytes in use are ever touched."""
    pages, keys_SED = index_pages(1, 4)
    size = (1 << 30) + 64
    huge = torch.empty(3, size, dtype=torch.uint8)
    source = pages.pages_PB[pages.table_SP[0, 0]]
    huge[2, size - len(source) :] = source
    shift = size - len(source)
    far = IndexPages(huge, torch.tensor([[2]]), pages.values_offset + shift, pages.scales_offset + shift, 4)
    packed, scales, w = queries(1)
    got = score_pages(packed, scales, w, far, RowTiles.of([1], "cpu"), torch.tensor([4]), 4)
    torch.testing.assert_close(got, expected(packed, scales, w, keys_SED[0]), rtol=1e-5, atol=1e-5)
