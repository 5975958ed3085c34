"""Rows of bytes in the page pool against plain slicing."""

import pytest
import torch
from epdserve.kernels.cache_ops import gather_rows, scatter_rows
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_rows import generator
from torch import Tensor

PAGES, PAGE_BYTES = 5, 192


def pool(seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (PAGES, PAGE_BYTES), generator=generator(seed)).to(torch.uint8)


@pytest.mark.parametrize("nbytes", [1, 2, 3, 8, 33, PAGE_BYTES])
@pytest.mark.parametrize("rows", [0, 1, 2, 17])
def test_gathered_rows_are_the_slices(nbytes: int, rows: int) -> None:
    pages, draw = pool(), generator(1)
    page = torch.randint(0, PAGES, (rows,), generator=draw)
    offset = torch.randint(0, PAGE_BYTES - nbytes + 1, (rows,), generator=draw)
    result = gather_rows(pages, page, offset, nbytes)
    assert result.shape == (rows, nbytes)
    for row, (p, o) in enumerate(zip(page.tolist(), offset.tolist(), strict=True)):
        assert torch.equal(result[row], pages[p, o : o + nbytes])


def test_missing_pages_give_zeros_and_shapes_broadcast() -> None:
    pages = pool()
    page = torch.tensor([[0, -1, 4], [-1, -1, 2]])
    result = gather_rows(pages, page, torch.tensor([184, 0, 8]), 8)
    assert result.shape == (2, 3, 8)
    assert not result[page < 0].any()
    assert torch.equal(result[0, 2], pages[4, 8:16])
    assert torch.equal(result[1, 2], pages[2, 8:16])
    assert torch.equal(result[0, 0], pages[0, 184:])


@pytest.mark.parametrize("page_dtype", [torch.int32, torch.int64])
def test_a_missing_page_with_the_largest_offset_is_still_missing(page_dtype: torch.dtype) -> None:
    pages, page, offset = pool(), torch.tensor([-1], dtype=page_dtype), torch.tensor([PAGE_BYTES - 1])
    before = pages.clone()
    assert not gather_rows(pages, page, offset, 1).any()
    scatter_rows(pages, page, offset, torch.full((1, 1), 7, dtype=torch.uint8))
    assert torch.equal(pages, before)


@given(st.lists(st.integers(-1, PAGES * 6 - 1), unique=True, max_size=20), st.integers(1, 32))
def test_scattered_rows_read_back_and_nothing_else_changes(places: list[int], nbytes: int) -> None:
    pages = pool()
    expected = pages.clone()
    page = torch.tensor([place // 6 if place >= 0 else -1 for place in places], dtype=torch.int64)
    offset = torch.tensor([place % 6 * 32 for place in places], dtype=torch.int64)
    rows = torch.randint(0, 256, (len(places), nbytes), generator=generator(2)).to(torch.uint8)
    scatter_rows(pages, page, offset, rows)
    for p, o, row in zip(page.tolist(), offset.tolist(), rows, strict=True):
        if p >= 0:
            expected[p, o : o + nbytes] = row
    assert torch.equal(pages, expected)
    assert torch.equal(gather_rows(pages, page, offset, nbytes)[page >= 0], rows[page >= 0])


def test_a_pool_of_other_elements_or_with_gaps_is_refused() -> None:
    where = torch.tensor([0])
    with pytest.raises(ValueError, match="uint8"):
        gather_rows(torch.zeros(2, 8), where, where, 4)
    with pytest.raises(ValueError, match="contiguous"):
        gather_rows(pool()[:, ::2], where, where, 4)
