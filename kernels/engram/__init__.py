"""N-gram table rows and the gate of the looked-up memory."""

from epdserve.kernels.engram import reference as _reference

engram_gate = _reference.engram_gate_ref
ngram_rows = _reference.ngram_rows_ref

__all__ = [
    "engram_gate",
    "ngram_rows",
]
