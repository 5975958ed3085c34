"""Attention over a window and the entries of a cache under one softmax with a sink, with its own backward.

Composed from differentiable operations it would copy the scores of all entries some ten times a step, which is most of
the time of a long sequence. Here scores become weights in place, and their gradients follow from the output.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

_NOTHING: Final = -80.0  # exp of it is some 1e-35


class JointAttention(torch.autograd.Function):
    """B = sequences, T = tokens, H = heads, D = width of a head, W = window, E = entries.

    ``apply(q, near, near_bias, far, far_bias, sink)``, with ``q`` (B, T, H, D) scaled; ``near`` (B * T / W, 2W, D) the
    rows of each stretch of W tokens and of the one before; ``far`` (B, E, D) or None; the biases (B or 1, T, 2W) and
    (B or 1, T, E) zero where seen and very low elsewhere; ``sink`` (H,). Gives the output (B, T, H, D) and the weights
    of entries summed over heads (B, T, E), which carry no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BTHD: Tensor,
        near: Tensor,
        near_bias: Tensor,
        far: Tensor | None,
        far_bias: Tensor | None,
        sink_H: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Output, and what each entry got of it."""
        q_BTHD = q_BTHD.contiguous()
        shape = q_BTHD.shape[:3]
        p_near = _scores(q_BTHD, near).view(*shape, -1).add_(near_bias[:, :, None])
        top_BTH1 = torch.maximum(p_near.amax(-1, keepdim=True), sink_H[:, None])
        p_far = None
        if far is not None and far_bias is not None:
            p_far = _scores(q_BTHD, far).view(*shape, -1).add_(far_bias[:, :, None])
            top_BTH1 = torch.maximum(top_BTH1, p_far.amax(-1, keepdim=True))
        p_sink = (sink_H[:, None] - top_BTH1).exp_()
        total = _raised(p_near, top_BTH1).sum(-1, keepdim=True) + p_sink
        if p_far is not None:
            total += _raised(p_far, top_BTH1).sum(-1, keepdim=True)
        rate = total.reciprocal_()
        out = _values(p_near.mul_(rate), near, q_BTHD)
        mass = None
        if far is not None and p_far is not None:
            out += _values(p_far.mul_(rate), far, q_BTHD)
            mass = p_far.sum(2)
            ctx.mark_non_differentiable(mass)
        ctx.save_for_backward(q_BTHD, near, p_near, far, p_far, p_sink.mul_(rate), out)
        return out, mass

    @staticmethod
    def backward(ctx: Any, grad_BTHD: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """d score = weight * (d weight - grad . output)."""
        q_BTHD, near, p_near, far, p_far, p_sink, out = ctx.saved_tensors
        grad = grad_BTHD.contiguous()
        common = (grad * out).sum(-1, keepdim=True)
        d_q, d_near = _part_gradients(q_BTHD, near, p_near, grad, common)
        d_far = None
        if p_far is not None:
            d_more, d_far = _part_gradients(q_BTHD, far, p_far, grad, common)
            d_q += d_more
        d_sink = -(p_sink * common).sum((0, 1, 3))
        return d_q, d_near, None, d_far, None, d_sink


def _raised(scores: Tensor, top_BTH1: Tensor) -> Tensor:
    """exp(score - top) in place. Far below the top ``exp`` is many times slower, and the result is nothing anyway."""
    return scores.sub_(top_BTH1).clamp_(min=_NOTHING).exp_()


def _by_group(x_BTHD: Tensor, keys_GKD: Tensor) -> Tensor:
    """(B, T, H, D) as (groups, rows of a group, D)."""
    return x_BTHD.view(len(keys_GKD), -1, x_BTHD.shape[-1])


def _scores(q_BTHD: Tensor, keys_GKD: Tensor) -> Tensor:
    return torch.bmm(_by_group(q_BTHD, keys_GKD), keys_GKD.transpose(1, 2))


def _values(weight: Tensor, keys_GKD: Tensor, like_BTHD: Tensor) -> Tensor:
    return torch.bmm(_by_group(weight, keys_GKD), keys_GKD).view(like_BTHD.shape)


def _part_gradients(
    q_BTHD: Tensor, keys_GKD: Tensor, weight: Tensor, grad_BTHD: Tensor, common_BTH1: Tensor
) -> tuple[Tensor, Tensor]:
    """(d q, d keys): keys are values too."""
    d_score = _scores(grad_BTHD, keys_GKD).view(weight.shape).sub_(common_BTH1).mul_(weight)
    d_q = _values(d_score, keys_GKD, q_BTHD)
    d_keys = torch.bmm(_by_group(d_score, keys_GKD).transpose(1, 2), _by_group(q_BTHD, keys_GKD))
    d_keys.baddbmm_(_by_group(weight, keys_GKD).transpose(1, 2), _by_group(grad_BTHD, keys_GKD))
    return d_q, d_keys
