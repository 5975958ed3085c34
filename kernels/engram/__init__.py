"""N-gram table rows and the gate of the looked-up memory."""

from epdserve.kernels.dispatch import on_device
from epdserve.kernels.engram import reference as _reference

engram_gate = on_device(_reference.engram_gate_ref, "engram.gate:engram_gate")
ngram_rows = on_device(_reference.ngram_rows_ref, "engram.hash:ngram_rows")

__all__ = [
    "engram_gate",
    "ngram_rows",
]
