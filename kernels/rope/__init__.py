"""Rotary position embedding with adjacent pairs, and YaRN frequencies."""

from epdserve.kernels.dispatch import on_device
from epdserve.kernels.rope import reference as _reference
from epdserve.kernels.rope.reference import YarnScaling

apply_rope = on_device(_reference.apply_rope_ref, "rope.rotate:apply_rope")
apply_rope_in_place = on_device(_reference.apply_rope_in_place_ref, "rope.rotate:apply_rope_in_place")
apply_rope_inverse = on_device(_reference.apply_rope_inverse_ref, "rope.rotate:apply_rope_inverse")
rope_frequencies = _reference.rope_frequencies_ref
rotations = _reference.rotations_ref

__all__ = [
    "YarnScaling",
    "apply_rope",
    "apply_rope_in_place",
    "apply_rope_inverse",
    "rope_frequencies",
    "rotations",
]
