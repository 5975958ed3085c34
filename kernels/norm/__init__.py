"""RMS normalisation."""

from epdserve.kernels.norm import reference as _reference

rms_norm = _reference.rms_norm_ref

__all__ = [
    "rms_norm",
]
