"""Verification of drafted tokens on a GPU: a program a request."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.catalogue import VOCABULARY, Entry, Work
from epdserve.kernels.launch import (
    LaunchRefusedError,
    check_contiguous,
    check_indices,
    check_tensor,
)
from epdserve.kernels.sampling.drafts import ACCEPT_SALT, Method
from epdserve.kernels.sampling.selection import block_of, uniform
from torch import Tensor

_INT64: Final = (torch.int64,)
_SALT: Final = tl.constexpr(ACCEPT_SALT)
_LEAST_MASS: Final = tl.constexpr(1e-8)


@triton.jit
def residual(
    target_ptr: tl.tensor,
    drafter_ptr: tl.tensor,
    token: tl.tensor,
    drafted: tl.tensor,
    weight: tl.tensor,
    ONE_HOT: tl.constexpr,
    V: tl.constexpr,
) -> tl.tensor:
    """max(weight * p - q, 0) of some tokens, float64; the drafter's distribution may be one draft alone."""
    p = tl.load(target_ptr + token, mask=token < V, other=0.0).to(tl.float64)
    if ONE_HOT:
        q = tl.where(token == drafted, 1.0, 0.0).to(tl.float64)
    else:
        q = tl.load(drafter_ptr + token, mask=token < V, other=0.0).to(tl.float64)
    return tl.maximum(weight * p - q, 0.0)


