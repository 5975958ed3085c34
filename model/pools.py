"""Device memory of a worker: pages of global KV, and state slots for what only a running request needs.

A state slot holds the sliding window of every layer and the open pair of every ratio-2 source. Positions decide what
in it is valid, so a slot needs no clearing between requests.
"""

import math
from dataclasses import dataclass

import torch
from epdserve.model.config import ModelConfig
from epdserve.model.kv_layout import KVLayout, Plane

_PAGE_ALIGNMENT = 4096  # direct I/O and registration want whole memory pages


@dataclass(frozen=True, slots=True)
class PlaneView:
    """Entries of one KV source as views into the pages: (pages, entries, bytes) uint8."""

    main_values: torch.Tensor
    main_scales: torch.Tensor
    index_values: torch.Tensor
    index_scales: torch.Tensor
    entries_per_page: int


class KVPools:
    """Pages and state slots. Owned by one step loop; page bytes may be written by a transfer meanwhile.

    Attributes:
        pages: (num_pages, page_bytes) uint8, aligned to 4096 bytes.
        planes: By KV source layer, views into ``pages``.
        windows: By layer, (num_slots, window, row bytes) uint8; position p lies in ring row p % window.
        open_pairs: By ratio-2 source layer, (num_slots, 2, D) float32: content and gate of the last even token.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: KVLayout,
        *,
        num_pages: int,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages <= 0 or num_slots <= 0:
            raise ValueError(f"empty pools: {num_pages} pages, {num_slots} slots")
        self.layout, self.num_pages, self.num_slots = layout, num_pages, num_slots
        self.pages = aligned_bytes((num_pages, layout.page_bytes), device)
        self.planes = {plane.layer: self._view(plane) for plane in layout.planes}
        layers, window = config.text.num_hidden_layers, config.text.sliding_window
        self._window_store = aligned_bytes((layers, num_slots, window, layout.window_row_bytes), device)
        self.windows = tuple(self._window_store)
        sources = [plane.layer for plane in layout.planes if plane.ratio == 2]
        self._pair_store = torch.zeros(len(sources), num_slots, 2, config.text.head_dim, device=device)
        self.open_pairs = dict(zip(sources, self._pair_store, strict=True))

    def slot_windows(self, slot: int) -> torch.Tensor:
        """(layers, window, row bytes) uint8 view of one slot."""
        return self._window_store[:, slot]

    def slot_pairs(self, slot: int) -> torch.Tensor:
        """(ratio-2 sources, 2, D) float32 view of one slot."""
        return self._pair_store[:, slot]

    def _view(self, plane: Plane) -> PlaneView:
        def part(offset: int, nbytes: int) -> torch.Tensor:
            size = (self.num_pages, plane.entries_per_block, nbytes)
            stride = (self.layout.page_bytes, max(nbytes, 1), 1)
            return self.pages.as_strided(size, stride, self.pages.storage_offset() + offset)

        return PlaneView(
            part(plane.main_values_offset, plane.main_values_bytes),
            part(plane.main_scales_offset, plane.main_scales_bytes),
            part(plane.index_values_offset, plane.index_values_bytes),
            part(plane.index_scales_offset, plane.index_scales_bytes),
            plane.entries_per_block,
        )


def aligned_bytes(shape: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
    """Zeroed uint8 tensor whose first byte lies on a 4096-byte boundary."""
    nbytes = math.prod(shape)
    raw = torch.zeros(nbytes + _PAGE_ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % _PAGE_ALIGNMENT
    return raw[skip : skip + nbytes].view(shape)
