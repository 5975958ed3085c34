"""Byte sizes of one cache entry in its packed formats. Plain Python, so that code without torch can count bytes.

format        values                     scales                       released model
MAIN_KV       E2M1, two to a byte        one E4M3 byte per 16         512 channels -> 288 bytes
INDEXER_K     E2M1, two to a byte        one UE8M0 byte per 32        128 channels ->  68 bytes
SWA_KV        E4M3, one to a byte        one UE8M0 byte per 32        512 channels -> 528 bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """How many bytes the values and the scales of an entry take, as functions of its channels."""

    value_bits: int
    channels_per_scale: int

    def __post_init__(self) -> None:
        if self.value_bits not in (4, 8) or self.channels_per_scale <= 0:
            raise ValueError(
                f"no such entry format: {self.value_bits} bits, {self.channels_per_scale} a scale"
            )

    def value_bytes(self, channels: int) -> int:
        """Bytes of the values of one entry."""
        self._check(channels)
        return channels * self.value_bits // 8

    def scale_bytes(self, channels: int) -> int:
        """Bytes of the scales of one entry."""
        self._check(channels)
        return channels // self.channels_per_scale

    def entry_bytes(self, channels: int) -> int:
        """Bytes of one entry, values and scales together."""
        return self.value_bytes(channels) + self.scale_bytes(channels)

    def _check(self, channels: int) -> None:
        if channels <= 0 or channels % self.channels_per_scale:
            raise ValueError(
                f"{channels} channels are no multiple of the {self.channels_per_scale} of one scale"
            )


MAIN_KV: Final = EntryFormat(value_bits=4, channels_per_scale=16)
INDEXER_K: Final = EntryFormat(value_bits=4, channels_per_scale=32)
SWA_KV: Final = EntryFormat(value_bits=8, channels_per_scale=32)
