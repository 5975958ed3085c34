"""Expert routing in plain PyTorch (spec/backbone.md 6). T = tokens, E = experts, k = experts per token."""

from __future__ import annotations

import torch
from epdserve.kernels.linear.reference import linear_ref
from epdserve.kernels.linear.tile import Tile
from epdserve.kernels.moe.plan import ExpertPlan, expert_tile
from epdserve.kernels.quant.reference import dequantize_fp8_ref, dequantize_mxfp4_ref, quantize_fp8_ref
from torch import Tensor


def route_ref(logits_TE: Tensor, bias_E: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Experts of each token and their weights.

    Args:
        logits_TE: (T, E) float32 gate logits.
        bias_E: (E,) or (T, E) float32; decides who is chosen and never enters the weights.
        top_k: Experts per token.
        scaling: Factor of the normalised weights.

    Returns:
        experts (T, k) int64 in descending biased score (ties: lower index first), weights (T, k) float32.
    """
    affinity = _softplus(logits_TE.float()).sqrt_()
    experts = (affinity + bias_E).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = affinity.gather(1, experts)
    total = chosen.sum(1, keepdim=True).add_(1e-20)
    return experts, chosen.div_(total).mul_(scaling)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) from parts that round every element alike (torch's own treats a tensor's end differently)."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


def swiglu_ref(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), float32; same shape as the arguments."""
    clamped = gate.float().clamp(max=limit)
    denominator = clamped.neg().exp_().add_(1.0)
    return clamped.div_(denominator).mul_(up.float().clamp(-limit, limit))


def plan_experts_ref(experts_Tk: Tensor, num_experts: int, tile_rows: int | None = None) -> ExpertPlan:
    """Pairs (token, choice) sorted by expert, stable, and the experts' tiles of at most ``tile_rows`` pairs."""
    pairs, device = experts_Tk.numel(), experts_Tk.device
    rows = expert_tile(pairs, num_experts).t if tile_rows is None else tile_rows
    order_P = experts_Tk.flatten().sort(stable=True).indices
    place_P = torch.empty_like(order_P).index_copy_(0, order_P, torch.arange(pairs, device=device))
    tiles, first = [], 0
    for expert, count in enumerate(torch.bincount(experts_Tk.flatten(), minlength=num_experts).tolist()):
        tiles += [(expert, first + i, min(rows, count - i)) for i in range(0, count, rows)]
        first += count
    tiles += [(-1, -1, -1)] * (min(pairs, num_experts + pairs // rows) - len(tiles))
    table = torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 3)
    return ExpertPlan(order_P.int(), place_P.int(), table, experts_Tk.shape[1], rows)


def expert_product_ref(
    codes_TK: Tensor,
    scale_TG: Tensor,
    weight_ENK: Tensor,
    weight_scale: Tensor,
    plan: ExpertPlan,
    *,
    gather: bool,
    tile: Tile | None = None,
) -> Tensor:
    """Each place's FP8 row times its expert's MXFP4 weight: (P, N) bfloat16. ``tile`` means nothing here."""
    x_TK = dequantize_fp8_ref(codes_TK, scale_TG)
    x_PK = x_TK[plan.order_P.long() // plan.top_k] if gather else x_TK
    out = x_PK.new_zeros(len(x_PK), weight_ENK.shape[1])
    for expert, first, count in plan.tiles.tolist():
        if expert >= 0:
            wide_NK = dequantize_mxfp4_ref(weight_ENK[expert], weight_scale[expert])
            out[first : first + count] = linear_ref(x_PK[first : first + count], wide_NK)
    return out.bfloat16()


def swiglu_quantize_ref(
    x_PC: Tensor, limit: float, plan: ExpertPlan | None = None, weights_Tk: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """SwiGLU of gate | up rows, times the place's routing weight, to bfloat16, then FP8: codes and scales."""
    gate, up = x_PC.chunk(2, dim=1)
    hidden = swiglu_ref(gate, up, limit)
    if plan is not None and weights_Tk is not None:
        hidden = hidden * weights_Tk.flatten()[plan.order_P.long()].unsqueeze(1)
    return quantize_fp8_ref(hidden.bfloat16())


def combine_ref(y_PD: Tensor, shared_TD: Tensor, plan: ExpertPlan) -> Tensor:
    """Sum of each token's experts in the order of its choices, then its shared expert: (T, D) in its type."""
    y_TkD = y_PD[plan.place_P.long()].float().unflatten(0, (-1, plan.top_k))
    total: Tensor = y_TkD[:, 0]
    for choice in range(1, plan.top_k):
        total = total + y_TkD[:, choice]
    return (total + shared_TD.float()).to(shared_TD.dtype)
