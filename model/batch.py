"""What one forward step needs: rows of many requests, ragged, over pages and state slots.

Rows of all segments stand one after another. Layers up to the cut see every row; layers above it see the kept rows
(``decoder_from``). All index arithmetic is done here once a step, so that a layer only gathers and multiplies.

S segments, T rows, W window, R ring rows of a state slot (= W), P pages of the longest segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from epdserve.kernels.launch import queued_copy
from epdserve.kernels.rope import rotations

NGRAM_CONTEXT = 4  # own token and three before it (config: engram_max_ngram_size)

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Rotation = tuple[torch.Tensor, torch.Tensor]


class Outputs(Enum):
    """Which rows of a segment leave the model."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Embeddings of an image: row i stands at position ``start + i`` instead of the token's own."""

    start: int
    embeddings_ND: torch.Tensor  # (tokens, hidden), any float type

    @property
    def end(self) -> int:
        """First position after the span."""
        return self.start + len(self.embeddings_ND)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one request.

    ``tokens`` holds the request's ids from position 0 up to at least ``start + count``. ``pages`` cover every entry
    that the rows write or may see. Floors and ``decoder_from`` are absolute positions (model/replay.py).
    """

    tokens: IntArray
    start: int
    count: int
    pages: Sequence[int]
    slot: int
    encoder_floor: int = 0
    decoder_from: int = 0
    decoder_floor: int = 0
    publish_from: int = 0
    outputs: Outputs = Outputs.LAST
    images: Sequence[ImageSpan] = ()

    def __post_init__(self) -> None:
        if self.count <= 0 or self.start < 0 or len(self.tokens) < self.start + self.count:
            raise ValueError(f"segment of {self.count} rows at {self.start} over {len(self.tokens)} tokens")


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Segments with equal row counts, so that scoring is one batched product: rows [S', Q], segments [S']."""

    rows_SQ: torch.Tensor
    segments_S: torch.Tensor
    max_position: int


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The rows a set of layers runs on."""

    rows_T: torch.Tensor  # indices into all rows of the batch
    positions_T: torch.Tensor
    segments_T: torch.Tensor
    is_image_T: torch.Tensor
    groups: tuple[RowGroup, ...]
    window_rotation: Rotation  # layers without a compressed cache
    compressed_rotation: Rotation  # layers with one
    max_position: int
    counts: tuple[int, ...]  # rows of each segment, 0 for some
    tiles_R3: torch.Tensor | None = None  # runs of rows as the score kernel takes them, if they are at hand

    def __len__(self) -> int:
        return len(self.rows_T)


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Window keys of each query, as indices into [S * R ring rows | new rows], and the ring rows to write after."""

    index_TW: torch.Tensor
    valid_TW: torch.Tensor
    write_rows_N: torch.Tensor
    write_places_N: torch.Tensor  # ring rows of all slots, one after another
    pool_TW: torch.Tensor | None = (
        None  # the same keys as ring rows of all slots, -1 = none, where no row that a
    )
    # query sees is overwritten: at most one row a segment. They can be written first and read where they lie.


