"""Number formats of a forward pass."""

from enum import StrEnum

import torch
from epdserve.model.kv_layout import EntryFormat


class Precision(StrEnum):
    """Which roundings a forward makes. Weights are dequantised exactly in all of them; products are float32."""

    F32 = "f32"  # float32 activations, float32 caches
    F32Q = "f32q"  # float32 activations, FP8 / FP4 caches
    BF16Q = "bf16q"  # bfloat16 activations, FP8 / FP4 caches
    NATIVE = "native"  # as bf16q, and rows entering a quantised weight are rounded to FP8 (spec/backbone 2.1)

    @property
    def activation_dtype(self) -> torch.dtype:
        """Type of everything that passes between modules."""
        return torch.float32 if self in (Precision.F32, Precision.F32Q) else torch.bfloat16

    @property
    def quantizes_activations(self) -> bool:
        """Whether rows entering an FP8 or FP4 weight are rounded to FP8 per 32 values."""
        return self is Precision.NATIVE

    @property
    def entry_format(self) -> EntryFormat:
        """How KV entries lie in pages."""
        return EntryFormat.FLOAT32 if self is Precision.F32 else EntryFormat.PACKED
