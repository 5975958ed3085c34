"""Rows of bytes in and out of the page pool, and entries packed on their way into it."""

from epdserve.kernels.cache_ops import reference as _reference
from epdserve.kernels.dispatch import on_device

gather_rows = on_device(_reference.gather_rows_ref, "cache_ops.rows:gather_rows")
scatter_rows = on_device(_reference.scatter_rows_ref, "cache_ops.rows:scatter_rows")
write_index_k = on_device(_reference.write_index_k_ref, "cache_ops.pack:write_index_k")
write_main_kv = on_device(_reference.write_main_kv_ref, "cache_ops.pack:write_main_kv")
write_window_kv = on_device(_reference.write_window_kv_ref, "cache_ops.pack:write_window_kv")

__all__ = [
    "gather_rows",
    "scatter_rows",
    "write_index_k",
    "write_main_kv",
    "write_window_kv",
]