@triton.jit
def residual_sum(
    target_ptr: tl.tensor,
    drafter_ptr: tl.tensor,
    drafted: tl.tensor,
    weight: tl.tensor,
    ONE_HOT: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Sum of ``residual`` over the vocabulary."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        total += residual(target_ptr, drafter_ptr, token, drafted, weight, ONE_HOT, V)
    return tl.sum(total, axis=0)


@triton.jit
def pick(
    target_ptr: tl.tensor,
    drafter_ptr: tl.tensor,
    drafted: tl.tensor,
    weight: tl.tensor,
    minus: tl.tensor,
    wanted: tl.tensor,
    ONE_HOT: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """First token whose running residual (if ``minus``) or probability passes ``wanted``, else the last of all."""
    found = tl.cast(V, tl.int32)
    last = tl.cast(0, tl.int32)
    seen = tl.cast(0.0, tl.float64)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        p = tl.load(target_ptr + token, mask=token < V, other=0.0).to(tl.float64)
        mass = tl.where(minus > 0, residual(target_ptr, drafter_ptr, token, drafted, weight, ONE_HOT, V), p)
        passed = (tl.cumsum(mass, axis=0) + seen > wanted) & (mass > 0.0)
        found = tl.minimum(found, tl.min(tl.where(passed, token, V), axis=0))
        last = tl.maximum(last, tl.max(tl.where(mass > 0.0, token, 0), axis=0))
        seen += tl.sum(mass, axis=0)
    return tl.where(found < V, found, last)


@triton.jit
def verify_kernel(
    target_ptr: tl.tensor,
    drafter_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    count_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    token_ptr: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    ONE_HOT: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Drafts accepted for this program's request, and the token behind them."""
    row = tl.program_id(0).to(tl.int64)
    target_ptr += row * (K + 1) * V
    drafter_ptr += row * K * V
    draft_ptr += row * K
    count = tl.load(count_ptr + row)
    count = tl.minimum(tl.maximum(count, 0), K).to(tl.int32)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    accepted = tl.cast(0, tl.int32)
    weight = tl.cast(1.0, tl.float64)  # of the run so far, used by blocks
    weight_there = tl.cast(1.0, tl.float64)  # of the run accepted
    for i in range(K):
        token = tl.load(draft_ptr + i)
        real = (i < count) & (token >= 0) & (token < V)
        token = tl.where(real, token, 0)
        p = tl.load(target_ptr + i * V + token).to(tl.float64)
        q = tl.cast(1.0, tl.float64)
        if not ONE_HOT:
            q = tl.load(drafter_ptr + i * V + token).to(tl.float64)
        draw = uniform(seed ^ _SALT, position + i)
        if BY_BLOCK:
            weight = tl.where(real & (q > 0.0), tl.minimum(weight * p / q, 1.0), 0.0)
            stop = weight
            if i + 1 < count:
                following = tl.load(draft_ptr + i + 1)
                behind = (i + 1) * V
                left = residual_sum(
                    target_ptr + behind, drafter_ptr + behind, following, weight, ONE_HOT, V, BLOCK
                )
                stop = tl.where(left > 0.0, left / (left + 1.0 - weight), 0.0)
            taken = real & (draw < stop)
            accepted = tl.where(taken, i + 1, accepted)
            weight_there = tl.where(taken, weight, weight_there)
        else:
            accepted += (real & (accepted == i) & (draw * q < p)).to(tl.int32)
    behind = accepted.to(tl.int64) * V
    own = tl.minimum(accepted, K - 1)  # nothing is taken off behind the last draft
    drafted = tl.load(draft_ptr + own)
    drafter_ptr += own.to(tl.int64) * V
    minus = (accepted < count).to(tl.int32)
    left = residual_sum(target_ptr + behind, drafter_ptr, drafted, weight_there, ONE_HOT, V, BLOCK)
    minus = tl.where(left > _LEAST_MASS, minus, 0)
    if minus == 0:
        left = tl.cast(0.0, tl.float64)
        for start in range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            p = tl.load(target_ptr + behind + token, mask=token < V, other=0.0)
            left += tl.sum(p.to(tl.float64), axis=0)
    wanted = uniform(seed, position + accepted) * left
    found = pick(target_ptr + behind, drafter_ptr, drafted, weight_there, minus, wanted, ONE_HOT, V, BLOCK)
    tl.store(accepted_ptr + row, accepted.to(tl.int64))
    tl.store(token_ptr + row, found.to(tl.int64))


@triton.jit(do_not_specialize=["rows"])
def accept_greedy_kernel(
    best_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    count_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    token_ptr: tl.tensor,
    rows: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Longest run of drafts that are the target's best tokens, for ROWS requests."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    count = tl.load(count_ptr + row, mask=live, other=0)
    accepted = tl.zeros((ROWS,), tl.int64)
    for i in range(K):
        best = tl.load(best_ptr + row * (K + 1) + i, mask=live, other=0)
        draft = tl.load(draft_ptr + row * K + i, mask=live, other=-1)
        accepted += ((accepted == i) & (i < count) & (best == draft)).to(tl.int64)
    token = tl.load(best_ptr + row * (K + 1) + accepted, mask=live, other=0)
    tl.store(accepted_ptr + row, accepted, mask=live)
    tl.store(token_ptr + row, token, mask=live)


def accept_greedy(best_RK1: Tensor, draft_RK: Tensor, count_R: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts that equal the target's best tokens, and the best token behind them; see ``accept_greedy_ref``.

    Raises:
        LaunchRefusedError: A dtype or shape that does not fit; a count out of range, where indices are looked at.

    Numerics: integers; bitwise equal to the reference.
    """
    rows, drafts = _check(draft_RK, count_R)
    check_tensor("best_RK1", best_RK1, _INT64, (rows, drafts + 1), like=draft_RK)
    check_contiguous("best_RK1", best_RK1)
    accepted_R, token_R = torch.empty_like(count_R), torch.empty_like(count_R)
    if rows:
        tile = 32
        accept_greedy_kernel[(triton.cdiv(rows, tile),)](
            best_RK1, draft_RK, count_R, accepted_R, token_R, rows, K=drafts, ROWS=tile, num_warps=1
        )
    return accepted_R, token_R


def verify_drafts(
    target_RKV: Tensor,
    drafter_RKV: Tensor | None,
    draft_RK: Tensor,
    count_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    method: Method = "token",
) -> tuple[Tensor, Tensor]:
    """Accept drafts so that tokens are distributed as the target's own; arguments and result as ``verify_drafts_ref``.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that does not fit, no draft at all, another method; a draft or
            count out of range, where indices are looked at (see ``launch``).

    Numerics: the reference's products, and its sums over fixed blocks, in float64: the result is the reference's unless
    a random number falls within the rounding of a sum. ``token`` accepts bitwise as the reference. A draft out of range
    is not accepted. A request's result depends on its own row alone.
    """
    rows, drafts = _check(draft_RK, count_R)
    check_tensor("target_RKV", target_RKV, (torch.float32,), (rows, drafts + 1, None), like=draft_RK)
    vocabulary = target_RKV.shape[2]
    if drafter_RKV is not None:
        check_tensor("drafter_RKV", drafter_RKV, (torch.float32,), (rows, drafts, vocabulary), like=draft_RK)
        check_contiguous("drafter_RKV", drafter_RKV)
    check_contiguous("target_RKV", target_RKV)
    for name, value in (("seed_R", seed_R), ("position_R", position_R)):
        check_tensor(name, value, _INT64, (rows,), like=draft_RK)
        check_contiguous(name, value)
    if method not in ("token", "block") or not drafts or not vocabulary:
        raise LaunchRefusedError(f"cannot verify {drafts} drafts of {vocabulary} tokens by {method}")
    check_indices("draft_RK", draft_RK, limit=vocabulary)
    accepted_R, token_R = torch.empty_like(count_R), torch.empty_like(count_R)
    if rows:
        verify_kernel[(rows,)](
            target_RKV,
            target_RKV if drafter_RKV is None else drafter_RKV,
            draft_RK,
            count_R,
            seed_R,
            position_R,
            accepted_R,
            token_R,
            K=drafts,
            V=vocabulary,
            ONE_HOT=drafter_RKV is None,
            BY_BLOCK=method == "block",
            BLOCK=block_of(vocabulary),
            num_warps=8,
        )
    return accepted_R, token_R


def _check(draft_RK: Tensor, count_R: Tensor) -> tuple[int, int]:
    check_tensor("draft_RK", draft_RK, _INT64, (None, None))
    check_contiguous("draft_RK", draft_RK)
    rows, drafts = draft_RK.shape
    check_tensor("count_R", count_R, _INT64, (rows,), like=draft_RK)
    check_contiguous("count_R", count_R)
    check_indices("count_R", count_R, limit=drafts + 1)
    return rows, drafts


_DRAFTS: Final = 5  # dspark_block_size


def _entry(name: str, *, one_hot: bool, by_block: bool) -> Entry:
    signature = {"target_ptr": "*fp32", "drafter_ptr": "*fp32"}
    signature |= {
        f"{part}_ptr": "*i64" for part in ("draft", "count", "seed", "position", "accepted", "token")
    }
    rows_of_v = (_DRAFTS if by_block else 1) * (1 if one_hot else 2)
    return Entry(
        name=name,
        kernel=verify_kernel,
        signature=signature,
        constexprs={
            "K": _DRAFTS,
            "V": VOCABULARY,
            "ONE_HOT": one_hot,
            "BY_BLOCK": by_block,
            "BLOCK": block_of(VOCABULARY),
        },
        num_warps=8,
        work=(Work("R=32", bytes_moved=32 * VOCABULARY * 4 * rows_of_v),),
    )


ENTRIES: Final = (
    _entry("verify drafts", one_hot=False, by_block=False),
    _entry("verify drafts of a greedy drafter", one_hot=True, by_block=False),
    _entry("verify drafts by block", one_hot=False, by_block=True),
    Entry(
        name="accept greedy drafts",
        kernel=accept_greedy_kernel,
        signature={f"{part}_ptr": "*i64" for part in ("best", "draft", "count", "accepted", "token")}
        | {"rows": "i32"},
        constexprs={"K": _DRAFTS, "ROWS": 32},
        num_warps=1,
        work=(Work("R=128", bytes_moved=128 * 8 * (2 * _DRAFTS + 4)),),
    ),
)
