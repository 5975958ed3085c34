from typing import Final

VERSION: Final[int]
MAX_COPIES: Final[int]
MAX_EXPERTS: Final[int]

# Tensors are addresses of their first elements; what they mean stands in rows.py.
def rates(x: int, out: int, rows: int, width: int, eps: float, /) -> None: ...
def rms_norm(x: int, weight: int, out: int, rows: int, width: int, eps: float, /) -> None: ...
def rope(
    x: int, out: int, rows: int, heads: int, width: int, cos: int, sin: int, pairs: int, sign: float, /
) -> None: ...
def coefficients(
    mixes: int,
    rate: int,
    scale: int,
    base: int,
    pre: int,
    post: int,
    comb: int,
    tokens: int,
    copies: int,
    iters: int,
    eps: float,
    /,
) -> None: ...
def decode_fp8(
    codes: int, stride: int, scales: int, scale_stride: int, out: int, rows: int, width: int, /
) -> None: ...
def decode_fp4_e4m3(
    codes: int, stride: int, scales: int, scale_stride: int, out: int, rows: int, width: int, /
) -> None: ...
def decode_fp4_e8m0(
    codes: int, stride: int, scales: int, scale_stride: int, out: int, rows: int, width: int, /
) -> None: ...
def encode_fp8(x: int, codes: int, scales: int, groups: int, /) -> bool: ...
def swiglu(
    gate: int, up: int, gate_stride: int, up_stride: int, out: int, rows: int, width: int, limit: float, /
) -> None: ...
def route(
    logits: int,
    bias: int,
    bias_stride: int,
    chosen: int,
    weights: int,
    rows: int,
    experts: int,
    top_k: int,
    scaling: float,
    /,
) -> None: ...
