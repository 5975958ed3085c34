"""Page pools with packed entries in them, as kernels read them and as the references see them."""

from dataclasses import dataclass

import torch
from epdserve.kernels.quant.reference import (
    dequantize_fp4_e4m3_ref,
    dequantize_fp4_e8m0_ref,
    dequantize_fp8_ref,
    quantize_fp4_e4m3_ref,
    quantize_fp4_e8m0_ref,
    quantize_fp8_ref,
)
from support.kernel_rows import generator, randn
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pool:
    """Entries of some segments, each in pages of its own, in random order, with other bytes around them."""

    pages_PB: Tensor
    table_SP: Tensor
    values_offset: int
    scales_offset: int
    entries_per_page: int
    values_SED: Tensor  # float32, what is stored


def packed_pool(
    kind: str, segments: int, entries: int, dim: int, *, entries_per_page: int = 4, seed: int = 0
) -> Pool:
    """``kind``: "main" (E4M3 scales of 16) or "index" (UE8M0 scales of 32)."""
    x = randn(segments, entries, dim, seed=seed)
    if kind == "main":
        values, scales = quantize_fp4_e4m3_ref(x)
        stored = dequantize_fp4_e4m3_ref(values, scales)
    else:
        values, scales = quantize_fp4_e8m0_ref(x)
        stored = dequantize_fp4_e8m0_ref(values, scales)
    draw = generator(seed + 1)
    pages_each = -(-entries // entries_per_page)
    total = segments * pages_each + 2
    values_offset = 24
    scales_offset = values_offset + entries_per_page * values.shape[-1] + 5
    page_bytes = scales_offset + entries_per_page * scales.shape[-1] + 7
    pages = torch.randint(0, 256, (total, page_bytes), generator=draw, dtype=torch.uint8)
    table = torch.randperm(total, generator=draw)[: segments * pages_each].view(segments, pages_each)
    for segment in range(segments):
        for entry in range(entries):
            page = int(table[segment, entry // entries_per_page])
            for offset, source in ((values_offset, values), (scales_offset, scales)):
                row = source[segment, entry]
                start = offset + entry % entries_per_page * len(row)
                pages[page, start : start + len(row)] = row
    return Pool(pages, table, values_offset, scales_offset, entries_per_page, stored)


def packed_windows(rows: int, dim: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Window rows as bytes (rows, D + D / 32), and their float32 values."""
    codes, scales = quantize_fp8_ref(randn(rows, dim, seed=seed))
    return torch.cat([codes, scales], dim=1), dequantize_fp8_ref(codes, scales)
