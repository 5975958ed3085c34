"""Rotary position embedding with adjacent pairs, and YaRN frequencies."""

from epdserve.kernels.rope import reference as _reference
from epdserve.kernels.rope.reference import YarnScaling

apply_rope = _reference.apply_rope_ref
apply_rope_inverse = _reference.apply_rope_inverse_ref
rope_frequencies = _reference.rope_frequencies_ref
rotations = _reference.rotations_ref

__all__ = [
    "YarnScaling",
    "apply_rope",
    "apply_rope_inverse",
    "rope_frequencies",
    "rotations",
]
