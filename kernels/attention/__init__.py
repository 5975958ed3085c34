"""Attention over gathered entries with a per-head sink in the denominator."""

from epdserve.kernels.attention import reference as _reference

sink_attention = _reference.sink_attention_ref

__all__ = [
    "sink_attention",
]
