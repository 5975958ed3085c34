"""Ratio-2 compression on a GPU: two tokens pooled into an entry, and the open pair kept for the next step."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.catalogue import LATENT, Entry, Work
from epdserve.kernels.launch import (
    INDICES,
    LaunchRefusedError,
    check_contiguous,
    check_indices,
    check_tensor,
    next_power_of_2,
)
from torch import Tensor

_FLOAT32: Final = (torch.float32,)
_BLOCK: Final = 1024  # channels of a program


@triton.jit
def pooled(c0: tl.tensor, z0: tl.tensor, c1: tl.tensor, z1: tl.tensor) -> tl.tensor:
    """Values weighted by the softmax of their two gates; an exponential may overflow, the weight is 0 then."""
    first = tl.div_rn(1.0, 1.0 + tl.exp(z1 - z0))
    second = tl.div_rn(1.0, 1.0 + tl.exp(z0 - z1))
    return first * c0 + second * c1


@triton.jit
def pool_pairs_kernel(
    c0_ptr: tl.tensor,
    z0_ptr: tl.tensor,
    c1_ptr: tl.tensor,
    z1_ptr: tl.tensor,
    out_ptr: tl.tensor,
    STRIDE_C0: tl.constexpr,
    STRIDE_Z0: tl.constexpr,
    STRIDE_C1: tl.constexpr,
    STRIDE_Z1: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Row of this program."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < D
    c0 = tl.load(c0_ptr + row * STRIDE_C0 + channel, mask=mask, other=0.0)
    z0 = tl.load(z0_ptr + row * STRIDE_Z0 + channel, mask=mask, other=0.0)
    c1 = tl.load(c1_ptr + row * STRIDE_C1 + channel, mask=mask, other=0.0)
    z1 = tl.load(z1_ptr + row * STRIDE_Z1 + channel, mask=mask, other=0.0)
    tl.store(out_ptr + row * D + channel, pooled(c0, z0, c1, z1), mask=mask)


@triton.jit(do_not_specialize=["rows", "slots"])
def pool_entries_kernel(
    content_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    open_ptr: tl.tensor,
    opening_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    closing_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    STRIDE_C: tl.constexpr,
    STRIDE_Z: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Entry of this program: its opening token is a row of this step or, for a slot >= 0, the pair kept there."""
    entry = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    closing = tl.load(closing_ptr + entry).to(tl.int64)
    opening = tl.load(opening_ptr + entry).to(tl.int64)
    slot = tl.load(slot_ptr + entry).to(tl.int64)
    # A token that is nowhere has no channels: zeros
    kept = channel < tl.where((slot >= 0) & (slot < slots), D, 0)
    given = channel < tl.where((slot < 0) & (opening >= 0) & (opening < rows), D, 0)
    ends = channel < tl.where((closing >= 0) & (closing < rows), D, 0)
    pair = open_ptr + slot * 2 * D + channel
    c0 = tl.load(content_ptr + opening * STRIDE_C + channel, mask=given, other=0.0)
    z0 = tl.load(gate_ptr + opening * STRIDE_Z + channel, mask=given, other=0.0)
    c0 = tl.where(kept, tl.load(pair, mask=kept, other=0.0), c0)
    z0 = tl.where(kept, tl.load(pair + D, mask=kept, other=0.0), z0)
    c1 = tl.load(content_ptr + closing * STRIDE_C + channel, mask=ends, other=0.0)
    z1 = tl.load(gate_ptr + closing * STRIDE_Z + channel, mask=ends, other=0.0)
    tl.store(out_ptr + entry * D + channel, pooled(c0, z0, c1, z1), mask=channel < D)


