"""Expert routing and the clamped SwiGLU."""

from epdserve.kernels.moe import reference as _reference

route = _reference.route_ref
swiglu = _reference.swiglu_ref

__all__ = [
    "route",
    "swiglu",
]
