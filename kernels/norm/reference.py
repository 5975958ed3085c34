"""RMS normalisation in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` (..., D) divided by its root mean square and multiplied by ``weight`` (D); dtype of ``x``.

    Numerics: float32 inside, the weight multiplied in float32, one final cast (spec/backbone.md 2.1). A zero row
    stays zero.
    """
    wide = x.float()
    rate = (wide * wide).sum(-1, keepdim=True).div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * rate).mul_(weight).to(x.dtype)
