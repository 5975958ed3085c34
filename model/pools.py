"""Device memory of a worker: pages of global KV, and state slots for what only a running request needs.

A state slot holds the sliding window of every layer and the open pair of every ratio-2 source. Positions decide what
in it is valid, so a slot needs no clearing between requests.
"""

import contextlib
import math
import mmap

import torch
from epdserve.kernels.cache_ops import gather_rows, scatter_rows
from epdserve.model.config import ModelConfig
from epdserve.model.kv_layout import KVLayout, Plane

_PAGE_ALIGNMENT = 4096  # direct I/O and registration want whole memory pages


class PlanePages:
    """Entries of one KV source, wherever its pages lie. Bytes only: see entry_codec for what they mean.

    A scale part has no bytes where the entry format has no scales.
    """

    def __init__(self, pages_PB: torch.Tensor, plane: Plane) -> None:
        self.pages_PB, self.plane = pages_PB, plane
        self.entries_per_page = plane.entries_per_block

    def read_main(self, page: torch.Tensor, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of main KV, (..., bytes) uint8, for any integer shape."""
        plane = self.plane
        return (
            self._read(page, entry, plane.main_values_offset, plane.main_values_bytes),
            self._read(page, entry, plane.main_scales_offset, plane.main_scales_bytes),
        )

    def read_index(self, page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of all indexer keys of whole pages, (..., entries, bytes) uint8: one run a page."""
        plane, first, entries = self.plane, torch.zeros_like(page), self.entries_per_page
        values = self._read(page, first, plane.index_values_offset, plane.index_values_bytes * entries)
        scales = self._read(page, first, plane.index_scales_offset, plane.index_scales_bytes * entries)
        return values.unflatten(-1, (entries, -1)), scales.unflatten(-1, (entries, plane.index_scales_bytes))

    def write(
        self,
        page_N: torch.Tensor,
        entry_N: torch.Tensor,
        main: tuple[torch.Tensor, torch.Tensor],
        index: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Store (values, scales) of N entries' main KV and indexer keys."""
        plane = self.plane
        for offset, rows_NB in (
            (plane.main_values_offset, main[0]),
            (plane.main_scales_offset, main[1]),
            (plane.index_values_offset, index[0]),
            (plane.index_scales_offset, index[1]),
        ):
            if rows_NB.shape[1]:
                scatter_rows(self.pages_PB, page_N, offset + entry_N * rows_NB.shape[1], rows_NB)

    def _read(self, page: torch.Tensor, entry: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return self.pages_PB.new_empty(*page.shape, 0)
        return gather_rows(self.pages_PB, page, offset + entry * nbytes, nbytes)


class KVPools:
    """Pages and state slots. Owned by one step loop; page bytes may be written by a transfer meanwhile.

    Attributes:
        pages: (num_pages, page_bytes) uint8, aligned to 4096 bytes.
        planes: By KV source layer, the entries inside ``pages``.
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
        self.planes = {plane.layer: PlanePages(self.pages, plane) for plane in layout.planes}
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


def aligned_bytes(shape: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
    """Zeroed uint8 tensor whose first byte lies on a 4096-byte boundary.

    Host memory is asked for in huge pages: another process's reads of it are several times faster (kvstore/README.md).
    """
    nbytes = math.prod(shape)
    if torch.device(device).type == "cpu" and nbytes:
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8).view(shape)
    raw = torch.zeros(nbytes + _PAGE_ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % _PAGE_ALIGNMENT
    return raw[skip : skip + nbytes].view(shape)
