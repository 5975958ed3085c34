"""Expert routing and the clamped SwiGLU."""

from epdserve.kernels.dispatch import on_device, on_host
from epdserve.kernels.moe import reference as _reference

route = on_device(_reference.route_ref, "moe.route_rows:route")
swiglu = on_host(_reference.swiglu_ref)

__all__ = [
    "route",
    "swiglu",
]
