"""Contexts of 2**20 entries in Triton's interpreter: the last entry is found, and nothing beyond it is read.

Pages repeat in the table, so a long context needs little memory; tiles are large, or it would take minutes.
"""

import pytest
import torch
from epdserve.kernels.attention.entries import Selected, Window
from epdserve.kernels.attention.sparse import sparse_attention
from epdserve.kernels.indexer import score
from epdserve.kernels.indexer.pages import IndexPages, RowTiles
from epdserve.kernels.indexer.reference import candidate_mask_ref, top_entries_ref
from epdserve.kernels.indexer.score import score_blocks, score_pages
from epdserve.kernels.indexer.select import candidate_blocks, top_entries_in_chunks
from epdserve.kernels.quant.rows import quantize_fp4_e8m0
from support.kernel_rows import randn
from support.packed_pages import Pool, packed_pool, packed_windows
from support.triton_rows import assert_same_bits

ENTRIES, CHUNK = 1 << 20, 1 << 18
VISIBLE = [ENTRIES, ENTRIES - 1]


def long_table(pool: Pool) -> torch.Tensor:
    """(1, pages of 2**20 entries): every page of the pool again and again, in an order that does not repeat with 2."""
    pages = pool.table_SP[0]
    return pages[torch.arange(ENTRIES // pool.entries_per_page) * 7 % len(pages)][None]


def test_the_best_entries_of_a_million() -> None:
    scores = randn(1, ENTRIES).round_(decimals=2).expand(2, ENTRIES).contiguous()
    scores[:, -1] = 9.0
    visible = torch.tensor(VISIBLE)
    found = top_entries_in_chunks(scores, visible, 512, chunk=CHUNK)
    assert_same_bits(found, top_entries_ref(scores, visible, 512))
    assert int(found[0].max()) == ENTRIES - 1


def test_the_candidate_blocks_of_a_million() -> None:
    scores = randn(1, ENTRIES)
    visible = torch.tensor(VISIBLE[1:])
    blocks = candidate_blocks(scores, visible, 64, 8, chunk=CHUNK)
    mask = torch.zeros(1, ENTRIES // 8, dtype=torch.bool).scatter_(1, blocks, True)
    expected = candidate_mask_ref(scores, visible, 64, 8)
    assert torch.equal(mask.repeat_interleave(8, dim=1), expected)


def test_scores_of_a_million_entries_and_of_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "BLOCK_ENTRIES", 1 << 16)
    pool = packed_pool("index", 1, 12, 32)
    table = long_table(pool)
    pages = IndexPages(pool.pages_PB, table, pool.values_offset, pool.scales_offset, pool.entries_per_page)
    query = (*quantize_fp4_e8m0(randn(1, 16, 32)), randn(1, 16, seed=1))
    visible = torch.tensor([ENTRIES])
    whole = score_pages(*query, pages, RowTiles.of([1], "cpu"), visible, ENTRIES)
    few = IndexPages(
        pool.pages_PB, table[:, -3:], pool.values_offset, pool.scales_offset, pool.entries_per_page
    )
    last = score_pages(*query, few, RowTiles.of([1], "cpu"), torch.tensor([12]), 12)
    torch.testing.assert_close(whole[:, -12:], last, rtol=1e-5, atol=1e-5)
    blocks = torch.tensor([[0, ENTRIES // 4 - 1]])
    chosen = score_blocks(*query, pages, torch.tensor([0]), visible, blocks, 4)
    torch.testing.assert_close(chosen[:, 4:], last[:, -4:], rtol=1e-5, atol=1e-5)
    less = score_blocks(*query, pages, torch.tensor([0]), visible - 1, blocks, 4)
    assert less[0, -1] == float("-inf")


def test_attention_to_the_last_entry_of_a_million() -> None:
    pool, dim = packed_pool("main", 1, 12, 64), 64
    rows, _ = packed_windows(4, dim)
    q, sink, angle = randn(1, 16, dim).bfloat16(), randn(16), torch.zeros(1, 4)
    window = Window(rows, torch.tensor([[0, 3]]))
    offsets = pool.values_offset, pool.scales_offset, pool.entries_per_page
    table, zero = long_table(pool), torch.tensor([0])

    def attend(table: torch.Tensor, entries: list[int]) -> torch.Tensor:
        chosen = Selected(pool.pages_PB, table, zero, torch.tensor([entries]), *offsets)
        return sparse_attention(q, window, chosen, sink, angle.cos(), angle.sin())

    far = attend(table, [ENTRIES - 12, ENTRIES - 1, -1])
    near = attend(table[:, -3:].contiguous(), [0, 11, -1])
    assert_same_bits(far, near)
