"""Single-pass hyper-connections in plain PyTorch (spec/backbone.md 2.3, 2.4). T = tokens, n = residual copies."""

from __future__ import annotations

from functools import cache

import torch
from epdserve.kernels.linear.reference import linear_ref
from torch import Tensor


def sinkhorn_ref(mix_Tnn: Tensor, iters: int, eps: float) -> Tensor:
    """Nearly doubly stochastic (T, n, n) float32: row softmax + eps, then rows and columns normalised in turn.

    ``iters`` counts (row step, column step) pairs, the softmax being the first row step; the last step is a column
    step, so columns sum to 1 within eps.

    A step divides every element by (its line's sum + eps). One product with a constant matrix gives all of these
    divisors: a row of it holds the matrix, flattened, and ones, which take up eps. So a step is two operations.
    """
    tokens, copies, _ = mix_Tnn.shape
    cells = copies * copies
    rows, columns = _line_sums(copies, eps, mix_Tnn.device)
    padded = max(-(-tokens // 4), 1) * 4  # as linear pads
    state = mix_Tnn.new_ones(padded, rows.shape[0], dtype=torch.float32)
    state[:tokens, :cells] = mix_Tnn.float().softmax(-1).add_(eps).view(tokens, cells)
    divisors = torch.mm(state, columns)
    state.div_(divisors)
    for _ in range(iters - 1):
        state.div_(torch.mm(state, rows, out=divisors))
        state.div_(torch.mm(state, columns, out=divisors))
    return state[:tokens, :cells].reshape(tokens, copies, copies)


@cache
def _line_sums(copies: int, eps: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Constant matrices that turn [flattened n x n | ones] into [row sums + eps | ones], and the same for columns."""
    with torch.inference_mode(False):
        cells = copies * copies
        width = cells // 4 * 4 + 4
        row, column = torch.arange(cells) // copies, torch.arange(cells) % copies
        result = []
        for line in (row, column):
            matrix = torch.zeros(width, width)
            matrix[:cells, :cells] = (line[:, None] == line).float()
            matrix[cells, :cells] = eps
            matrix[cells, cells:] = 1.0
            result.append(matrix.to(device))
        return result[0], result[1]


def hyper_coefficients_ref(
    streams_TnD: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    iters: int,
    hc_eps: float,
    norm_eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients that the streams predict for one sub-layer.

    Args:
        streams_TnD: (T, n, D) residual streams, any float dtype.
        fn: (n * (n + 2), n * D) float32 projection.
        scale: (3,) float32, of pre, post and comb.
        base: (n * (n + 2),) float32.

    Returns:
        pre (T, n) for the *next* sub-layer's collapse, post (T, n), comb (T, n, n) contracted over its rows; float32.
    """
    flat = streams_TnD.flatten(1).float()
    rate = (flat * flat).sum(-1, keepdim=True).div_(flat.shape[1]).add_(norm_eps).rsqrt_()
    mixes = linear_ref(flat, fn).mul_(rate)
    return coefficients_from_mixes_ref(mixes, scale, base, streams_TnD.shape[1], iters, hc_eps)


def coefficients_from_mixes_ref(
    mixes: Tensor, scale: Tensor, base: Tensor, copies: int, iters: int, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``pre``, ``post``, ``comb`` of projected and normalised streams ``mixes`` (T, n * (n + 2))."""
    logits = (mixes * scale.index_select(0, _scale_of(copies, scale.device))).add_(base)
    # 1 / (1 + exp(-x)): torch.sigmoid rounds the last few elements of a tensor differently from the others
    gate = logits[:, : 2 * copies].neg().exp_().add_(1.0).reciprocal_()
    comb = sinkhorn_ref(logits[:, 2 * copies :].view(-1, copies, copies), iters, hc_eps)
    return gate[:, :copies] + hc_eps, gate[:, copies:] * 2.0, comb


@cache
def _scale_of(copies: int, device: torch.device) -> Tensor:
    """Which of the three scales each of the n | n | n*n columns takes."""
    with torch.inference_mode(False):
        columns = torch.tensor([copies, copies, copies * copies])
        return torch.arange(3).repeat_interleave(columns).to(device)


def collapse_ref(streams_TnD: Tensor, pre_Tn: Tensor) -> Tensor:
    """Sub-layer input (T, D): the streams weighted by the carried ``pre`` and summed; dtype of the streams."""
    return (streams_TnD * pre_Tn.unsqueeze(-1)).sum(1).to(streams_TnD.dtype)


def expand_ref(streams_TnD: Tensor, out_TD: Tensor, post_Tn: Tensor, comb_Tnn: Tensor) -> Tensor:
    """New streams (T, n, D): ``post[j] * out + sum_i comb[i, j] * streams[i]``; float32 inside, dtype kept."""
    kept = torch.bmm(comb_Tnn.transpose(1, 2), streams_TnD.float())
    return (post_Tn.unsqueeze(-1) * out_TD.unsqueeze(1)).add_(kept).to(streams_TnD.dtype)


def advance_ref(
    streams_TnD: Tensor,
    out_TD: Tensor,
    post_Tn: Tensor,
    comb_Tnn: Tensor,
    pre_Tn: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    iters: int,
    hc_eps: float,
    norm_eps: float = 1e-20,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """From one sub-block to the next (spec/backbone.md 2.4): update the streams, collapse them, predict from them.

    Args:
        streams_TnD: (T, n, D) before the update by the last sub-block.
        out_TD: (T, D) its output; ``post_Tn`` and ``comb_Tnn`` are the coefficients it predicted.
        pre_Tn: (T, n) what it predicted for the next collapse.
        fn, scale, base, iters, hc_eps, norm_eps: As ``hyper_coefficients``, of the next sub-block.

    Returns:
        The new streams; the next sub-block's input (T, D); its (pre, post, comb).
    """
    new_TnD = expand_ref(streams_TnD, out_TD, post_Tn, comb_Tnn)
    coefficients = hyper_coefficients_ref(new_TnD, fn, scale, base, iters, hc_eps, norm_eps)
    return new_TnD, collapse_ref(new_TnD, pre_Tn), coefficients
