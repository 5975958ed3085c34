"""Matrix products whose rows do not depend on one another, to the bit."""

from epdserve.kernels.dispatch import on_device
from epdserve.kernels.linear import reference as _reference

grouped_linear = _reference.grouped_linear_ref
grouped_linear_fp8 = on_device(_reference.grouped_linear_fp8_ref, "linear.block_linear:grouped_linear_fp8")
linear = _reference.linear_ref
linear_bf16 = on_device(_reference.linear_bf16_ref, "linear.block_linear:linear_bf16")
linear_fp8 = on_device(_reference.linear_fp8_ref, "linear.block_linear:linear_fp8")

__all__ = [
    "grouped_linear",
    "grouped_linear_fp8",
    "linear",
    "linear_bf16",
    "linear_fp8",
]
