"""Attention over gathered entries, or over packed ones where they lie, with a per-head sink in the denominator."""

from epdserve.kernels.attention import reference as _reference
from epdserve.kernels.dispatch import on_device

sink_attention = _reference.sink_attention_ref
sparse_attention = on_device(_reference.sparse_attention_ref, "attention.sparse:sparse_attention")

__all__ = [
    "sink_attention",
    "sparse_attention",
]
