"""A decode step in buffers that stay where they are, so that a captured graph can run it again.

One row of each request; rows that nobody uses have slot -1, and write and see nothing. The host writes a few integers a
row and the page table; every index tensor of ``ForwardBatch`` is derived from them on the device, with shapes that
depend on the buffers' sizes alone.
"""

from collections.abc import Sequence
from typing import Final

import torch
from epdserve.kernels.rope import rotations
from epdserve.model.batch import (
    NGRAM_CONTEXT,
    BatchShape,
    EntryPlan,
    ForwardBatch,
    Outputs,
    QueryRows,
    Segment,
    WindowPlan,
)

_SLOT, _POSITION, _ENCODER_FLOOR, _DECODER_FLOOR, _PUBLISH_FROM = range(NGRAM_CONTEXT, NGRAM_CONTEXT + 5)
_COLUMNS: Final = NGRAM_CONTEXT + 5  # after the ids at p, p-1, p-2, p-3


class _Host:
    """Integers of one step in host memory, and whose pages its table holds."""

    def __init__(self, rows: int, pages: int, *, pinned: bool) -> None:
        self.flat = torch.zeros(rows * (_COLUMNS + pages), dtype=torch.int64, pin_memory=pinned)
        array = self.flat.numpy()
        # The table first: kernels get it as it is, and compile for the alignment of an address.
        self.table_SP = array[: rows * pages].reshape(rows, pages)
        self.columns_CT = array[rows * pages :].reshape(_COLUMNS, rows)
        self.held: list[list[int]] = [[] for _ in range(rows)]
        self._copied = torch.cuda.Event() if pinned else None
        self.clear(0)

    def wait(self) -> None:
        """Until the device has read what was written last; long since, but for steps whose results nobody reads."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to(self, flat: torch.Tensor) -> None:
        """Queue the copy to the device."""
        flat.copy_(self.flat, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def clear(self, first: int) -> None:
        """Rows from ``first`` on belong to nobody."""
        self.columns_CT[:, first:] = -1
        self.columns_CT[0, first:] = 0  # a token id that is looked up and thrown away
        self.columns_CT[_ENCODER_FLOOR:, first:] = 0

    def put(self, row: int, segment: Segment, block_tokens: int, *, start: int, token_known: bool) -> None:
        """One request's row at ``start``; without its token, which comes later."""
        column = self.columns_CT[:, row]
        seen = segment.tokens[max(0, start - NGRAM_CONTEXT + 1) : start + token_known][::-1]
        column[:NGRAM_CONTEXT] = -1
        first = 0 if token_known else 1
        column[first : first + len(seen)] = seen
        column[_SLOT], column[_POSITION] = segment.slot, start
        column[_ENCODER_FLOOR], column[_DECODER_FLOOR] = segment.encoder_floor, segment.decoder_floor
        column[_PUBLISH_FROM] = segment.publish_from
        self._put_pages(row, segment.pages, -(-(start + 1) // block_tokens))

    def _put_pages(self, row: int, pages: Sequence[int], count: int) -> None:
        """Most of a long table is there since the last step, or since ``prepare_next``."""
        wanted, held = list(pages[:count]), self.held[row]
        if wanted == held:
            return
        if wanted[: len(held)] != held:
            held = []
        self.table_SP[row, len(held) : len(wanted)] = wanted[len(held) :]
        self.held[row] = wanted


class DecodeRows:
    """Buffers for steps of at most ``rows`` requests whose contexts fit ``pages`` pages. Not thread-safe."""

    def __init__(self, shape: BatchShape, rows: int, pages: int, device: torch.device) -> None:
        if rows <= 0 or pages <= 0:
            raise ValueError(f"empty buffers: {rows} rows, {pages} pages")
        self.shape, self.rows, self.pages, self.device = shape, rows, pages, device
        pinned = device.type == "cuda"
        self._hosts = [
            _Host(rows, pages, pinned=pinned) for _ in range(2)
        ]  # one is read while the other is written
        self._flat = torch.zeros_like(self._hosts[0].flat, device=device)
        tiles = [(row, 1, row) for row in range(rows)]
        self._tiles_R3 = torch.tensor(tiles, dtype=torch.int32, device=device)
        self._row_T = torch.arange(rows, device=device)

    def takes(self, segments: Sequence[Segment]) -> bool:
        """Whether these are decode rows that fit."""
        room = self.pages * self.shape.block_tokens
        return len(segments) <= self.rows and all(
            s.count == 1
            and s.start < room
            and s.outputs is not Outputs.NONE
            and s.decoder_from <= s.start
            and not any(image.start <= s.start < image.end for image in s.images)
            for s in segments
        )

    def fill(self, segments: Sequence[Segment]) -> None:
        """Lay out the next step. Little is left to write where ``prepare_next`` foresaw the rows.

        Raises:
            ValueError: Segments that these buffers do not take, or whose pages do not cover their row.
        """
        if not self.takes(segments):
            raise ValueError(
                f"buffers of {self.rows} rows and {self.pages} pages do not take {len(segments)} segments"
            )
        host = self._hosts[0]
        host.wait()
        for row, s in enumerate(segments):
            if s.start >= len(s.pages) * self.shape.block_tokens:
                raise ValueError(f"{len(s.pages)} pages do not cover {s.start + 1} tokens")
            host.put(row, s, self.shape.block_tokens, start=s.start, token_known=True)
        host.clear(len(segments))
        self._hosts.reverse()
        host.copy_to(self._flat)

    def prepare_next(self, segments: Sequence[Segment]) -> None:
        """Write what is known of the step after this one, while this one runs: pages above all, not the tokens.

        A guess: that the same requests go on. ``fill`` writes whatever came otherwise.
        """
        host = self._hosts[0]
        host.wait()
        for row, s in enumerate(segments):
            if (s.start + 1) < min(len(s.pages), self.pages) * self.shape.block_tokens:
                host.put(row, s, self.shape.block_tokens, start=s.start + 1, token_known=False)

    def batch(self) -> ForwardBatch:
        """Index tensors of what was filled in; nothing here waits, and a graph may hold it."""
        shape, rows = self.shape, self.rows
        table_SP = self._flat[: rows * self.pages].view(rows, self.pages)
        columns_CT = self._flat[rows * self.pages :].view(_COLUMNS, rows)
        position_T, slot_T = columns_CT[_POSITION], columns_CT[_SLOT]
        query = QueryRows(
            rows_T=self._row_T,
            positions_T=position_T,
            segments_T=self._row_T,
            is_image_T=columns_CT[0] == shape.image_token_id,
            groups=(),  # of the wide way
            window_rotation=rotations(position_T, shape.window_inv_freq),
            compressed_rotation=rotations(position_T, shape.compressed_inv_freq),
            max_position=self.pages * shape.block_tokens - 1,
            counts=(1,) * rows,
            tiles_R3=self._tiles_R3,
        )
        encoder = self._window(position_T, slot_T, columns_CT[_ENCODER_FLOOR])
        return ForwardBatch(
            token_ids_T=columns_CT[0],
            context_T4=columns_CT[:NGRAM_CONTEXT].t().contiguous(),
            slots_S=slot_T,
            page_table_SP=table_SP,
            all_rows=query,
            kept_rows=query,
            encoder_window=encoder,
            cut_window=encoder,
            decoder_window=self._window(position_T, slot_T, columns_CT[_DECODER_FLOOR]),
            entries={ratio: self._entries(ratio, columns_CT, table_SP) for ratio in shape.ratios},
            output_rows_R=self._row_T,
        )

    def _window(self, position_T: torch.Tensor, slot_T: torch.Tensor, floor_T: torch.Tensor) -> WindowPlan:
        window = self.shape.window
        live_T = slot_T >= 0
        target_TW = position_T[:, None] + torch.arange(1 - window, 1, device=self.device)
        valid_TW = (target_TW >= floor_T.clamp_min(0)[:, None]) & live_T[:, None]
        pool_TW = torch.where(valid_TW, slot_T[:, None] * window + target_TW % window, -1)
        return WindowPlan(
            index_TW=pool_TW,
            valid_TW=valid_TW,
            write_rows_N=self._row_T,
            write_places_N=torch.where(live_T, slot_T * window + position_T % window, -1),
            pool_TW=pool_TW,
        )

    def _entries(self, ratio: int, columns_CT: torch.Tensor, table_SP: torch.Tensor) -> EntryPlan:
        """A place for each row; rows that close no group have page -1, rows that leave none open have slot -1."""
        position_T, slot_T = columns_CT[_POSITION], columns_CT[_SLOT]
        ends_T, live_T = (position_T + 1) % ratio == 0, slot_T >= 0
        closes_T = ends_T & live_T & (position_T >= columns_CT[_PUBLISH_FROM])
        first_T = (position_T - ratio + 1).clamp_min(0)
        entry_T, per_page = first_T // ratio, self.shape.block_tokens // ratio
        page_T = table_SP.gather(1, (entry_T // per_page)[:, None])[:, 0]
        return EntryPlan(
            closing_N=self._row_T,
            opening_N=self._row_T,
            opened_in_N=torch.where(closes_T, slot_T, -1),
            pages_N=torch.where(closes_T, page_T, -1),
            entries_N=entry_T % per_page,
            rotation=rotations(first_T, self.shape.compressed_inv_freq),
            store_rows_M=self._row_T,
            store_slots_M=torch.where(live_T & ~ends_T, slot_T, -1),
        )
