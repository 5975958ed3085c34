"""N-gram table rows on a GPU: a program a few tokens, all integers."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.catalogue import Entry, Work
from epdserve.kernels.launch import LaunchRefusedError, check_contiguous, check_tensor, next_power_of_2
from torch import Tensor

_TOKENS: Final = 32  # of a program
_INT64: Final = (torch.int64,)


@triton.jit(do_not_specialize=["tokens", "pad_id"])
def ngram_rows_kernel(
    compressed_ptr: tl.tensor,
    multipliers_ptr: tl.tensor,
    primes_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: tl.tensor,
    pad_id: tl.tensor,
    STRIDE_T: tl.constexpr,
    ORDERS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """roll = XOR of id * multiplier, looking back; row of a head = roll mod its prime, behind its offset."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.arange(0, BLOCK)[None, :]
    live = token < tokens
    blocked = token < 0
    rolled = tl.zeros((TOKENS,), tl.int64)
    for back in tl.static_range(ORDERS + 1):
        own = tl.load(compressed_ptr + token * STRIDE_T + back, mask=live, other=0)
        blocked = blocked | (own < 0)  # a block hides everything behind it
        rolled = rolled ^ (tl.where(blocked, pad_id, own) * tl.load(multipliers_ptr + back))
        if back > 0:
            column = (back - 1) * HEADS + head
            prime = tl.load(primes_ptr + column, mask=head < HEADS, other=1)
            rest = rolled[:, None] % prime
            rest = tl.where(rest < 0, rest + prime, rest)
            row = rest + tl.load(offsets_ptr + column, mask=head < HEADS, other=0)
            target = out_ptr + token[:, None] * (ORDERS * HEADS) + column
            tl.store(target, row, mask=live[:, None] & (head < HEADS))


def ngram_rows(
    compressed_TS: Tensor, pad_id: int, multipliers_S: Tensor, primes_GH: Tensor, offsets: Tensor
) -> Tensor:
    """Table rows of each token's n-grams: (T, G * heads) int64; arguments as ``ngram_rows_ref``.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: bitwise equal to ``ngram_rows_ref``; 64-bit integers that wrap. A token depends on its own row alone.
    """
    orders, heads = primes_GH.shape
    check_tensor("compressed_TS", compressed_TS, _INT64, (None, orders + 1))
    for name, constant, shape in (
        ("multipliers_S", multipliers_S, (orders + 1,)),
        ("primes_GH", primes_GH, (orders, heads)),
        ("offsets", offsets, (orders * heads,)),
    ):
        check_tensor(name, constant, _INT64, shape, like=compressed_TS)
        check_contiguous(name, constant)
    if pad_id < 0:
        raise LaunchRefusedError(f"pad_id must be a compressed id, got {pad_id}")
    tokens = compressed_TS.shape[0]
    out = torch.empty(tokens, orders * heads, dtype=torch.int64, device=compressed_TS.device)
    if out.numel():
        ngram_rows_kernel[(triton.cdiv(tokens, _TOKENS),)](
            compressed_TS,
            multipliers_S,
            primes_GH,
            offsets,
            out,
            tokens,
            pad_id,
            STRIDE_T=compressed_TS.stride(0),
            ORDERS=orders,
            HEADS=heads,
            TOKENS=_TOKENS,
            BLOCK=next_power_of_2(heads),
            num_warps=4,
        )
    return out


ENTRIES: Final = (
    Entry(
        name="engram hash",
        kernel=ngram_rows_kernel,
        signature={
            f"{name}_ptr": "*i64" for name in ("compressed", "multipliers", "primes", "offsets", "out")
        }
        | {"tokens": "i32", "pad_id": "i32"},
        constexprs={"STRIDE_T": 4, "ORDERS": 3, "HEADS": 8, "TOKENS": _TOKENS, "BLOCK": 8},
        work=(Work("T=8192", bytes_moved=8192 * 8 * (4 + 24)),),
    ),
)
