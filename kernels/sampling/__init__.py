"""Token draws that depend on the row alone."""

from epdserve.kernels.sampling import reference as _reference

log_probs = _reference.log_probs_ref
sample = _reference.sample_ref

__all__ = [
    "log_probs",
    "sample",
]
