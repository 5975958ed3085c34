"""Expert routing on a GPU: the gate's choice, and the order in which experts meet their rows (spec/backbone.md 6).

Nothing here waits for the host: how many rows an expert has stays on the device, and the grouped product is launched
for the most tiles there can be.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.launch import (
    INDICES,
    LaunchRefusedError,
    check_contiguous,
    check_tensor,
    next_power_of_2,
)
from epdserve.kernels.moe.plan import ExpertPlan, expert_tile
from torch import Tensor

_SCAN: Final = 1024  # pairs that a program looks at together


@triton.jit
def route_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    stride_bias: tl.tensor,
    scaling: tl.tensor,
    E: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
) -> None:
    """One token: its TOP best experts by sqrt(softplus(logit)) + bias, and their weights."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < E
    logit = tl.load(logits_ptr + token * E + expert, mask=inside, other=0.0)
    small = tl.exp(-tl.abs(logit))
    # log(1 + x) for 0 <= x <= 1: the sum's own rounding error is divided out (Kahan)
    one = 1.0 + small
    log = tl.where(one == 1.0, small, tl.log(one) * tl.div_rn(small, tl.where(one == 1.0, 1.0, one - 1.0)))
    affinity = tl.sqrt_rn(tl.maximum(logit, 0.0) + log)
    bias = tl.load(bias_ptr + token * stride_bias + expert, mask=inside, other=0.0)
    rank = tl.where(inside, affinity + bias, float("-inf"))
    slot = tl.arange(0, TOP_BLOCK)
    weights = tl.zeros((TOP_BLOCK,), tl.float32)
    chosen = tl.zeros((TOP_BLOCK,), tl.int32)
    left = inside
    total = 0.0
    for i in tl.static_range(TOP):
        best = tl.max(tl.where(left, rank, float("-inf")), axis=0)
        # Of equal ranks the lowest expert; where a NaN is left nothing equals the best, and the lowest is taken
        same = left & (rank == best)
        found = tl.min(tl.where(same, expert, BLOCK), axis=0)
        found = tl.where(found == BLOCK, tl.min(tl.where(left, expert, BLOCK), axis=0), found)
        weight = tl.sum(tl.where(expert == found, affinity, 0.0), axis=0)
        weights = tl.where(slot == i, weight, weights)
        chosen = tl.where(slot == i, found, chosen)
        total += weight
        left = left & (expert != found)
    weights = tl.div_rn(weights, tl.zeros_like(weights) + (total + 1e-20)) * scaling
    tl.store(experts_ptr + token * TOP + slot, chosen.to(experts_ptr.dtype.element_ty), mask=slot < TOP)
    tl.store(weights_ptr + token * TOP + slot, weights, mask=slot < TOP)


@triton.jit
def plan_kernel(
    experts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    place_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    pairs: tl.tensor,
    max_tiles: tl.tensor,
    E: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    SCAN: tl.constexpr,
) -> None:
    """One expert: where its pairs stand among all, in the order of the pairs, and its tiles of ROWS rows."""
    mine = tl.program_id(0)
    count = tl.zeros((BINS,), tl.int32)
    for first in range(0, pairs, SCAN):
        pair = first + tl.arange(0, SCAN)
        expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=E).to(tl.int32)
        count += tl.histogram(tl.where((expert >= 0) & (expert < E), expert, E), BINS)
    bins = tl.arange(0, BINS)
    start = tl.sum(tl.where(bins < mine, count, 0), axis=0)
    size = tl.sum(tl.where(bins == mine, count, 0), axis=0)
    first_tile = tl.sum(tl.where(bins < mine, (count + ROWS - 1) // ROWS, 0), axis=0)
    seen = start
    for first in range(0, pairs, SCAN):
        pair = first + tl.arange(0, SCAN)
        expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=E).to(tl.int32)
        is_mine = (expert == mine).to(tl.int32)
        place = seen + tl.cumsum(is_mine, axis=0) - 1
        tl.store(order_ptr + place, pair, mask=is_mine != 0)
        tl.store(place_ptr + pair, place, mask=is_mine != 0)
        seen += tl.sum(is_mine, axis=0)
    for i in range((size + ROWS - 1) // ROWS):
        tile = tiles_ptr + (first_tile + i) * 3
        if first_tile + i < max_tiles:
            tl.store(tile, mine)
            tl.store(tile + 1, start + i * ROWS)
            tl.store(tile + 2, tl.minimum(ROWS, size - i * ROWS))


def route(logits_TE: Tensor, bias_E: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Experts (T, k) int64 in descending biased score, ties to the lower index, and weights (T, k) float32.

    Args:
        logits_TE: (T, E) float32 gate logits, contiguous.
        bias_E: (E,) or (T, E) float32.
        top_k: Experts of a token.
        scaling: Factor of the normalised weights.

    Raises:
        LaunchRefusedError: A dtype or shape that the kernel does not take.

    Numerics: ``route_ref`` up to 4 ulp of exp and log, so a choice differs where two scores are that close; weights are
    summed in the order of the choice. A row's bits depend on that row only. A row of NaN takes the first experts.
    """
    tokens, experts = logits_TE.shape
    check_tensor("logits_TE", logits_TE, (torch.float32,), (None, None))
    check_contiguous("logits_TE", logits_TE)
    shape = (experts,) if bias_E.dim() == 1 else (tokens, experts)
    check_tensor("bias_E", bias_E, (torch.float32,), shape, like=logits_TE)
    if not 1 <= top_k <= experts:
        raise LaunchRefusedError(f"cannot choose {top_k} of {experts} experts")
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    if tokens:
        route_kernel[(tokens,)](
            logits_TE, bias_E, chosen, weights, bias_E.stride(0) if bias_E.dim() == 2 else 0, scaling,
            E=experts, TOP=top_k, BLOCK=next_power_of_2(experts), TOP_BLOCK=next_power_of_2(top_k), num_warps=4,
        )  # fmt: skip
    return chosen, weights


def plan_experts(experts_Tk: Tensor, num_experts: int, tile_rows: int | None = None) -> ExpertPlan:
    """Sort pairs by expert; stable, without atomics, so always the same.

    Args:
        experts_Tk: (T, k) int32 or int64, contiguous; out of range = no place (its ``place_P`` is -1).
        num_experts: At most 4,095.
        tile_rows: Rows of a tile of the grouped product; what suits their number if None.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.
    """
    check_tensor("experts_Tk", experts_Tk, INDICES, (None, None))
    check_contiguous("experts_Tk", experts_Tk)
    if tile_rows is None:
        tile_rows = expert_tile(experts_Tk.numel(), num_experts).t
    if not 0 < num_experts < 4096 or tile_rows <= 0:
        raise LaunchRefusedError(f"cannot plan {num_experts} experts in tiles of {tile_rows} rows")
    pairs, device = experts_Tk.numel(), experts_Tk.device
    most = min(pairs, num_experts + pairs // tile_rows)
    order = torch.full((pairs,), -1, dtype=torch.int32, device=device)
    place = torch.full((pairs,), -1, dtype=torch.int32, device=device)
    tiles = torch.full((most, 3), -1, dtype=torch.int32, device=device)
    if pairs:
        plan_kernel[(num_experts,)](
            experts_Tk, order, place, tiles, pairs, most,
            E=num_experts, BINS=next_power_of_2(num_experts + 1), ROWS=tile_rows, SCAN=_SCAN, num_warps=4,
        )  # fmt: skip
    return ExpertPlan(order, place, tiles, experts_Tk.shape[1], tile_rows)
