"""Scores of compressed entries, and the choice of the best of them."""

from epdserve.kernels.dispatch import on_device
from epdserve.kernels.indexer import reference as _reference

candidate_mask = _reference.candidate_mask_ref
score_entries = _reference.score_entries_ref
top_entries = on_device(_reference.top_entries_ref, "indexer.select:top_entries")

__all__ = [
    "candidate_mask",
    "score_entries",
    "top_entries",
]
