"""Single-pass hyper-connections: coefficients, collapse, expand."""

from epdserve.kernels.mhc import reference as _reference

coefficients_from_mixes = _reference.coefficients_from_mixes_ref
collapse = _reference.collapse_ref
expand = _reference.expand_ref
hyper_coefficients = _reference.hyper_coefficients_ref
sinkhorn = _reference.sinkhorn_ref

__all__ = [
    "coefficients_from_mixes",
    "collapse",
    "expand",
    "hyper_coefficients",
    "sinkhorn",
]
