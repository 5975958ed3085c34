"""Token draws on a GPU: a program a row, which stays in the cache while it is looked at again and again."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.catalogue import VOCABULARY, Entry, Work
from epdserve.kernels.launch import LaunchRefusedError, check_contiguous, check_tensor
from epdserve.kernels.sampling.selection import (
    best_token,
    block_of,
    cutoff,
    descend,
    load_mass,
    mass_from,
    nth_equal,
    uniform,
)
from torch import Tensor

_MAX_VOCABULARY: Final = 1 << 22
_INT64: Final = (torch.int64,)


@triton.jit
def pick_in_order(
    logits_ptr: tl.tensor,
    best: tl.tensor,
    heat: tl.tensor,
    share: tl.tensor,
    otherwise: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """First token whose running mass, in the order of the vocabulary, passes a share of the total."""
    target = share * mass_from(logits_ptr, best, heat, tl.cast(0, tl.int32), V, BLOCK)
    found = tl.cast(V, tl.int32)
    last = otherwise
    seen = tl.cast(0.0, tl.float64)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        mass = load_mass(logits_ptr, token, best, heat, V).to(tl.float64)
        passed = (tl.cumsum(mass, axis=0) + seen > target) & (mass > 0.0)
        found = tl.minimum(found, tl.min(tl.where(passed, token, V), axis=0))
        last = tl.maximum(last, tl.max(tl.where(mass > 0.0, token, 0), axis=0))
        seen += tl.sum(mass, axis=0)
    return tl.where(found < V, found, last)  # a product that rounds up to the total belongs to the last token


@triton.jit
def sample_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    out_ptr: tl.tensor,
    STRIDE_R: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Token of this program's row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * STRIDE_R
    best, token = best_token(logits_ptr, V, BLOCK)
    heat = tl.load(temperature_ptr + row)
    if heat > 0.0:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        min_p = tl.load(min_p_ptr + row).to(tl.float64)
        share = uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            bits, ties, mass = cutoff(logits_ptr, best, heat, top_k, top_p, min_p, V, BLOCK)
            target = share * mass
            last, heavier = descend(logits_ptr, best, heat, target, False, V, BLOCK)
            last = tl.maximum(last, bits)
            own = last.to(tl.float32, bitcast=True).to(tl.float64)
            rank = tl.maximum(tl.floor((target - heavier) / own), 0.0).to(tl.int32)
            rank = tl.where(last == bits, tl.minimum(rank, ties - 1), rank)
            token = nth_equal(logits_ptr, best, heat, last, rank, token, V, BLOCK)
        else:
            token = pick_in_order(logits_ptr, best, heat, share, token, V, BLOCK)
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def filtered_probs_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    out_ptr: tl.tensor,
    STRIDE_R: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Distribution of this program's row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * STRIDE_R
    out_ptr += row * V
    best, greedy = best_token(logits_ptr, V, BLOCK)
    heat = tl.load(temperature_ptr + row)
    if heat > 0.0:
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        min_p = tl.load(min_p_ptr + row).to(tl.float64)
        bits, ties, total = cutoff(logits_ptr, best, heat, tl.load(top_k_ptr + row), top_p, min_p, V, BLOCK)
        seen = tl.cast(0, tl.int32)
        for start in range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            mass = load_mass(logits_ptr, token, best, heat, V)
            own = mass.to(tl.int32, bitcast=True)
            same = (own == bits).to(tl.int32)
            kept = (own > bits) | ((same == 1) & (tl.cumsum(same, axis=0) + seen <= ties))
            share = tl.where(kept, mass.to(tl.float64) / total, 0.0).to(tl.float32)
            tl.store(out_ptr + token, share, mask=token < V)
            seen += tl.sum(same, axis=0)
    else:
        for start in range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            tl.store(out_ptr + token, tl.where(token == greedy, 1.0, 0.0), mask=token < V)


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    """One token per row: (R,) int64; arguments and meaning as ``sample_ref``.

    Args:
        logits_RV: (R, V) float32; rows may have gaps between them. -inf and NaN are never drawn.
        temperature_R, top_p_R, min_p_R: (R,) float.
        top_k_R, seed_R, position_R: (R,) int64.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: running sums in float64 over fixed blocks; ties go to the lower token. A row's result depends on that row
    alone. The token is the reference's unless the draw falls within the rounding of a running sum. A row without a
    finite mass takes its best token; the result always lies in the vocabulary.
    """
    floats, top_k = _check(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    rows, vocabulary = logits_RV.shape
    for name, value in (("seed_R", seed_R), ("position_R", position_R)):
        check_tensor(name, value, _INT64, (rows,), like=logits_RV)
        check_contiguous(name, value)
    out_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        heat, top_p, min_p = floats
        sample_kernel[(rows,)](
            logits_RV,
            heat,
            top_k,
            top_p,
            min_p,
            seed_R,
            position_R,
            out_R,
            STRIDE_R=logits_RV.stride(0),
            V=vocabulary,
            BLOCK=block_of(vocabulary),
            num_warps=8,
        )
    return out_R


def filtered_probs(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> Tensor:
    """Distribution that ``sample`` draws from: (R, V) float32; arguments as ``sample``.

    Raises:
        LaunchRefusedError: As ``sample``.

    Numerics: as ``sample``; each share is one float64 division, rounded once.
    """
    floats, top_k = _check(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    rows, vocabulary = logits_RV.shape
    out_RV = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits_RV.device)
    if rows:
        heat, top_p, min_p = floats
        filtered_probs_kernel[(rows,)](
            logits_RV,
            heat,
            top_k,
            top_p,
            min_p,
            out_RV,
            STRIDE_R=logits_RV.stride(0),
            V=vocabulary,
            BLOCK=block_of(vocabulary),
            num_warps=8,
        )
    return out_RV


def _check(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> tuple[list[Tensor], Tensor]:
    """The row's settings: floats as float32, the reference's precision but for top-p and min-p given as float64."""
    check_tensor("logits_RV", logits_RV, (torch.float32,), (None, None))
    rows, vocabulary = logits_RV.shape
    if not 0 < vocabulary <= _MAX_VOCABULARY:
        raise LaunchRefusedError(f"a vocabulary of {vocabulary}, 1 .. {_MAX_VOCABULARY} are taken")
    check_tensor("top_k_R", top_k_R, _INT64, (rows,), like=logits_RV)
    check_contiguous("top_k_R", top_k_R)
    floats = []
    for name, value in (("temperature_R", temperature_R), ("top_p_R", top_p_R), ("min_p_R", min_p_R)):
        check_tensor(name, value, (torch.float32, torch.float64), (rows,), like=logits_RV)
        check_contiguous(name, value)
        floats.append(value)
    return [floats[0].float(), *floats[1:]], top_k_R


def _entry(name: str, kernel: object, rows: int) -> Entry:
    samples = name == "sample"
    signature = {"logits_ptr": "*fp32", "temperature_ptr": "*fp32", "top_k_ptr": "*i64"}
    signature |= {"top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "out_ptr": "*i64" if samples else "*fp32"}
    if samples:
        signature |= {"seed_ptr": "*i64", "position_ptr": "*i64"}
    return Entry(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs={"STRIDE_R": VOCABULARY, "V": VOCABULARY, "BLOCK": block_of(VOCABULARY)},
        num_warps=8,
        spill_reason=""
        if samples
        else "8 bytes on sm_100, touched once a row beside some twenty passes over it",
        work=(Work(f"R={rows}", bytes_moved=rows * VOCABULARY * 4 * (1 if samples else 2)),),
    )


ENTRIES: Final = (
    _entry("sample", sample_kernel, 32),
    _entry("filtered probabilities", filtered_probs_kernel, 32),
)
