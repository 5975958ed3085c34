"""Token draws that depend on the row alone, and what is done to logits before them."""

from epdserve.kernels.sampling import adjust as _adjust
from epdserve.kernels.sampling import reference as _reference

add_bias = _adjust.add_bias_ref
forbid = _adjust.forbid_ref
log_probs = _reference.log_probs_ref
penalize = _adjust.penalize_ref
sample = _reference.sample_ref
top_log_probs = _adjust.top_log_probs_ref

__all__ = [
    "add_bias",
    "forbid",
    "log_probs",
    "penalize",
    "sample",
    "top_log_probs",
]
