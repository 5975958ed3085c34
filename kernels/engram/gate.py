"""Injection of the looked-up memory on a GPU: a program a residual copy of a token."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.catalogue import COPIES, HIDDEN, Entry, Work
from epdserve.kernels.launch import (
    FLOATS,
    LaunchRefusedError,
    aligned_rows,
    check_contiguous,
    check_tensor,
    next_power_of_2,
)
from epdserve.kernels.quant.codes import narrow
from torch import Tensor

_MAX_CHANNELS: Final = 16_384
_FLOOR: Final = tl.constexpr(1e-6)


@triton.jit
def engram_gate_kernel(
    streams_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    value_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    blocked_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    width_root: tl.tensor,
    STREAM_T: tl.constexpr,
    KEY_T: tl.constexpr,
    VALUE_T: tl.constexpr,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    BLOCKED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """x + sigmoid(signed root of <norm(x) q, norm(key) k> / sqrt(D)) * value, for one copy of one token."""
    token, copy = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    mask = channel < D
    own = copy * D + channel
    given = tl.load(streams_ptr + token * STREAM_T + own, mask=mask, other=0.0)
    x = given.to(tl.float32)
    key = tl.load(keys_ptr + token * KEY_T + own, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + token * VALUE_T + channel, mask=mask, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + own, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + own, mask=mask, other=0.0).to(tl.float32)
    rate_x = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, axis=0), D * 1.0) + eps))
    rate_k = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(key * key, axis=0), D * 1.0) + eps))
    dot = tl.sum(x * key * (q * k), axis=0) * (rate_x * rate_k) * width_root
    root = tl.sqrt_rn(tl.maximum(tl.abs(dot), _FLOOR))
    negative = (
        dot.to(tl.int32, bitcast=True) < 0
    )  # a dot product of -0.0 counts as negative, as copysign has it
    gate = tl.div_rn(1.0, 1.0 + tl.exp(tl.where(negative, root, -root)))
    out = narrow(x + gate * value, out_ptr.dtype.element_ty)
    if BLOCKED:
        out = tl.where(tl.load(blocked_ptr + token) != 0, given, out)
    tl.store(out_ptr + token * COPIES * D + own, out, mask=mask)


def engram_gate(
    streams_TnD: Tensor,
    keys_TnD: Tensor,
    value_TD: Tensor,
    q_weight_nD: Tensor,
    k_weight_nD: Tensor,
    eps: float,
    blocked_T: Tensor | None = None,
) -> Tensor:
    """Streams (T, n, D) after the injection of the memory value; dtype of the streams. See ``engram_gate_ref``.

    Args:
        streams_TnD, keys_TnD: Any float dtype; tokens may have gaps between them, copies may not.
        value_TD: Any float dtype; rows may have gaps between them.
        q_weight_nD, k_weight_nD: Any float dtype, contiguous.
        eps: Added to mean squares.
        blocked_T: (T,) bool, contiguous; these rows come back unchanged, to the bit.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take, or more than 16,384 channels.

    Numerics: float32 inside, sums as fixed trees, IEEE division and root, one final cast. A row depends on itself
    alone. A NaN in a row makes its copy NaN; blocked rows are not computed with.
    """
    check_tensor("streams_TnD", streams_TnD, FLOATS, (None, None, None))
    tokens, copies, channels = streams_TnD.shape
    check_tensor("keys_TnD", keys_TnD, FLOATS, (tokens, copies, channels), like=streams_TnD)
    check_tensor("value_TD", value_TD, FLOATS, (tokens, channels), like=streams_TnD)
    for name, weight in (("q_weight_nD", q_weight_nD), ("k_weight_nD", k_weight_nD)):
        check_tensor(name, weight, FLOATS, (copies, channels), like=streams_TnD)
        check_contiguous(name, weight)
    if blocked_T is not None:
        check_tensor("blocked_T", blocked_T, (torch.bool,), (tokens,), like=streams_TnD)
        check_contiguous("blocked_T", blocked_T)
    if channels > _MAX_CHANNELS:
        raise LaunchRefusedError(f"streams have {channels} channels, {_MAX_CHANNELS} are taken")
    for name, part in (("streams_TnD", streams_TnD), ("keys_TnD", keys_TnD)):
        if tokens and copies > 1 and part.stride(1) != channels:
            raise LaunchRefusedError(f"copies of {name} must lie side by side, got strides {part.stride()}")
    streams_TnD, keys_TnD, value_TD = map(aligned_rows, (streams_TnD, keys_TnD, value_TD))
    out = torch.empty((tokens, copies, channels), dtype=streams_TnD.dtype, device=streams_TnD.device)
    if out.numel():
        block = next_power_of_2(channels)
        engram_gate_kernel[(tokens, copies)](
            streams_TnD,
            keys_TnD,
            value_TD,
            q_weight_nD,
            k_weight_nD,
            streams_TnD if blocked_T is None else blocked_T.view(torch.uint8),
            out,
            eps,
            channels**-0.5,
            STREAM_T=streams_TnD.stride(0),
            KEY_T=keys_TnD.stride(0),
            VALUE_T=value_TD.stride(0),
            COPIES=copies,
            D=channels,
            BLOCKED=blocked_T is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return out


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


_BLOCK_HIDDEN: Final = next_power_of_2(HIDDEN)
ENTRIES: Final = (
    Entry(
        name="engram gate",
        kernel=engram_gate_kernel,
        signature={f"{name}_ptr": "*bf16" for name in ("streams", "keys", "value", "q", "k", "out")}
        | {"blocked_ptr": "*u8", "eps": "fp32", "width_root": "fp32"},
        constexprs={
            "STREAM_T": COPIES * HIDDEN,
            "KEY_T": (COPIES + 1) * HIDDEN,
            "VALUE_T": (COPIES + 1) * HIDDEN,
            "COPIES": COPIES,
            "D": HIDDEN,
            "BLOCKED": True,
            "BLOCK": _BLOCK_HIDDEN,
        },
        num_warps=_warps(_BLOCK_HIDDEN),
        work=tuple(
            Work(
                f"T={tokens}",
                bytes_moved=tokens * 2 * HIDDEN * (3 * COPIES + 1) + 4 * COPIES * HIDDEN,
                flops=tokens * COPIES * HIDDEN * 10,
            )
            for tokens in (8192, 32)
        ),
    ),
)
