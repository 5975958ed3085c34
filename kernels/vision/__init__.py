"""What only the vision encoder needs: 2D rotation, attention within one image, merging of patches, its activations."""

from epdserve.kernels.vision import reference as _reference

gelu = _reference.gelu_ref
grid_rotations = _reference.grid_rotations_ref
image_attention = _reference.image_attention_ref
merge_windows = _reference.merge_windows_ref
rotate_halves = _reference.rotate_halves_ref
silu_gate = _reference.silu_gate_ref

__all__ = ["gelu", "grid_rotations", "image_attention", "merge_windows", "rotate_halves", "silu_gate"]
