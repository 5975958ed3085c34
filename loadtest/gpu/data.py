"""Random packed tensors of any size, made on the device: every byte is a legal code, magnitudes are near one."""

from __future__ import annotations

import torch
from epdserve.kernels.attention.entries import Selected, Window
from epdserve.kernels.indexer.pages import IndexPages
from epdserve.loadtest.gpu.shapes import Shapes
from torch import Tensor


def fp8_codes(*shape: int, device: str) -> Tensor:
    """E4M3 bytes from 2**-6 to 1.875 in magnitude, both signs."""
    code = torch.randint(0x08, 0x40, shape, dtype=torch.uint8, device=device)
    return code.bitwise_or_(torch.randint(0, 2, shape, dtype=torch.uint8, device=device).mul_(0x80))


def powers(*shape: int, device: str) -> Tensor:
    """UE8M0 bytes of 1/4 .. 2."""
    return torch.randint(125, 129, shape, dtype=torch.uint8, device=device)


def small_powers(*shape: int, inputs: int, device: str) -> Tensor:
    """UE8M0 bytes of a weight whose products over ``inputs`` channels stay near one."""
    middle = 127 - max(0, (inputs.bit_length() - 1) // 2)
    return torch.randint(middle - 1, middle + 1, shape, dtype=torch.uint8, device=device)


def nibbles(*shape: int, device: str) -> Tensor:
    """Packed E2M1, all sixteen codes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def bf16(*shape: int, device: str) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, device=device, dtype=torch.float32).bfloat16()


def windows(shapes: Shapes, counts: list[int], device: str) -> Window:
    """Packed window rows: consecutive rows of a segment share theirs, segments share none."""
    first, indices, total = shapes.window - 1, [], 0
    reach = torch.arange(-first, 1, device=device)
    for count in counts:
        place = torch.arange(count, device=device)[:, None] + reach
        indices.append(place + (total + first))
        total += first + count
    codes = fp8_codes(total, shapes.latent, device=device)
    scales = powers(total, shapes.latent // 32, device=device)
    return Window(torch.cat([codes, scales], dim=1), torch.cat(indices))


def page_table(segments: int, entries: int, shapes: Shapes, device: str) -> Tensor:
    """Pages of each segment, in random order over the pool."""
    pages = -(-entries // shapes.entries_per_page)
    return torch.randperm(segments * pages, device=device).view(segments, pages)


def index_pages(shapes: Shapes, segments: int, entries: int, device: str) -> IndexPages:
    """Index keys of every segment in pages of their own; only index parts, so that a million entries fit often."""
    table = page_table(segments, entries, shapes, device)
    per_page, values = shapes.entries_per_page, shapes.entries_per_page * shapes.index_dim // 2
    scales = per_page * shapes.index_dim // 32
    pages = torch.empty(table.numel(), values + scales, dtype=torch.uint8, device=device)
    pages[:, :values].random_(0, 256)
    pages[:, values:].random_(125, 129)
    return IndexPages(pages, table, 0, values, per_page)


def selected(shapes: Shapes, segment_T: Tensor, entries: int, chosen: int) -> Selected:
    """Main KV of every segment, and a random choice of ``chosen`` entries a row, ascending."""
    device = str(segment_T.device)
    segments = int(segment_T.max()) + 1
    table = page_table(segments, entries, shapes, device)
    per_page = shapes.entries_per_page
    values, scales = per_page * shapes.latent // 2, per_page * shapes.latent // 16
    pages = torch.empty(table.numel(), values + scales, dtype=torch.uint8, device=device)
    pages[:, :values].random_(0, 256)
    pages[:, values:].random_(0x28, 0x38)  # E4M3: 1/4 .. 0.94
    picks = torch.randint(0, entries, (len(segment_T), chosen), device=device).sort(dim=1).values
    return Selected(pages, table, segment_T, picks, 0, values, per_page)
