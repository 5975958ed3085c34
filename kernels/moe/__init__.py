"""Expert routing, the clamped SwiGLU, and products of experts with the rows that chose them."""

from epdserve.kernels.dispatch import on_device, on_host
from epdserve.kernels.moe import reference as _reference

combine = on_device(_reference.combine_ref, "moe.experts:combine")
expert_product = on_device(_reference.expert_product_ref, "moe.experts:expert_product")
plan_experts = on_device(_reference.plan_experts_ref, "moe.route_rows:plan_experts")
route = on_device(_reference.route_ref, "moe.route_rows:route")
swiglu = on_host(_reference.swiglu_ref)
swiglu_quantize = on_device(_reference.swiglu_quantize_ref, "moe.experts:swiglu_quantize")

__all__ = [
    "combine",
    "expert_product",
    "plan_experts",
    "route",
    "swiglu",
    "swiglu_quantize",
]
