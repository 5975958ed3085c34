"""Functions of rows that take one call on the host: stand-ins for references, in native code.

A decode step of a small model is thousands of small tensor operations, and what each costs is the call. These take a
whole function at once (``native.c``). ``dispatch.py`` asks for them by the reference. What they do not take, other
dtypes, gradients, tensors without memory, goes to the reference; so does everything where the module was not built.
Nothing is chosen by strides or by the number of rows, so a row's bits depend on that row alone, here as there. The two
differ in the last bits of sums and exponentials, except for number formats, which are equal to the bit.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Final, TypeGuard

import torch
from epdserve.kernels.linear.reference import linear_ref
from epdserve.kernels.mhc import reference as mhc
from epdserve.kernels.moe import reference as moe
from epdserve.kernels.norm import reference as norm
from epdserve.kernels.quant import reference as quant
from epdserve.kernels.rope import reference as rope
from torch import Tensor

_VERSION: Final = 1  # of native.c: a module left over from another version is not used


def _load() -> ModuleType | None:
    try:
        module = importlib.import_module("epdserve.kernels.host._native")
    except ImportError:
        return None
    return module if module.VERSION == _VERSION else None


native: Final[Any] = _load()


def _plain(x: object) -> TypeGuard[Tensor]:
    """Whether ``x`` is float32 numbers in host memory whose gradient nobody wants."""
    return type(x) is Tensor and x.dtype is torch.float32 and not x.requires_grad and x.device.type == "cpu"


def _row_stride(x: Tensor) -> int | None:
    """Elements from one row to the next, if rows lie evenly; a row is the last dimension."""
    if x.dim() < 2:
        return x.shape[-1] if x.dim() and (x.stride(-1) == 1 or x.shape[-1] <= 1) else None
    stride = x.stride(-2)
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    for outer in range(x.dim() - 3, -1, -1):
        if x.shape[outer] > 1 and x.stride(outer) != x.stride(outer + 1) * x.shape[outer + 1]:
            return None
    return stride


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``norm``."""
    if not (_plain(x) and _plain(weight)) or not x.numel():
        return norm.rms_norm_ref(x, weight, eps)
    x, weight = x.contiguous(), weight.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    native.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``rope``."""
    return _rope(x, cos, sin, 1.0)


def apply_rope_inverse(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``rope``."""
    return _rope(x, cos, sin, -1.0)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    rows, pairs, width = cos.shape[0], cos.shape[-1], x.shape[-1]
    if not (_plain(x) and _plain(cos) and _plain(sin)) or 2 * pairs > width or not x.numel():
        return (rope.apply_rope_ref if sign > 0 else rope.apply_rope_inverse_ref)(x, cos, sin)
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out, heads = torch.empty_like(x), x.numel() // (rows * width)
    native.rope(x.data_ptr(), out.data_ptr(), rows, heads, width, cos.data_ptr(), sin.data_ptr(), pairs, sign)
    return out


