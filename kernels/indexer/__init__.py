"""Scores of compressed entries, and the choice of the best of them."""

from epdserve.kernels.dispatch import on_device
from epdserve.kernels.indexer import reference as _reference

candidate_blocks = on_device(_reference.candidate_blocks_ref, "indexer.select:candidate_blocks")
candidate_mask = _reference.candidate_mask_ref
entries_of_slots = _reference.entries_of_slots_ref
score_blocks = on_device(_reference.score_blocks_ref, "indexer.score:score_blocks")
score_entries = _reference.score_entries_ref
score_pages = on_device(_reference.score_pages_ref, "indexer.score:score_pages")
top_entries = on_device(_reference.top_entries_ref, "indexer.select:top_entries")

__all__ = [
    "candidate_blocks",
    "candidate_mask",
    "entries_of_slots",
    "score_blocks",
    "score_entries",
    "score_pages",
    "top_entries",
]
