"""Rotary position embedding in plain PyTorch: adjacent pairs (2i, 2i+1) of the last channels (spec/backbone.md 3.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN as the released model uses it: frequencies are stretched, cosine and sine are not scaled."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if self.factor <= 0 or self.original_length <= 0 or self.beta_fast < self.beta_slow:
            raise ValueError(f"impossible YaRN scaling: {self}")


def rope_frequencies_ref(dim: int, theta: float, yarn: YarnScaling | None = None) -> Tensor:
    """Inverse frequency of each pair: (dim/2,) float32 on the CPU, ``theta ** (-2i/dim)``, stretched by YaRN."""
    if dim <= 0 or dim % 2:
        raise ValueError(f"rotary dims must be even and positive, got {dim}")
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return frequency

    def pair_turning(times: float) -> float:
        """Pair whose angle makes ``times`` full turns over the original length."""
        return dim * math.log(yarn.original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency / yarn.factor * ramp + frequency * (1 - ramp)


def rotations_ref(positions_T: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (T, pairs) float32, of the float32 product position * frequency."""
    angle = positions_T.float().unsqueeze(-1) * inv_freq
    return angle.cos(), angle.sin()


def apply_rope_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (T, ..., D) with its last ``2 * pairs`` channels rotated by the row's angles; dtype kept.

    Args:
        x: (T, ..., D), any float dtype; not changed.
        cos, sin: (T, pairs) float32.

    Numerics: float32 rotation, one final cast.
    """
    return _rotate(x, cos, sin)


def apply_rope_inverse_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo ``apply_rope``: the same with the opposite angle."""
    return _rotate(x, cos, -sin)


def apply_rope_in_place_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_rope`` that changes ``x`` and returns it."""
    return x.copy_(_rotate(x, cos, sin))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = 2 * cos.shape[-1]
    if rotary > x.shape[-1]:
        raise ValueError(f"cannot rotate {rotary} of {x.shape[-1]} channels")
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
    turned = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    tail = turned[..., x.shape[-1] - rotary :]
    pairs = torch.view_as_complex(tail.view(*x.shape[:-1], cos.shape[-1], 2))
    pairs.mul_(torch.complex(cos, sin).view(shape))
    return turned.to(x.dtype)
