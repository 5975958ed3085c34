"""Single-pass hyper-connections on a GPU: everything that touches the residual streams, in one pass over them.

Between two sub-blocks the streams are read once and written once: their update by the last sub-block's output, the
collapse into the next one's input, and the projection that predicts the next coefficients all use a tile while it is
in registers. A row's channels are cut into fixed parts, so that a decode step of one row still occupies many
processors; each part writes its share of the projection, and ``coefficients.py`` adds the shares in order.
"""

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
from epdserve.kernels.mhc.coefficients import MIXES, PARTIAL, coefficients_of
from epdserve.kernels.quant.codes import narrow
from torch import Tensor

_ROWS: Final = 16  # of a program
_PART: Final = 256  # channels of a program
_CHUNK: Final = 32  # channels in registers at a time
_STAGES: Final = 1  # one product a copy: nothing to load ahead
_FLOAT32: Final = (torch.float32,)


@triton.jit
def load_rows(
    ptr: tl.tensor, row: tl.tensor, STRIDE: tl.constexpr, channel: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """A tile (rows, channels) as float32; zeros outside."""
    return tl.load(ptr + row[:, None] * STRIDE + channel[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_column(ptr: tl.tensor, row: tl.tensor, WIDTH: tl.constexpr, live: tl.tensor) -> tl.tensor:
    """One coefficient of each row, (rows, 1)."""
    return tl.load(ptr + row * WIDTH, mask=live, other=0.0)[:, None]


@triton.jit(do_not_specialize=["rows"])
def streams_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    post_ptr: tl.tensor,
    comb_ptr: tl.tensor,
    pre_ptr: tl.tensor,
    fn_ptr: tl.tensor,
    new_ptr: tl.tensor,
    collapsed_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    rows: tl.tensor,
    STRIDE_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    D: tl.constexpr,
    EXPAND: tl.constexpr,
    COLLAPSE: tl.constexpr,
    PREDICT: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    MIXES: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """new[j] = post[j] y + sum_i comb[i, j] x[i]; collapsed = sum_j pre[j] new[j]; shares of fn . new and |new|**2."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    live = row < rows
    mix = tl.arange(0, PARTIAL)
    mixes = tl.zeros((ROWS, PARTIAL), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, PART, CHUNK):
        channel = part * PART + start + tl.arange(0, CHUNK)
        inside = live[:, None] & (channel < D)[None, :]
        if EXPAND:
            x0 = load_rows(x_ptr, row, STRIDE_X, channel, inside)
            x1 = load_rows(x_ptr + D, row, STRIDE_X, channel, inside)
            x2 = load_rows(x_ptr + 2 * D, row, STRIDE_X, channel, inside)
            x3 = load_rows(x_ptr + 3 * D, row, STRIDE_X, channel, inside)
            y = load_rows(y_ptr, row, STRIDE_Y, channel, inside)
        collapsed = tl.zeros((ROWS, CHUNK), tl.float32)
        for j in range(4):  # not unrolled: four products at once do not fit the registers
            if EXPAND:
                new = load_column(comb_ptr + j, row, 16, live) * x0
                new += load_column(comb_ptr + 4 + j, row, 16, live) * x1
                new += load_column(comb_ptr + 8 + j, row, 16, live) * x2
                new += load_column(comb_ptr + 12 + j, row, 16, live) * x3
                new = load_column(post_ptr + j, row, 4, live) * y + new
                stored = narrow(new, new_ptr.dtype.element_ty)
                tl.store(new_ptr + row[:, None] * (4 * D) + j * D + channel[None, :], stored, mask=inside)
                new = stored.to(tl.float32)
            else:
                new = load_rows(x_ptr + j * D, row, STRIDE_X, channel, inside)
            if COLLAPSE:
                collapsed += load_column(pre_ptr + j, row, 4, live) * new
            if PREDICT:
                squares += tl.sum(new * new, axis=1)
                weight = fn_ptr + mix[None, :] * (4 * D) + j * D + channel[:, None]
                fn = tl.load(weight, mask=(mix < MIXES)[None, :] & (channel < D)[:, None], other=0.0)
                mixes = tl.dot(new, fn, mixes, input_precision=PRECISION)
        if COLLAPSE:
            target = collapsed_ptr + row[:, None] * D + channel[None, :]
            tl.store(target, narrow(collapsed, collapsed_ptr.dtype.element_ty), mask=inside)
    if PREDICT:
        share = tl.where((mix == MIXES)[None, :], squares[:, None], mixes)
        target = partial_ptr + (row[:, None] * PARTS + part) * PARTIAL + mix[None, :]
        tl.store(target, share, mask=live[:, None])


def hyper_coefficients(
    streams_TnD: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    iters: int,
    hc_eps: float,
    norm_eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients that the streams predict for one sub-layer; arguments and result as ``hyper_coefficients_ref``.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take; other than four copies.

    Numerics: float32 products of three TF32 products each, summed over fixed parts in order; bfloat16 streams are
    exact in the first of them, so the error is that of rounding ``fn`` to 22 bits. See ``coefficients`` for the rest.
    A row depends on itself alone.
    """
    streams_TnD = _check_streams(streams_TnD)
    _check_projection(streams_TnD, fn)
    partial = _launch(streams_TnD, fn=fn).partial
    return coefficients_of(partial, streams_TnD.shape[2], scale, base, iters, hc_eps, norm_eps)


def collapse(streams_TnD: Tensor, pre_Tn: Tensor) -> Tensor:
    """Sub-layer input (T, D): the streams weighted by the carried ``pre`` and summed; dtype of the streams.

    Raises:
        LaunchRefusedError: As ``hyper_coefficients``.

    Numerics: float32, copies in order, one cast. A row depends on itself alone.
    """
    streams_TnD = _check_streams(streams_TnD)
    _check_rows("pre_Tn", pre_Tn, streams_TnD, (COPIES,))
    return _launch(streams_TnD, pre=pre_Tn).collapsed


def expand(streams_TnD: Tensor, out_TD: Tensor, post_Tn: Tensor, comb_Tnn: Tensor) -> Tensor:
    """New streams (T, n, D): ``post[j] * out + sum_i comb[i, j] * streams[i]``; dtype of the streams.

    Raises:
        LaunchRefusedError: As ``hyper_coefficients``.

    Numerics: float32, copies in order, one cast. A row depends on itself alone.
    """
    streams_TnD = _check_streams(streams_TnD)
    out_TD = _check_update(streams_TnD, out_TD, post_Tn, comb_Tnn)
    return _launch(streams_TnD, update=(out_TD, post_Tn, comb_Tnn)).new


def advance(
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
    """From one sub-block to the next in one pass over the streams; arguments and result as ``advance_ref``.

    Reads (n + 1) D and writes (n + 1) D values a row, and a fiftieth of that for the shares of the projection.

    Raises:
        LaunchRefusedError: As ``hyper_coefficients``.

    Numerics: those of ``expand``, ``collapse`` and ``hyper_coefficients`` one after the other, to the bit.
    """
    streams_TnD = _check_streams(streams_TnD)
    out_TD = _check_update(streams_TnD, out_TD, post_Tn, comb_Tnn)
    _check_rows("pre_Tn", pre_Tn, streams_TnD, (COPIES,))
    _check_projection(streams_TnD, fn)
    done = _launch(streams_TnD, update=(out_TD, post_Tn, comb_Tnn), pre=pre_Tn, fn=fn)
    coefficients = coefficients_of(done.partial, streams_TnD.shape[2], scale, base, iters, hc_eps, norm_eps)
    return done.new, done.collapsed, coefficients


class _Outputs:
    """What one pass may write; what it does not is empty."""

    def __init__(self, streams: Tensor, *, expands: bool, collapses: bool, predicts: bool) -> None:
        rows, _, channels = streams.shape
        parts = triton.cdiv(channels, _part(channels)) if predicts else 0
        self.new = streams.new_empty((rows if expands else 0, COPIES, channels))
        self.collapsed = streams.new_empty((rows if collapses else 0, channels))
        self.partial = torch.empty((rows, parts, PARTIAL), dtype=torch.float32, device=streams.device)


def _launch(
    streams: Tensor,
    *,
    update: tuple[Tensor, Tensor, Tensor] | None = None,
    pre: Tensor | None = None,
    fn: Tensor | None = None,
) -> _Outputs:
    expands, collapses, predicts = update is not None, pre is not None, fn is not None
    done = _Outputs(streams, expands=expands, collapses=collapses, predicts=predicts)
    rows, _, channels = streams.shape
    out, post, comb = update or (streams, streams, streams)
    if rows:
        streams_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(channels, _part(channels)))](
            streams,
            out,
            post,
            comb,
            streams if pre is None else pre,
            streams if fn is None else fn,
            done.new,
            done.collapsed,
            done.partial,
            rows,
            **_constexprs(channels, streams.stride(0), out.stride(0)),
            EXPAND=expands,
            COLLAPSE=collapses,
            PREDICT=predicts,
            num_warps=4,
            num_stages=_STAGES,
        )
    return done


def _part(channels: int) -> int:
    return min(_PART, max(_CHUNK, next_power_of_2(channels)))


def _constexprs(channels: int, stride_x: int, stride_y: int) -> dict[str, int | str]:
    return {
        "STRIDE_X": stride_x,
        "STRIDE_Y": stride_y,
        "D": channels,
        "PARTS": triton.cdiv(channels, _part(channels)),
        "PART": _part(channels),
        "CHUNK": _CHUNK,
        "ROWS": _ROWS,
        "MIXES": MIXES,
        "PARTIAL": PARTIAL,
        "PRECISION": "ieee" if torch.version.hip else "tf32x3",
    }


def _check_streams(streams_TnD: Tensor) -> Tensor:
    check_tensor("streams_TnD", streams_TnD, FLOATS, (None, COPIES, None))
    rows, _, channels = streams_TnD.shape
    if rows and channels and streams_TnD.stride(1) != channels:
        raise LaunchRefusedError(f"copies must lie side by side, got strides {streams_TnD.stride()}")
    if channels <= 0:
        raise LaunchRefusedError(f"streams have {channels} channels")
    return aligned_rows(streams_TnD)


def _check_update(streams: Tensor, out_TD: Tensor, post_Tn: Tensor, comb_Tnn: Tensor) -> Tensor:
    check_tensor("out_TD", out_TD, FLOATS, (streams.shape[0], streams.shape[2]), like=streams)
    _check_rows("post_Tn", post_Tn, streams, (COPIES,))
    _check_rows("comb_Tnn", comb_Tnn, streams, (COPIES, COPIES))
    return aligned_rows(out_TD)


def _check_rows(name: str, tensor: Tensor, streams: Tensor, shape: tuple[int, ...]) -> None:
    check_tensor(name, tensor, _FLOAT32, (streams.shape[0], *shape), like=streams)
    check_contiguous(name, tensor)


def _check_projection(streams: Tensor, fn: Tensor) -> None:
    check_tensor("fn", fn, _FLOAT32, (MIXES, COPIES * streams.shape[2]), like=streams)
    check_contiguous("fn", fn)


def _entry(name: str, *, expands: bool, collapses: bool, predicts: bool) -> Entry:
    pointers = {"x_ptr": "*bf16", "y_ptr": "*bf16", "new_ptr": "*bf16", "collapsed_ptr": "*bf16"}
    floats = {f"{part}_ptr": "*fp32" for part in ("post", "comb", "pre", "fn", "partial")}
    parts = triton.cdiv(HIDDEN, _part(HIDDEN))
    moved = COPIES * (1 + expands) + expands + collapses  # rows of D, in and out
    fixed = 4 * MIXES * COPIES * HIDDEN * predicts
    flops = COPIES * HIDDEN * (2 * (COPIES + 1) * expands + 2 * collapses + (2 + 3 * 2 * MIXES) * predicts)
    return Entry(
        name=name,
        kernel=streams_kernel,
        signature=pointers | floats | {"rows": "i32"},
        constexprs=_constexprs(HIDDEN, COPIES * HIDDEN, HIDDEN)
        | {"EXPAND": expands, "COLLAPSE": collapses, "PREDICT": predicts},
        num_stages=_STAGES,
        not_for={"gfx942": "no tf32x3 there; the launcher takes float32 products"} if predicts else {},
        work=tuple(
            Work(
                f"T={rows}",
                bytes_moved=rows * (2 * HIDDEN * moved + 4 * PARTIAL * parts * predicts + 96) + fixed,
                flops=rows * flops,
                rate="tf32" if predicts else "fp32",
            )
            for rows in (8192, 32, 1)
        ),
    )


ENTRIES: Final = (
    _entry("mhc advance", expands=True, collapses=True, predicts=True),
    _entry("mhc predict", expands=False, collapses=False, predicts=True),
    _entry("mhc expand", expands=True, collapses=False, predicts=False),
    _entry("mhc collapse", expands=False, collapses=True, predicts=False),
)
