"""The tail record: what resumes a request exactly where it stopped, beside its full blocks.

Layout, version 1. Little-endian; sections have fixed sizes, so a record is one transfer and one staging slot::

    windows     (layers, window, row bytes)   ring order: position p lies in row p % window
    open pairs  (ratio-2 sources, 2, D) f32   content and gate of the last even token
    open block  payload of the block that is not full yet
    exit        (hidden,) f32                 exit vector of the last row; zeros without one
    last ids    (3,) i64                      token ids before the next position, -1 before the start
    header      64 bytes at the end of the record, below

offset  size  field          why
0       4     magic "EPKT"
4       2     version
6       2     flags          bit 0: an exit vector is present; bit 1: exact (no encoder replay upstream)
8       16    identity       hash of the token prefix it belongs to: a checksum proves bytes, not identity
24      8     checksum       odd-weighted 64-bit sum over the sections, seeded with length and identity
32      8     tokens         positions [0, tokens) are covered by the full blocks and this record
40      8     payload_bytes
48      16    layout         fingerprint of the block layout
"""

import struct
from dataclasses import dataclass
from typing import Final

import torch
from epdserve.kernels.checksum import page_checksums
from epdserve.model.batch import NGRAM_CONTEXT, IntArray
from epdserve.model.config import ModelConfig
from epdserve.model.errors import TailError
from epdserve.model.kv_layout import KVLayout
from epdserve.model.pools import KVPools

TAIL_VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sHH16sQQQ16s")
_MAGIC: Final = b"EPKT"
_HAS_EXIT: Final = 1
_EXACT: Final = 2
_ALIGNMENT: Final = 4096


@dataclass(frozen=True, slots=True)
class TailLayout:
    """Sizes and offsets of a tail record in bytes."""

    windows_bytes: int
    pairs_bytes: int
    open_block_bytes: int
    exit_bytes: int
    ids_bytes: int
    block_tokens: int
    fingerprint: bytes

    @staticmethod
    def of(config: ModelConfig, layout: KVLayout) -> "TailLayout":
        """Layout of the tails that go with blocks of ``layout``."""
        text = config.text
        ratio2 = sum(plane.ratio == 2 for plane in layout.planes)
        return TailLayout(
            windows_bytes=text.num_hidden_layers * text.sliding_window * layout.window_row_bytes,
            pairs_bytes=ratio2 * 2 * text.head_dim * 4,
            open_block_bytes=layout.payload_bytes,
            exit_bytes=text.hidden_size * 4,
            ids_bytes=(NGRAM_CONTEXT - 1) * 8,
            block_tokens=layout.block_tokens,
            fingerprint=layout.fingerprint(),
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes that the checksum covers, a multiple of 8."""
        used = (
            self.windows_bytes + self.pairs_bytes + self.open_block_bytes + self.exit_bytes + self.ids_bytes
        )
        return -(-used // 8) * 8

    @property
    def nbytes(self) -> int:
        """Bytes of a record, a multiple of 4096."""
        return -(-(self.payload_bytes + _HEADER.size) // _ALIGNMENT) * _ALIGNMENT

    def sections(self, record_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of windows, open pairs, open block, exit vector and last ids, each 1-D uint8."""
        sizes = (self.windows_bytes, self.pairs_bytes, self.open_block_bytes, self.exit_bytes, self.ids_bytes)
        return tuple(record_B[: sum(sizes)].split(sizes))


def write_tail(
    record_B: torch.Tensor,
    layout: TailLayout,
    pools: KVPools,
    *,
    slot: int,
    page: int | None,
    tokens: IntArray,
    exit_D: torch.Tensor | None,
    identity: bytes,
    exact: bool,
) -> int:
    """Write the record of a request whose KV covers exactly ``tokens``; returns the checksum.

    Args:
        record_B: (layout.nbytes,) uint8, host or device.
        page: Page of the open block, None when the last block is full.
        tokens: All ids so far, int64.
        exit_D: (hidden,) float32 exit vector of the last row, None to leave it out.
        identity: 16 bytes, hash of the prefix.
        exact: No encoder replay is upstream of it.
    """
    record_B.zero_()
    windows, pairs, open_block, exit_part, ids = layout.sections(record_B)
    windows.copy_(pools.slot_windows(slot).reshape(-1))
    pairs.copy_(pools.slot_pairs(slot).reshape(-1).view(torch.uint8))
    if page is not None:
        open_block.copy_(pools.pages[page, : layout.open_block_bytes])
    if exit_D is not None:
        exit_part.copy_(exit_D.float().contiguous().view(torch.uint8))
    last = torch.full((NGRAM_CONTEXT - 1,), -1, dtype=torch.int64)
    known = torch.from_numpy(tokens[-(NGRAM_CONTEXT - 1) :].astype("int64"))
    last[len(last) - len(known) :] = known
    ids.copy_(last.view(torch.uint8))
    checksum = tail_checksum(record_B, layout, identity)
    header = _header(
        layout,
        tokens=len(tokens),
        identity=identity,
        checksum=checksum,
        has_exit=exit_D is not None,
        exact=exact,
    )
    at = layout.payload_bytes
    record_B[at : at + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return checksum


def read_tail(
    record_B: torch.Tensor,
    layout: TailLayout,
    pools: KVPools,
    *,
    slot: int,
    page: int | None,
    tokens: IntArray,
    identity: bytes,
    checksum: int,
    has_exit: bool,
    exact: bool,
) -> torch.Tensor | None:
    """Verify a record and restore a request from it; returns the exit vector (hidden,) float32 if promised.

    Nothing is written before everything is verified.

    Raises:
        TailError: The bytes, the identity, the token count, the last ids or the layout are not the expected ones.
    """
    at = layout.payload_bytes
    expected = _header(
        layout, tokens=len(tokens), identity=identity, checksum=checksum, has_exit=has_exit, exact=exact
    )
    if bytes(record_B[at : at + _HEADER.size].tolist()) != expected:
        raise TailError("the record's header is not the promised one")
    if tail_checksum(record_B, layout, identity) != checksum:
        raise TailError("the record's bytes do not match its checksum")
    windows, pairs, open_block, exit_part, ids = layout.sections(record_B)
    known = tokens[-(NGRAM_CONTEXT - 1) :]
    if ids.clone().view(torch.int64).tolist()[NGRAM_CONTEXT - 1 - len(known) :] != known.tolist():
        raise TailError("the record belongs to other tokens")
    slot_windows, slot_pairs = pools.slot_windows(slot), pools.slot_pairs(slot)
    slot_windows.copy_(windows.view(slot_windows.shape))
    slot_pairs.copy_(pairs.clone().view(torch.float32).view(slot_pairs.shape))
    if page is not None:
        pools.pages[page, : layout.open_block_bytes] = open_block
    return exit_part.clone().view(torch.float32) if has_exit else None


def tail_checksum(record_B: torch.Tensor, layout: TailLayout, identity: bytes) -> int:
    """Checksum of a record's sections."""
    return page_checksums(record_B[None], [0], layout.payload_bytes, [identity])[0]


def _header(
    layout: TailLayout, *, tokens: int, identity: bytes, checksum: int, has_exit: bool, exact: bool
) -> bytes:
    flags = (_HAS_EXIT if has_exit else 0) | (_EXACT if exact else 0)
    return _HEADER.pack(
        _MAGIC, TAIL_VERSION, flags, identity, checksum, tokens, layout.payload_bytes, layout.fingerprint
    )
