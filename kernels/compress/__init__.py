"""Pooling of two tokens into one compressed entry."""

from epdserve.kernels.compress import reference as _reference
from epdserve.kernels.dispatch import on_device

pool_entries = on_device(_reference.pool_entries_ref, "compress.pool:pool_entries")
pool_pairs = on_device(_reference.pool_pairs_ref, "compress.pool:pool_pairs")

__all__ = [
    "pool_entries",
    "pool_pairs",
]
