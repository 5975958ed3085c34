"""Rows of bytes in Triton's interpreter."""

import pytest
import torch
from epdserve.kernels.cache_ops.reference import gather_rows_ref, scatter_rows_ref
from epdserve.kernels.cache_ops.rows import gather_rows, scatter_rows
from epdserve.kernels.launch import CHECKS_VARIABLE, LaunchRefusedError
from support.kernel_rows import generator
from support.triton_rows import assert_row_bits, assert_same_bits


def pool(pages: int = 6, nbytes: int = 512) -> torch.Tensor:
    return torch.randint(0, 256, (pages, nbytes), generator=generator()).to(torch.uint8)


@pytest.mark.parametrize("nbytes", [1, 4, 16, 17, 68, 256, 288, 512])
def test_gathered_rows_are_the_bytes_of_the_reference(nbytes: int) -> None:
    pages = pool()
    page = torch.tensor([[0, 5, -1], [3, 3, 2]])
    offset = torch.tensor([[0, 512 - nbytes, 0], [min(16, 512 - nbytes), min(3, 512 - nbytes), 0]])
    assert_same_bits(gather_rows(pages, page, offset, nbytes), gather_rows_ref(pages, page, offset, nbytes))


@pytest.mark.parametrize("nbytes", [1, 4, 17, 64, 288])
def test_scattered_rows_change_the_same_bytes(nbytes: int) -> None:
    got, expected = pool(), pool()
    page, offset = torch.tensor([4, -1, 0]), torch.tensor([512 - nbytes, 3, 7])
    rows = torch.randint(0, 256, (3, nbytes + 9), generator=generator(1)).to(torch.uint8)[:, 4 : 4 + nbytes]
    scatter_rows(got, page, offset, rows)
    scatter_rows_ref(expected, page, offset, rows)
    assert_same_bits(got, expected)


def test_no_row_and_no_byte_are_legal() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert gather_rows(pool(), none, none, 16).shape == (0, 16)
    assert gather_rows(pool(), torch.tensor([1]), torch.tensor([0]), 0).shape == (1, 0)
    scatter_rows(pool(), none, none, torch.empty(0, 16, dtype=torch.uint8))


def test_a_row_depends_on_itself_alone() -> None:
    page, offset = torch.arange(5), torch.arange(5) * 16
    assert_row_bits(lambda p, o: gather_rows(pool(), p, o, 32), page, offset)


def test_indices_out_of_range_are_refused_with_their_value() -> None:
    one = torch.tensor([1])
    with pytest.raises(LaunchRefusedError, match="page holds 6, of 6"):
        gather_rows(pool(), torch.tensor([6]), one, 16)
    with pytest.raises(LaunchRefusedError, match="byte_offset holds 497, of 497"):
        gather_rows(pool(), one, torch.tensor([497]), 16)
    with pytest.raises(LaunchRefusedError, match="byte_offset holds -1, below 0"):
        scatter_rows(pool(), one, torch.tensor([-1]), torch.zeros(1, 4, dtype=torch.uint8))
    with pytest.raises(LaunchRefusedError, match="513 bytes"):
        gather_rows(pool(), one, one, 513)


def test_a_kernel_never_follows_an_index_that_was_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without ``EPDSERVE_KERNEL_CHECKS``: nothing is read or written beyond the pool."""
    monkeypatch.setattr("epdserve.kernels.cache_ops.rows.check_indices", lambda *_, **__: None)
    page, offset = torch.tensor([6, 2**20, 0, 0]), torch.tensor([0, 0, 505, -8])
    assert not gather_rows(pool(), page, offset, 16).any()
    changed = pool()
    scatter_rows(changed, page, offset, torch.ones(4, 16, dtype=torch.uint8))
    assert_same_bits(changed, pool())


def test_the_debug_switch_has_the_agreed_name() -> None:
    assert CHECKS_VARIABLE == "EPDSERVE_KERNEL_CHECKS"
