"""Pooling of two tokens into one compressed entry."""

from epdserve.kernels.compress import reference as _reference

pool_pairs = _reference.pool_pairs_ref

__all__ = [
    "pool_pairs",
]
