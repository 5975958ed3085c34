"""Matrix products whose rows do not depend on one another, to the bit."""

from epdserve.kernels.linear import reference as _reference

grouped_linear = _reference.grouped_linear_ref
linear = _reference.linear_ref

__all__ = [
    "grouped_linear",
    "linear",
]
