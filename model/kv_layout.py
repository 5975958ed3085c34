"""Where every byte of a KV block lies. The same bytes are page, message, host slot and SSD record.

One block holds ``block_tokens`` tokens of all planes (KV source layers), plane after plane; inside a plane,
structure of arrays::

    main values | main scales | index values | index scales

A 64-byte header follows the payload, and zeros fill the page up to a multiple of 4096, so that direct I/O
needs no copy. Released model at 128 tokens: 890 bytes a token, 113,920 bytes of payload, pages of 114,688.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import accumulate
from typing import Final

from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerPlan

LAYOUT_VERSION: Final = 1  # goes up when equal bytes would mean something else
HEADER_BYTES: Final = 64
PAGE_MULTIPLE: Final = 4096
WORD_BYTES: Final = 8  # checksums read the payload as 64-bit words

MAIN_GROUP: Final = 16  # E2M1 values under one E4M3 scale
INDEX_GROUP: Final = 32  # E2M1 values under one E8M0 scale
WINDOW_GROUP: Final = 32  # E4M3 values under one E8M0 scale


class EntryFormat(Enum):
    """How cached values are stored."""

    PACKED = "packed"  # FP4 main KV and index keys, FP8 window rows; what serves
    FLOAT32 = "float32"  # plain float32 without scales; for comparisons


@dataclass(frozen=True, slots=True)
class EntrySizes:
    """Bytes of one entry's parts and of one window row's parts; scale sizes are 0 in FLOAT32."""

    main_values: int
    main_scales: int
    index_values: int
    index_scales: int
    window_values: int
    window_scales: int

    @classmethod
    def of(cls, config: ModelConfig, entry_format: EntryFormat) -> "EntrySizes":
        """Sizes for a latent of ``head_dim`` and index keys of ``index_head_dim``."""
        main, index = config.text.head_dim, config.text.index_head_dim
        if entry_format is EntryFormat.FLOAT32:
            return cls(4 * main, 0, 4 * index, 0, 4 * main, 0)
        return cls(
            main // 2, main // MAIN_GROUP, index // 2, index // INDEX_GROUP, main, main // WINDOW_GROUP
        )


@dataclass(frozen=True, slots=True)
class Plane:
    """All entries of one KV source layer in a block. Offsets count from the start of the block.

    Entry ``e`` of a part lies at ``<part>_offset + e * <part>_bytes``.
    """

    layer: int
    ratio: int  # tokens per entry
    entries_per_block: int
    main_values_offset: int
    main_scales_offset: int
    index_values_offset: int
    index_scales_offset: int
    main_values_bytes: int  # of one entry, like the next three
    main_scales_bytes: int
    index_values_bytes: int
    index_scales_bytes: int

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry over all four parts."""
        return (
            self.main_values_bytes
            + self.main_scales_bytes
            + self.index_values_bytes
            + self.index_scales_bytes
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the plane in one block."""
        return self.entries_per_block * self.entry_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Byte layout of blocks and window rows for one config, block size and entry format."""

    block_tokens: int
    entry_format: EntryFormat
    planes: tuple[Plane, ...]
    window_values_bytes: int
    window_scales_bytes: int

    @classmethod
    def of(cls, config: ModelConfig, *, block_tokens: int, entry_format: EntryFormat) -> "KVLayout":
        """Lay out blocks of ``block_tokens`` tokens.

        Raises:
            ValueError: If ``block_tokens`` is not an even number of at least 2; a ratio-2 entry must not
                straddle two blocks.
        """
        if block_tokens < 2 or block_tokens % 2:
            raise ValueError(f"block_tokens must be an even number >= 2, got {block_tokens}")
        sizes = EntrySizes.of(config, entry_format)
        planes = tuple(_planes(LayerPlan.of(config), block_tokens, sizes))
        return cls(block_tokens, entry_format, planes, sizes.window_values, sizes.window_scales)

    @property
    def bytes_per_token(self) -> float:
        """Stored global KV of one token, bytes; exact, since ratios are powers of two."""
        return sum(plane.nbytes for plane in self.planes) / self.block_tokens

    @property
    def payload_bytes(self) -> int:
        """Bytes of all planes, rounded up to whole 64-bit words."""
        return _round_up(sum(plane.nbytes for plane in self.planes), WORD_BYTES)

    @property
    def header_offset(self) -> int:
        """Where the block header starts: right after the payload."""
        return self.payload_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a block with header and padding, a multiple of 4096."""
        return _round_up(self.header_offset + HEADER_BYTES, PAGE_MULTIPLE)

    @property
    def window_row_bytes(self) -> int:
        """Bytes of one token's SWA window row in one layer: values, then scales."""
        return self.window_values_bytes + self.window_scales_bytes

    def plane_of(self, layer: int) -> Plane:
        """The plane that KV source ``layer`` writes.

        Raises:
            KeyError: If the layer is no KV source.
        """
        for plane in self.planes:
            if plane.layer == layer:
                return plane
        raise KeyError(f"layer {layer} writes no plane")

    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever stored bytes would mean something else."""
        document = {
            "version": LAYOUT_VERSION,
            "block_tokens": self.block_tokens,
            "entry_format": self.entry_format.value,
            "header_bytes": HEADER_BYTES,
            "groups": [MAIN_GROUP, INDEX_GROUP, WINDOW_GROUP],
            "planes": [asdict(plane) for plane in self.planes],
            "window_row": [self.window_values_bytes, self.window_scales_bytes],
        }
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")
        return hashlib.blake2b(canonical, digest_size=16, person=b"epd-kv-layout").digest()


def _planes(plan: LayerPlan, block_tokens: int, sizes: EntrySizes) -> Iterator[Plane]:
    parts = (sizes.main_values, sizes.main_scales, sizes.index_values, sizes.index_scales)
    start = 0
    for layer in plan.kv_sources:
        ratio = plan.layers[layer].ratio
        entries = block_tokens // ratio
        offsets = list(accumulate((entries * part for part in parts), initial=start))
        main_values, main_scales, index_values, index_scales, start = offsets
        yield Plane(layer, ratio, entries, main_values, main_scales, index_values, index_scales, *parts)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
