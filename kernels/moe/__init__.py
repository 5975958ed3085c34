"""Expert routing and the clamped SwiGLU."""

from epdserve.kernels.dispatch import on_host
from epdserve.kernels.moe import reference as _reference

route = on_host(_reference.route_ref)
swiglu = on_host(_reference.swiglu_ref)

__all__ = [
    "route",
    "swiglu",
]
