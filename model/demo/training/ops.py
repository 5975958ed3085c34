"""Differentiable forms of what ``kernels`` computes in place, for whole sequences. N = rows, n = residual copies.

Where a kernel's reference can be differentiated it is used as it is. These are checked against the golden vectors
(tests/model/demo/training).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` (..., D) over its root mean square, times ``weight`` (D,)."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Last ``2 * pairs`` channels of ``x`` (..., D) turned by unit complex numbers that broadcast to (..., pairs)."""
    rotary = 2 * turn.shape[-1]
    fixed, moved = x[..., :-rotary], x[..., -rotary:]
    pairs = torch.view_as_complex(moved.reshape(*moved.shape[:-1], -1, 2)) * turn
    return torch.cat([fixed, torch.view_as_real(pairs).flatten(-2)], dim=-1)


def straight_through(x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """``rounded(x)`` forward, the gradient of ``x`` backward."""
    return x + (rounded(x.detach()) - x).detach()


def pool_pairs(first: Tensor, first_gate: Tensor, second: Tensor, second_gate: Tensor) -> Tensor:
    """Two tokens as one entry, channel by channel (``kernels.compress``)."""
    share = torch.sigmoid(first_gate - second_gate)
    return share * first + (1 - share) * second


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def gate_memory(
    streams_nND: Tensor, keys_nND: Tensor, value_ND: Tensor, gains_nD: Tensor, eps: float
) -> Tensor:
    """Streams with the memory value added where stream and key agree (``kernels.engram``)."""
    sizes = streams_nND.square().mean(-1).add(eps).rsqrt() * keys_nND.square().mean(-1).add(eps).rsqrt()
    dot = (streams_nND * keys_nND * gains_nD[:, None]).sum(-1) * sizes * value_ND.shape[-1] ** -0.5
    gate = torch.sigmoid(dot.abs().clamp(min=1e-6).sqrt().copysign(dot))
    return streams_nND + gate[..., None] * value_ND


class _Sinkhorn(torch.autograd.Function):
    """Row softmax and alternating normalisation of (n, n, N); exact backward through every step."""

    @staticmethod
    def forward(ctx: Any, logits_nnN: Tensor, iters: int, eps: float) -> Tensor:
        """``logits_nnN[i, j]`` -> comb[i, j]; i are the rows."""
        soft = logits_nnN.softmax(1)
        state, kept = soft + eps, [soft]
        for step in range(2 * iters - 1):
            axis = step % 2  # even steps make columns sum to one (over i), odd ones rows
            rate = state.sum(axis, keepdim=True).add_(eps).reciprocal_()
            state = state * rate
            kept += [rate, state]
        ctx.save_for_backward(*kept)  # an output kept in any other way would keep itself alive
        return state

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """d(x / (sum x + eps)) = (g - sum(g * y)) / (sum x + eps)."""
        soft, *kept = ctx.saved_tensors
        for step in reversed(range(len(kept) // 2)):
            rate, state = kept[2 * step : 2 * step + 2]
            grad = (grad - (grad * state).sum(step % 2, keepdim=True)) * rate
        return soft * (grad - (grad * soft).sum(1, keepdim=True)), None, None


def sinkhorn(logits_nnN: Tensor, iters: int, eps: float) -> Tensor:
    """Nearly doubly stochastic (n, n, N) of ``logits_nnN`` (``kernels.mhc``)."""
    result: Tensor = _Sinkhorn.apply(logits_nnN, iters, eps)  # type: ignore[no-untyped-call]
    return result
