"""Values <-> bytes of KV entries, one codec per entry format.

``encode_*`` returns the bytes to store and the values a reader will get, so that a step's own rows and rows read back
later are the same numbers. Values are float32 (exact: every stored value fits in bfloat16 when packed).
"""

from typing import Protocol

import torch
from epdserve.kernels.quant import (
    dequantize_fp4_e4m3,
    dequantize_fp4_e8m0,
    dequantize_fp8,
    quantize_fp4_e4m3,
    quantize_fp4_e8m0,
    quantize_fp8,
    round_fp4_e8m0,
)
from epdserve.model.kv_layout import EntryFormat

_FP8_GROUP = 32


class EntryCodec(Protocol):
    """One storage format of window rows, main KV and indexer keys. Shapes: N rows, D latent, I index dim."""

    def encode_window(self, kv_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, D) -> (row bytes (N, B) uint8, values (N, D) float32)."""

    def decode_window(self, rows_NB: torch.Tensor) -> torch.Tensor:
        """(..., B) uint8 -> (..., D) float32."""

    def encode_main(self, latent_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, D) -> (value bytes, scale bytes); scale bytes have no columns where the format has no scales."""

    def decode_main(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Inverse of ``encode_main`` on any leading dimensions, float32."""

    def encode_index(self, key_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, I) -> (value bytes, scale bytes)."""

    def decode_index(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Inverse of ``encode_index`` on any leading dimensions, float32."""

    def round_index_query(self, q: torch.Tensor) -> torch.Tensor:
        """The rounding an indexer query gets before scoring, float32."""


class PackedCodec:
    """FP8 window rows (E8M0 per 32), FP4 main KV (E4M3 per 16), FP4 indexer keys (E8M0 per 32)."""

    def encode_window(self, kv_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See EntryCodec; a row is its codes, then its scales."""
        codes, scales = quantize_fp8(kv_ND)
        return torch.cat([codes, scales], dim=-1), dequantize_fp8(codes, scales)

    def decode_window(self, rows_NB: torch.Tensor) -> torch.Tensor:
        """See EntryCodec."""
        width = rows_NB.shape[-1] * _FP8_GROUP // (_FP8_GROUP + 1)
        return dequantize_fp8(rows_NB[..., :width], rows_NB[..., width:])

    def encode_main(self, latent_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See EntryCodec."""
        return quantize_fp4_e4m3(latent_ND)

    def decode_main(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See EntryCodec."""
        return dequantize_fp4_e4m3(values, scales)

    def encode_index(self, key_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See EntryCodec."""
        return quantize_fp4_e8m0(key_NI)

    def decode_index(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See EntryCodec."""
        return dequantize_fp4_e8m0(values, scales)

    def round_index_query(self, q: torch.Tensor) -> torch.Tensor:
        """See EntryCodec."""
        return round_fp4_e8m0(q.float())


class Float32Codec:
    """Unrounded entries, for comparisons with unquantised references."""

    def encode_window(self, kv_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See EntryCodec."""
        values = kv_ND.float().contiguous()
        return values.view(torch.uint8), values

    def decode_window(self, rows_NB: torch.Tensor) -> torch.Tensor:
        """See EntryCodec."""
        return rows_NB.contiguous().view(torch.float32)

    def encode_main(self, latent_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See EntryCodec."""
        values = latent_ND.float().contiguous().view(torch.uint8)
        return values, values[..., :0]

    def decode_main(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See EntryCodec."""
        return values.contiguous().view(torch.float32)

    def encode_index(self, key_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See EntryCodec."""
        return self.encode_main(key_NI)

    def decode_index(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See EntryCodec."""
        return self.decode_main(values, scales)

    def round_index_query(self, q: torch.Tensor) -> torch.Tensor:
        """See EntryCodec."""
        return q.float()


def entry_codec(entry_format: EntryFormat) -> EntryCodec:
    """Codec of a format."""
    return PackedCodec() if entry_format is EntryFormat.PACKED else Float32Codec()
