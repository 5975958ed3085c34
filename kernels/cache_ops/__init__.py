"""Rows of bytes in and out of the page pool."""

from epdserve.kernels.cache_ops import reference as _reference

gather_rows = _reference.gather_rows_ref
scatter_rows = _reference.scatter_rows_ref

__all__ = [
    "gather_rows",
    "scatter_rows",
]
