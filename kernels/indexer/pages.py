"""Where index keys lie in the page pool: what score kernels need to find entry ``e`` of a segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from epdserve.kernels.launch import LaunchRefusedError, check_indices, check_tensor, queued_copy
from torch import Tensor

ROWS_PER_TILE: Final = 64


@dataclass(frozen=True, slots=True)
class IndexPages:
    """Packed FP4 index keys of one KV source.

    Entry e of segment s: page ``table_SP[s, e // entries_per_page]``, values at ``values_offset + (e %
    entries_per_page) * D / 2`` and scales at ``scales_offset + (e % entries_per_page) * D / 32`` inside it.
    A page number out of range is no page: its entries are missing, and nothing is read.
    """

    pages_PB: Tensor  # (P, page bytes) uint8, contiguous
    table_SP: Tensor  # (S, pages of the longest segment) int32 or int64
    values_offset: int
    scales_offset: int
    entries_per_page: int

    def __post_init__(self) -> None:
        check_tensor("pages_PB", self.pages_PB, (torch.uint8,), (None, None))
        check_tensor("table_SP", self.table_SP, (torch.int32, torch.int64), (None, None), like=self.pages_PB)
        check_indices("table_SP", self.table_SP, limit=self.pages_PB.shape[0], least=-1)
        if not self.pages_PB.is_contiguous():
            raise LaunchRefusedError(f"pages_PB must be contiguous, got strides {self.pages_PB.stride()}")
        last = max(self.values_offset, self.scales_offset)
        if self.entries_per_page <= 0 or min(self.values_offset, self.scales_offset) < 0:
            raise LaunchRefusedError(f"impossible offsets or entries: {self}")
        if last >= self.pages_PB.shape[1]:
            raise LaunchRefusedError(f"offset {last} in pages of {self.pages_PB.shape[1]} bytes")

    def arguments(self) -> tuple[int, int, int, int, int, int]:
        """Kernel arguments, in the order of the kernels."""
        pages, page_bytes = self.pages_PB.shape
        return (
            self.table_SP.stride(0), self.table_SP.shape[1], pages, page_bytes, self.values_offset, self.scales_offset
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Runs of rows of one segment each: (tiles, 3) int32 of first row, number of rows, segment."""

    table: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device | str, most: int = ROWS_PER_TILE) -> RowTiles:
        """Cut segments of ``counts`` consecutive rows into runs of at most ``most``; on the host, once a step."""
        tiles, first = [], 0
        for segment, count in enumerate(counts):
            tiles += [(first + i, min(most, count - i), segment) for i in range(0, count, most)]
            first += count
        return cls(queued_copy(torch.tensor(tiles, dtype=torch.int32).view(-1, 3), device))
