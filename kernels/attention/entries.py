"""What a row attends to, as it lies in memory: window rows and selected compressed entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from epdserve.kernels.launch import INDICES, LaunchRefusedError, check_contiguous, check_indices, check_tensor
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """Packed FP8 window rows, and which of them each query row sees.

    Attributes:
        rows_NB: (N, D + D / 32) uint8, contiguous: E4M3 bytes, then UE8M0 scales. A pool of windows is one such tensor.
        index_TW: (T, W) int32 or int64, rows of ``rows_NB``; -1 (or out of range) = none.
    """

    rows_NB: Tensor
    index_TW: Tensor

    def check(self, rows: int, dim: int) -> None:
        """Refuse what the kernels cannot take.

        Raises:
            LaunchRefusedError: With the value.
        """
        check_tensor("rows_NB", self.rows_NB, (torch.uint8,), (None, dim + dim // 32))
        check_contiguous("rows_NB", self.rows_NB)
        if self.rows_NB.shape[1] % 2 or self.rows_NB.data_ptr() % 2:
            raise LaunchRefusedError(
                f"window rows must have an even number of bytes, got {self.rows_NB.shape[1]}"
            )
        check_tensor("index_TW", self.index_TW, INDICES, (rows, None), like=self.rows_NB)
        check_indices("index_TW", self.index_TW, limit=len(self.rows_NB), least=-1)


@dataclass(frozen=True, slots=True)
class Selected:
    """Packed FP4 main KV in pages, and which entries each query row selected.

    Attributes:
        pages_PB: (P, page bytes) uint8, contiguous.
        table_SP: (S, pages of the longest segment) int32 or int64 page numbers; out of range = no page.
        segment_T: (T,) int32 or int64, row of the table.
        entries_TK: (T, K) int32 or int64 entry numbers, -1 = none.
        values_offset, scales_offset: Where a page's E2M1 pairs and E4M3 scales start.
        entries_per_page: Entries of a page.
    """

    pages_PB: Tensor
    table_SP: Tensor
    segment_T: Tensor
    entries_TK: Tensor
    values_offset: int
    scales_offset: int
    entries_per_page: int

    def check(self, rows: int, dim: int) -> None:
        """Refuse what the kernels cannot take.

        Raises:
            LaunchRefusedError: With the value.
        """
        check_tensor("pages_PB", self.pages_PB, (torch.uint8,), (None, None))
        check_contiguous("pages_PB", self.pages_PB)
        check_tensor("table_SP", self.table_SP, INDICES, (None, None), like=self.pages_PB)
        check_indices("table_SP", self.table_SP, limit=len(self.pages_PB), least=-1)
        check_tensor("segment_T", self.segment_T, INDICES, (rows,), like=self.pages_PB)
        check_indices("segment_T", self.segment_T, limit=len(self.table_SP))
        check_tensor("entries_TK", self.entries_TK, INDICES, (rows, None), like=self.pages_PB)
        limit = self.table_SP.shape[1] * self.entries_per_page
        check_indices("entries_TK", self.entries_TK, limit=limit, least=-1)
        page_bytes = self.pages_PB.shape[1]
        ends = (
            self.values_offset + self.entries_per_page * (dim // 2),
            self.scales_offset + self.entries_per_page * (dim // 16),
        )
        if (
            self.entries_per_page <= 0
            or min(self.values_offset, self.scales_offset) < 0
            or max(ends) > page_bytes
        ):
            raise LaunchRefusedError(f"entries end at {max(ends)} in pages of {page_bytes} bytes")
