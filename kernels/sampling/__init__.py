"""Token draws that depend on the row alone, what is done to logits before them, and verification of drafts."""

from epdserve.kernels.dispatch import on_device
from epdserve.kernels.sampling import adjust as _adjust
from epdserve.kernels.sampling import drafts as _drafts
from epdserve.kernels.sampling import reference as _reference

accept_greedy = on_device(_drafts.accept_greedy_ref, "sampling.verify:accept_greedy")
add_bias = _adjust.add_bias_ref
filtered_probs = on_device(_drafts.filtered_probs_ref, "sampling.draw:filtered_probs")
forbid = _adjust.forbid_ref
log_probs = _reference.log_probs_ref
penalize = _adjust.penalize_ref
sample = on_device(_reference.sample_ref, "sampling.draw:sample")
top_log_probs = _adjust.top_log_probs_ref
verify_drafts = on_device(_drafts.verify_drafts_ref, "sampling.verify:verify_drafts")

__all__ = [
    "accept_greedy",
    "add_bias",
    "filtered_probs",
    "forbid",
    "log_probs",
    "penalize",
    "sample",
    "top_log_probs",
    "verify_drafts",
]