def hyper_coefficients(
    streams_TnD: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    iters: int,
    hc_eps: float,
    norm_eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``mhc``."""
    tokens, copies = streams_TnD.shape[:2]
    plain = _plain(streams_TnD) and _plain(scale) and _plain(base) and not fn.requires_grad
    if not plain or copies > native.MAX_COPIES:
        return mhc.hyper_coefficients_ref(streams_TnD, fn, scale, base, iters, hc_eps, norm_eps)
    flat, rate = streams_TnD.contiguous().flatten(1), streams_TnD.new_empty(tokens)
    native.rates(flat.data_ptr(), rate.data_ptr(), tokens, flat.shape[1], norm_eps)
    return _coefficients(linear_ref(flat, fn), rate, scale, base, copies, iters, hc_eps)


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
    """See ``mhc``."""
    new_TnD = mhc.expand_ref(streams_TnD, out_TD, post_Tn, comb_Tnn)
    coefficients = hyper_coefficients(new_TnD, fn, scale, base, iters, hc_eps, norm_eps)
    return new_TnD, mhc.collapse_ref(new_TnD, pre_Tn), coefficients


def coefficients_from_mixes(
    mixes: Tensor, scale: Tensor, base: Tensor, copies: int, iters: int, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``mhc``."""
    if not (_plain(mixes) and _plain(scale) and _plain(base)) or copies > native.MAX_COPIES:
        return mhc.coefficients_from_mixes_ref(mixes, scale, base, copies, iters, hc_eps)
    return _coefficients(mixes, None, scale, base, copies, iters, hc_eps)


def _coefficients(
    mixes: Tensor, rate: Tensor | None, scale: Tensor, base: Tensor, copies: int, iters: int, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = mixes.shape[0]
    mixes, scale, base = mixes.contiguous(), scale.contiguous(), base.contiguous()
    pre, post = mixes.new_empty(tokens, copies), mixes.new_empty(tokens, copies)
    comb = mixes.new_empty(tokens, copies, copies)
    native.coefficients(
        mixes.data_ptr(),
        0 if rate is None else rate.data_ptr(),
        scale.data_ptr(),
        base.data_ptr(),
        pre.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
        tokens,
        copies,
        iters,
        hc_eps,
    )
    return pre, post, comb


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See ``quant``."""
    width = x.shape[-1]
    if _plain(x) and width % quant.GROUP_UE8M0 == 0 and x.numel():
        x = x.contiguous()
        codes = torch.empty(x.shape, dtype=torch.uint8)
        scales = torch.empty((*x.shape[:-1], width // quant.GROUP_UE8M0), dtype=torch.uint8)
        if native.encode_fp8(x.data_ptr(), codes.data_ptr(), scales.data_ptr(), scales.numel()):
            return codes, scales
    return quant.quantize_fp8_ref(x)


def dequantize_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """See ``quant``."""
    out = _decode("decode_fp8", codes, scales, 1, 32)
    return quant.dequantize_fp8_ref(codes, scales) if out is None else out


def dequantize_fp4_e4m3(packed: Tensor, scales: Tensor) -> Tensor:
    """See ``quant``."""
    out = _decode("decode_fp4_e4m3", packed, scales, 2, 16)
    return quant.dequantize_fp4_e4m3_ref(packed, scales) if out is None else out


def dequantize_fp4_e8m0(packed: Tensor, scales: Tensor) -> Tensor:
    """See ``quant``."""
    out = _decode("decode_fp4_e8m0", packed, scales, 2, 32)
    return quant.dequantize_fp4_e8m0_ref(packed, scales) if out is None else out


def _decode(name: str, codes: Tensor, scales: Tensor, per_code: int, group: int) -> Tensor | None:
    """Float32 values of ``codes`` (..., K / per_code) and their groups' scales; None if it is not for native code."""
    width = codes.shape[-1] * per_code
    if not (type(codes) is Tensor and type(scales) is Tensor) or codes.device.type != "cpu":
        return None
    if codes.dtype is not torch.uint8 or scales.dtype is not torch.uint8 or not codes.numel():
        return None
    if scales.shape[:-1] != codes.shape[:-1] or scales.shape[-1] * group != width:
        return None
    stride, scale_stride = _row_stride(codes), _row_stride(scales)
    if stride is None or scale_stride is None:
        return None
    out = torch.empty((*codes.shape[:-1], width), dtype=torch.float32)
    getattr(native, name)(
        codes.data_ptr(),
        stride,
        scales.data_ptr(),
        scale_stride,
        out.data_ptr(),
        codes.numel() // codes.shape[-1],
        width,
    )
    return out


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """See ``moe``."""
    if not (_plain(gate) and _plain(up)) or gate.shape != up.shape or not gate.numel():
        return moe.swiglu_ref(gate, up, limit)
    gate, gate_stride = _even_rows(gate)
    up, up_stride = _even_rows(up)
    out, width = torch.empty(gate.shape, dtype=torch.float32), gate.shape[-1]
    native.swiglu(
        gate.data_ptr(),
        up.data_ptr(),
        gate_stride,
        up_stride,
        out.data_ptr(),
        gate.numel() // width,
        width,
        limit,
    )
    return out


def _even_rows(x: Tensor) -> tuple[Tensor, int]:
    """``x``, or a copy if its rows do not lie evenly; and elements from one row to the next."""
    stride = _row_stride(x)
    return (x, stride) if stride is not None else (x.contiguous(), x.shape[-1])


def route(logits_TE: Tensor, bias_E: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """See ``moe``."""
    rows, experts = logits_TE.shape
    plain = _plain(logits_TE) and _plain(bias_E)
    if not plain or not top_k <= experts <= native.MAX_EXPERTS or bias_E.shape[-1] != experts:
        return moe.route_ref(logits_TE, bias_E, top_k, scaling)
    logits_TE, bias_E = logits_TE.contiguous(), bias_E.contiguous()
    chosen = torch.empty(rows, top_k, dtype=torch.int64)
    weights = torch.empty(rows, top_k, dtype=torch.float32)
    native.route(
        logits_TE.data_ptr(),
        bias_E.data_ptr(),
        experts if bias_E.dim() == 2 else 0,
        chosen.data_ptr(),
        weights.data_ptr(),
        rows,
        experts,
        top_k,
        scaling,
    )
    return chosen, weights


STAND_INS: Final[dict[Any, Any]] = (
    {}
    if native is None
    else {
        mhc.advance_ref: advance,
        mhc.coefficients_from_mixes_ref: coefficients_from_mixes,
        mhc.hyper_coefficients_ref: hyper_coefficients,
        moe.route_ref: route,
        moe.swiglu_ref: swiglu,
        norm.rms_norm_ref: rms_norm,
        quant.dequantize_fp4_e4m3_ref: dequantize_fp4_e4m3,
        quant.dequantize_fp4_e8m0_ref: dequantize_fp4_e8m0,
        quant.dequantize_fp8_ref: dequantize_fp8,
        quant.quantize_fp8_ref: quantize_fp8,
        rope.apply_rope_inverse_ref: apply_rope_inverse,
        rope.apply_rope_ref: apply_rope,
    }
)
