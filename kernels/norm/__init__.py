"""RMS normalisation."""

from epdserve.kernels.dispatch import on_device
from epdserve.kernels.norm import reference as _reference

rms_norm = on_device(_reference.rms_norm_ref, "norm.rms:rms_norm")

__all__ = [
    "rms_norm",
]
