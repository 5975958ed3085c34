"""Single-pass hyper-connections: coefficients, collapse, expand, and all three in one pass."""

from epdserve.kernels.dispatch import on_device, on_host
from epdserve.kernels.mhc import reference as _reference
from torch import Tensor

_COPIES = 4  # of the kernels; small models have others


def _takes(streams_TnD: Tensor) -> bool:
    return streams_TnD.shape[1] == _COPIES


advance = on_device(_reference.advance_ref, "mhc.streams:advance", takes=_takes)
coefficients_from_mixes = on_host(_reference.coefficients_from_mixes_ref)
collapse = on_device(_reference.collapse_ref, "mhc.streams:collapse", takes=_takes)
expand = on_device(_reference.expand_ref, "mhc.streams:expand", takes=_takes)
hyper_coefficients = on_device(
    _reference.hyper_coefficients_ref, "mhc.streams:hyper_coefficients", takes=_takes
)
sinkhorn = _reference.sinkhorn_ref

__all__ = [
    "advance",
    "coefficients_from_mixes",
    "collapse",
    "expand",
    "hyper_coefficients",
    "sinkhorn",
]