@triton.jit(do_not_specialize=["rows", "slots"])
def keep_pairs_kernel(
    content_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    open_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    row_ptr: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    STRIDE_C: tl.constexpr,
    STRIDE_Z: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Content and gate of a row, kept in a slot."""
    number = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + number).to(tl.int64)
    slot = tl.load(slot_ptr + number).to(tl.int64)
    mask = channel < tl.where((row >= 0) & (row < rows) & (slot >= 0) & (slot < slots), D, 0)
    pair = open_ptr + slot * 2 * D + channel
    tl.store(pair, tl.load(content_ptr + row * STRIDE_C + channel, mask=mask, other=0.0), mask=mask)
    tl.store(pair + D, tl.load(gate_ptr + row * STRIDE_Z + channel, mask=mask, other=0.0), mask=mask)


def pool_pairs(c0: Tensor, z0: Tensor, c1: Tensor, z1: Tensor) -> Tensor:
    """Two tokens as one entry: a softmax over the two gates ``z`` weights the values ``c``, channel by channel.

    Args:
        c0, z0, c1, z1: (..., D) float32, of one shape; rows may have gaps between them.

    Returns:
        The same shape, contiguous.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: element by element, so nothing depends on the batch. Against the reference only the exponential may
    differ, by one unit in the last place. A gate of infinity takes all weight; two of the same give NaN.
    """
    parts = []
    for name, part in (("c0", c0), ("z0", z0), ("c1", c1), ("z1", z1)):
        flat = part.reshape(-1, part.shape[-1]) if part.dim() != 2 else part
        check_tensor(name, flat, _FLOAT32, (c0.shape[:-1].numel(), c0.shape[-1]), like=c0)
        parts.append(flat)
    rows, channels = parts[0].shape
    out = torch.empty(rows, channels, dtype=torch.float32, device=c0.device)
    if out.numel():
        block = min(_BLOCK, next_power_of_2(channels))
        strides = dict(
            zip(("STRIDE_C0", "STRIDE_Z0", "STRIDE_C1", "STRIDE_Z1"), map(_stride, parts), strict=True)
        )
        pool_pairs_kernel[(rows, triton.cdiv(channels, block))](
            *parts, out, **strides, D=channels, BLOCK=block, num_warps=_warps(block)
        )
    return out.view(c0.shape)


def pool_entries(
    content_TD: Tensor,
    gate_TD: Tensor,
    open_S2D: Tensor,
    opening_N: Tensor,
    slot_N: Tensor,
    closing_N: Tensor,
    keep_slot_M: Tensor,
    keep_row_M: Tensor,
) -> Tensor:
    """Entries that close in this step: (N, D) float32; then keeps the tokens that open one. See the reference.

    Args:
        content_TD, gate_TD: (T, D) float32 of this step's rows; rows may have gaps between them.
        open_S2D: (slots, 2, D) float32, contiguous, changed: content and gate of the token that opened a group.
        opening_N, closing_N: (N,) rows of each entry's two tokens; ``opening`` means nothing where there is a slot.
        slot_N: (N,) slot whose kept token opened the entry; negative for a row of this step.
        keep_slot_M, keep_row_M: (M,) slots that keep a row, none twice; a negative one keeps nothing.

    Raises:
        LaunchRefusedError: As ``pool_pairs``; an index out of range, where indices are looked at (see ``launch``).

    Numerics: as ``pool_pairs``. Slots are read before they are written: two launches.
    """
    rows, channels = _check_step(content_TD, gate_TD, open_S2D)
    slots = open_S2D.shape[0]
    for name, index, limit, least in (
        ("opening", opening_N, rows, -(2**62)),
        ("slot", slot_N, slots, -(2**62)),
        ("closing", closing_N, rows, 0),
    ):
        check_tensor(name, index, INDICES, (closing_N.numel(),), like=content_TD)
        check_indices(name, index, limit=limit, least=least)
    for name, index, limit, least in (
        ("keep_slot", keep_slot_M, slots, -(2**62)),
        ("keep_row", keep_row_M, rows, 0),
    ):
        check_tensor(name, index, INDICES, (keep_row_M.numel(),), like=content_TD)
        check_indices(name, index, limit=limit, least=least)
    out = torch.empty(closing_N.numel(), channels, dtype=torch.float32, device=content_TD.device)
    block = min(_BLOCK, next_power_of_2(channels))
    shape = {
        "STRIDE_C": _stride(content_TD),
        "STRIDE_Z": _stride(gate_TD),
        "D": channels,
        "BLOCK": block,
        "num_warps": _warps(block),
    }
    across = triton.cdiv(channels, block)
    if out.numel():
        pool_entries_kernel[(out.shape[0], across)](
            content_TD, gate_TD, open_S2D, opening_N, slot_N, closing_N, out, rows, slots, **shape
        )
    if keep_row_M.numel() and channels:
        keep_pairs_kernel[(keep_row_M.numel(), across)](
            content_TD, gate_TD, open_S2D, keep_slot_M, keep_row_M, rows, slots, **shape
        )
    return out


def _check_step(content_TD: Tensor, gate_TD: Tensor, open_S2D: Tensor) -> tuple[int, int]:
    check_tensor("content", content_TD, _FLOAT32, (None, None))
    rows, channels = content_TD.shape
    check_tensor("gate", gate_TD, _FLOAT32, (rows, channels), like=content_TD)
    check_tensor("open", open_S2D, _FLOAT32, (None, 2, channels), like=content_TD)
    check_contiguous("open", open_S2D)
    if channels <= 0:
        raise LaunchRefusedError(f"content has {channels} channels")
    return rows, channels


def _stride(rows_TD: Tensor) -> int:
    return rows_TD.stride(0)


def _warps(block: int) -> int:
    return max(1, min(4, block // 256))


def _entry(name: str, kernel: object, arguments: str, rows: int) -> Entry:
    signature = {argument: "*i64" for argument in arguments.split()}
    floats = {pointer: "*fp32" for pointer in ("content_ptr", "gate_ptr", "open_ptr")}
    counts = {"rows": "i32", "slots": "i32"}
    return Entry(
        name=name,
        kernel=kernel,
        signature=floats | signature | counts | ({"out_ptr": "*fp32"} if "closing_ptr" in signature else {}),
        constexprs={"STRIDE_C": 2 * LATENT, "STRIDE_Z": 2 * LATENT, "D": LATENT, "BLOCK": LATENT},
        num_warps=_warps(LATENT),
        work=(
            Work(f"{rows} entries", bytes_moved=rows * LATENT * 4 * (5 if "closing_ptr" in signature else 4)),
        ),
    )


ENTRIES: Final = (
    _entry("pool entries", pool_entries_kernel, "opening_ptr slot_ptr closing_ptr", 4096),
    _entry("keep open pairs", keep_pairs_kernel, "slot_ptr row_ptr", 128),
    Entry(
        name="pool pairs",
        kernel=pool_pairs_kernel,
        signature={f"{part}_ptr": "*fp32" for part in ("c0", "z0", "c1", "z1", "out")},
        constexprs={f"STRIDE_{part}": LATENT for part in ("C0", "Z0", "C1", "Z1")}
        | {"D": LATENT, "BLOCK": LATENT},
        num_warps=_warps(LATENT),
        work=(Work("4096 entries", bytes_moved=4096 * LATENT * 20),),
    ),
)