@dataclass(frozen=True, slots=True)
class EntryPlan:
    """Rows whose group of ``ratio`` tokens closes in this step, and where their entries go."""

    closing_N: torch.Tensor  # row that closes the group
    opening_N: torch.Tensor  # row that opened it; meaningless where a slot keeps it
    opened_in_N: torch.Tensor  # slot that keeps it, where the group was opened in an earlier step; else -1
    pages_N: torch.Tensor
    entries_N: torch.Tensor  # index inside the page
    rotation: Rotation  # at the first token of the group
    store_rows_M: torch.Tensor  # rows that leave a group open
    store_slots_M: torch.Tensor


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Rows whose embedding comes from an image: indices into all rows, and the values."""

    rows_N: torch.Tensor
    values_ND: torch.Tensor


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The model's numbers that index arithmetic needs."""

    window: int
    block_tokens: int
    ratios: tuple[int, ...]  # of the KV sources, without duplicates
    image_token_id: int
    window_inv_freq: torch.Tensor
    compressed_inv_freq: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step. Immutable; built on the host, then moved to the device once."""

    token_ids_T: torch.Tensor
    context_T4: torch.Tensor  # raw ids at p, p-1, p-2, p-3; -1 before the start
    slots_S: torch.Tensor
    page_table_SP: torch.Tensor
    all_rows: QueryRows
    kept_rows: QueryRows
    encoder_window: WindowPlan  # all rows over all rows
    cut_window: WindowPlan  # kept rows over all rows
    decoder_window: WindowPlan  # kept rows over kept rows
    entries: dict[int, EntryPlan]  # by ratio
    output_rows_R: torch.Tensor  # indices into the kept rows
    embedded: EmbeddedRows | None = None

    @staticmethod
    def build(
        segments: Sequence[Segment], shape: BatchShape, device: torch.device | str = "cpu"
    ) -> "ForwardBatch":
        """Lay out ``segments`` in the given order.

        Raises:
            ValueError: No segment, an output row that the decoder does not run, or pages that do not cover the rows.
        """
        return _Builder(segments, shape, torch.device(device)).build()


class _Builder:
    """Index arithmetic in NumPy; one tensor a field at the end."""

    def __init__(self, segments: Sequence[Segment], shape: BatchShape, device: torch.device) -> None:
        if not segments:
            raise ValueError("a batch needs at least one segment")
        self.segments, self.shape, self.device = segments, shape, device
        self.start_S = np.array([s.start for s in segments], dtype=np.int64)
        self.count_S = np.array([s.count for s in segments], dtype=np.int64)
        self.slot_S = np.array([s.slot for s in segments], dtype=np.int64)
        for s in segments:
            if len(s.pages) * shape.block_tokens < s.start + s.count:
                raise ValueError(f"{len(s.pages)} pages do not cover {s.start + s.count} tokens")
        self.offset_S = np.cumsum(self.count_S) - self.count_S
        self.segment_T = np.repeat(np.arange(len(segments)), self.count_S)
        self.position_T = np.arange(len(self.segment_T)) - (self.offset_S - self.start_S)[self.segment_T]

    def build(self) -> ForwardBatch:
        tokens_T, context_T4 = self._tokens()
        is_image_T = tokens_T == self.shape.image_token_id
        table_SP = self._page_table()
        decoder_from_S = np.array([s.decoder_from for s in self.segments])
        every_T = np.arange(len(tokens_T))
        kept_T = np.flatnonzero(self.position_T >= decoder_from_S[self.segment_T])
        all_rows = self._query_rows(every_T, is_image_T)
        encoder_floor_S = np.array([s.encoder_floor for s in self.segments])
        decoder_floor_S = np.array([s.decoder_floor for s in self.segments])
        encoder_window = self._window(every_T, every_T, encoder_floor_S)
        if len(kept_T) == len(every_T) and np.array_equal(encoder_floor_S, decoder_floor_S):
            kept_rows, cut_window, decoder_window = all_rows, encoder_window, encoder_window
        else:
            kept_rows = self._query_rows(kept_T, is_image_T)
            cut_window = self._window(kept_T, every_T, encoder_floor_S)
            decoder_window = self._window(kept_T, kept_T, decoder_floor_S)
        return ForwardBatch(
            token_ids_T=self._tensor(tokens_T),
            context_T4=self._tensor(context_T4),
            slots_S=self._tensor(self.slot_S),
            page_table_SP=self._tensor(table_SP),
            all_rows=all_rows,
            kept_rows=kept_rows,
            encoder_window=encoder_window,
            cut_window=cut_window,
            decoder_window=decoder_window,
            entries={ratio: self._entries(ratio, table_SP) for ratio in self.shape.ratios},
            output_rows_R=self._tensor(self._outputs(kept_T)),
            embedded=self._embedded(),
        )

    def _embedded(self) -> EmbeddedRows | None:
        rows, values = [], []
        for s, offset in zip(self.segments, self.offset_S, strict=True):
            for image in s.images:
                begin, end = max(image.start, s.start), min(image.end, s.start + s.count)
                if begin < end:
                    rows.append(np.arange(begin, end) + (offset - s.start))
                    values.append(image.embeddings_ND[begin - image.start : end - image.start])
        if not rows:
            return None
        return EmbeddedRows(self._tensor(np.concatenate(rows)), queued_copy(torch.cat(values), self.device))

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.int64 | np.bool_]]) -> torch.Tensor:
        return queued_copy(torch.from_numpy(np.ascontiguousarray(array)), self.device)

    def _tokens(self) -> tuple[IntArray, IntArray]:
        contexts = []
        for s in self.segments:
            before = s.tokens[max(0, s.start - NGRAM_CONTEXT + 1) : s.start + s.count]
            padded = np.full(s.count + NGRAM_CONTEXT - 1, -1, dtype=np.int64)
            padded[len(padded) - len(before) :] = before
            contexts.append(np.lib.stride_tricks.sliding_window_view(padded, NGRAM_CONTEXT)[:, ::-1])
        context_T4 = np.concatenate(contexts)
        return context_T4[:, 0], context_T4

    def _page_table(self) -> IntArray:
        needed = [-(-(s.start + s.count) // self.shape.block_tokens) for s in self.segments]
        table_SP = np.zeros((len(self.segments), max(needed)), dtype=np.int64)
        for row, s, pages in zip(table_SP, self.segments, needed, strict=True):
            row[:pages] = s.pages[:pages]
        return table_SP

    def _query_rows(
        self, rows_T: IntArray, is_image_T: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    ) -> QueryRows:
        positions = self._tensor(self.position_T[rows_T])
        segment_T = self.segment_T[rows_T]
        count_S = np.bincount(segment_T, minlength=len(self.segments))
        offset_S = np.cumsum(count_S) - count_S
        groups = []
        for count in np.unique(count_S[count_S > 0]):
            members = np.flatnonzero(count_S == count)
            rows_SQ = offset_S[members][:, None] + np.arange(count)
            last = int(self.position_T[rows_T[rows_SQ[:, -1]]].max())
            groups.append(RowGroup(self._tensor(rows_SQ), self._tensor(members), last))
        return QueryRows(
            rows_T=self._tensor(rows_T),
            positions_T=positions,
            segments_T=self._tensor(segment_T),
            is_image_T=self._tensor(is_image_T[rows_T]),
            groups=tuple(groups),
            window_rotation=rotations(positions, self.shape.window_inv_freq),
            compressed_rotation=rotations(positions, self.shape.compressed_inv_freq),
            max_position=int(self.position_T[rows_T].max(initial=-1)),
            counts=tuple(count_S.tolist()),
        )

    def _window(self, queries_T: IntArray, keys_K: IntArray, floor_S: IntArray) -> WindowPlan:
        window = self.shape.window
        key_segment_K = self.segment_T[keys_K]
        key_count_S = np.bincount(key_segment_K, minlength=len(self.segments))
        key_offset_S = np.cumsum(key_count_S) - key_count_S
        first_S = self.start_S + self.count_S - key_count_S  # kept keys are a suffix of the segment
        segment_T = self.segment_T[queries_T]
        target_TW = self.position_T[queries_T][:, None] + np.arange(1 - window, 1)
        valid_TW = target_TW >= np.maximum(floor_S, 0)[segment_T][:, None]
        is_new_TW = target_TW >= first_S[segment_T][:, None]
        new_base_S = len(self.segments) * window + key_offset_S - first_S
        index_TW = np.where(
            is_new_TW,
            target_TW + new_base_S[segment_T][:, None],
            target_TW % window + (segment_T * window)[:, None],
        )
        last_K = (key_offset_S + key_count_S)[key_segment_K] - np.arange(len(keys_K)) <= window
        write_N = np.flatnonzero(last_K)
        pool_TW = None
        if key_count_S.max(initial=0) <= 1:
            ring_TW = target_TW % window + (self.slot_S[segment_T] * window)[:, None]
            pool_TW = self._tensor(np.where(valid_TW, ring_TW, -1))
        return WindowPlan(
            index_TW=self._tensor(np.where(valid_TW, index_TW, 0)),
            valid_TW=self._tensor(valid_TW),
            write_rows_N=self._tensor(write_N),
            write_places_N=self._tensor(
                self.slot_S[key_segment_K[write_N]] * window + self.position_T[keys_K[write_N]] % window
            ),
            pool_TW=pool_TW,
        )

    def _entries(self, ratio: int, table_SP: IntArray) -> EntryPlan:
        publish_from_S = np.array([s.publish_from for s in self.segments])
        closes_T = (self.position_T + 1) % ratio == 0
        closing_N = np.flatnonzero(closes_T & (self.position_T >= publish_from_S[self.segment_T]))
        segment_N = self.segment_T[closing_N]
        first_token_N = self.position_T[closing_N] - ratio + 1
        entry_N = first_token_N // ratio
        per_page = self.shape.block_tokens // ratio
        last_S = self.offset_S + self.count_S - 1
        open_S = np.flatnonzero((self.position_T[last_S] + 1) % ratio != 0)
        return EntryPlan(
            closing_N=self._tensor(closing_N),
            opening_N=self._tensor(np.maximum(closing_N - ratio + 1, 0)),
            opened_in_N=self._tensor(
                np.where(first_token_N < self.start_S[segment_N], self.slot_S[segment_N], -1)
            ),
            pages_N=self._tensor(table_SP[segment_N, entry_N // per_page]),
            entries_N=self._tensor(entry_N % per_page),
            rotation=rotations(self._tensor(first_token_N), self.shape.compressed_inv_freq),
            store_rows_M=self._tensor(last_S[open_S]),
            store_slots_M=self._tensor(self.slot_S[open_S]),
        )

    def _outputs(self, kept_T: IntArray) -> IntArray:
        wanted = []
        for i, s in enumerate(self.segments):
            if s.outputs is Outputs.NONE:
                continue
            first, count = int(self.offset_S[i]), s.count
            rows = (
                np.arange(first, first + count) if s.outputs is Outputs.ALL else np.array([first + count - 1])
            )
            if self.position_T[rows[0]] < s.decoder_from:
                raise ValueError(
                    f"output at {self.position_T[rows[0]]} before the decoder's first row {s.decoder_from}"
                )
            wanted.append(rows)
        rows = np.concatenate(wanted) if wanted else np.zeros(0, dtype=np.int64)
        return np.searchsorted(kept_T, rows)
