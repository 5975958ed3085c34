"""Checks of what is done to rows between products: norms, rotation, packing into pages, residual streams, Engram,
compression; and of what ends a step: the head, draws, verification of drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from epdserve.kernels.cache_ops import pack
from epdserve.kernels.cache_ops import reference as pack_reference
from epdserve.kernels.compress.pool import pool_entries
from epdserve.kernels.compress.reference import pool_entries_ref
from epdserve.kernels.engram.gate import engram_gate
from epdserve.kernels.engram.hash import ngram_rows
from epdserve.kernels.engram.reference import engram_gate_ref, ngram_rows_ref
from epdserve.kernels.linear.block_linear import linear_bf16
from epdserve.kernels.mhc.reference import advance_ref, sinkhorn_ref
from epdserve.kernels.mhc.streams import advance
from epdserve.kernels.norm.reference import rms_norm_ref
from epdserve.kernels.norm.rms import rms_norm
from epdserve.kernels.quant.reference import quantize_fp8_ref
from epdserve.kernels.quant.rows import quantize_fp8
from epdserve.kernels.rope.reference import apply_rope_ref
from epdserve.kernels.rope.rotate import apply_rope
from epdserve.kernels.sampling.drafts import verify_drafts_ref
from epdserve.kernels.sampling.draw import sample
from epdserve.kernels.sampling.reference import sample_ref
from epdserve.kernels.sampling.verify import verify_drafts
from epdserve.loadtest.gpu.case import Case, CaseMaker, compare, first_problem, same_bits
from epdserve.loadtest.gpu.data import bf16
from epdserve.loadtest.gpu.shapes import Shapes
from torch import Tensor

_EPS = 1e-20
_ROUNDING = 2.0**-8  # of a bfloat16 result
_SINKHORN = 20


def makers(shapes: Shapes, device: str) -> Iterator[tuple[str, CaseMaker]]:
    """Name and maker of each case."""
    few = shapes.decode_rows[min(1, len(shapes.decode_rows) - 1)]
    for rows in dict.fromkeys((shapes.prefill_rows, few)):
        yield f"rms_norm, T={rows}", partial(_norm, rows, shapes, device)
        yield f"rope, T={rows}", partial(_rope, rows, shapes, device)
        yield f"quantize FP8, T={rows}", partial(_quantize, rows, shapes, device)
        for kind in ("main", "index", "window"):
            yield f"pack {kind}, N={rows}", partial(_pack, kind, rows, shapes, device)
        yield f"mhc advance, T={rows}", partial(_advance, rows, shapes, device)
        yield f"pool entries, T={rows}", partial(_pool, rows, shapes, device)
        yield f"engram hash, T={rows}", partial(_hash, rows, device)
        yield f"engram gate, T={rows}", partial(_gate, rows, shapes, device)
    yield f"head, T={few}", partial(_head, few, shapes, device)
    yield f"sample, R={few}", partial(_sample, few, shapes, device)
    yield f"verify drafts, R={few}", partial(_verify, few, shapes, device)


def _norm(rows: int, shapes: Shapes, device: str) -> Case:
    x, weight = bf16(rows, shapes.hidden, device=device), bf16(shapes.hidden, device=device)

    def check() -> str:
        got, exact = rms_norm(x, weight, _EPS), rms_norm_ref(x.double(), weight.double(), _EPS)
        return first_problem(
            compare(got, exact, exact.abs() * _ROUNDING + 1e-6),
            same_bits(rms_norm(x[:1], weight, _EPS), got[:1], "alone"),
        )

    return Case(lambda: rms_norm(x, weight, _EPS), check, 4.0 * x.numel())


def _angles(rows: int, shapes: Shapes, device: str) -> tuple[Tensor, Tensor]:
    angle = torch.randn(rows, shapes.rotary // 2, device=device)
    return angle.cos(), angle.sin()


def _rope(rows: int, shapes: Shapes, device: str) -> Case:
    x, angles = bf16(rows, shapes.heads, shapes.latent, device=device), _angles(rows, shapes, device)

    def check() -> str:
        some = slice(0, shapes.checked_rows)
        expected = apply_rope_ref(x[some], angles[0][some], angles[1][some])
        return compare(apply_rope(x, *angles)[some], expected, expected.abs().double() * _ROUNDING)

    return Case(lambda: apply_rope(x, *angles), check, 4.0 * x.numel())


def _quantize(rows: int, shapes: Shapes, device: str) -> Case:
    x = bf16(rows, shapes.hidden, device=device)

    def check() -> str:
        pairs = zip(quantize_fp8(x), quantize_fp8_ref(x), strict=True)
        return first_problem(*(same_bits(got, expected, "codes or scales") for got, expected in pairs))

    return Case(lambda: quantize_fp8(x), check, x.numel() * (3 + 1 / 32))


def _pack(kind: str, rows: int, shapes: Shapes, device: str) -> Case:
    dim = shapes.index_dim if kind == "index" else shapes.latent
    per_page, angles = shapes.entries_per_page, _angles(rows, shapes, device)
    x = bf16(rows, dim, device=device)
    place = torch.randperm(rows, device=device)
    page, entry = place // per_page, place % per_page
    values, scales = {
        "main": (dim // 2, dim // 16),
        "index": (dim // 2, dim // 32),
        "window": (dim, dim // 32),
    }[kind]
    pages = torch.zeros(-(-rows // per_page), per_page * (values + scales), dtype=torch.uint8, device=device)
    other = torch.zeros_like(pages)

    def write(module: object, suffix: str, into: Tensor) -> None:
        name = {"main": "write_main_kv", "index": "write_index_k", "window": "write_window_kv"}[kind]
        function: Callable[..., None] = getattr(module, name + suffix)
        if kind == "window":
            function(into.view(-1, per_page, values + scales), page, entry, x, *angles)
        else:
            offsets = {"values_offset": 0, "scales_offset": per_page * values}
            function(into, page, entry, x, *angles, entries=per_page, **offsets)

    def check() -> str:
        write(pack, "", pages)
        write(pack_reference, "_ref", other)
        return same_bits(pages, other, "bytes")

    moved = rows * (2 * dim + 4 * shapes.rotary + 16 + values + scales)
    return Case(lambda: write(pack, "", pages), check, float(moved))


def _advance(rows: int, shapes: Shapes, device: str) -> Case:
    copies, hidden = shapes.copies, shapes.hidden
    mixes = copies * (copies + 2)
    streams, out = bf16(rows, copies, hidden, device=device), bf16(rows, hidden, device=device)
    post, pre = torch.rand(rows, copies, device=device), torch.rand(rows, copies, device=device)
    comb = sinkhorn_ref(torch.randn(rows, copies, copies, device=device), _SINKHORN, 1e-6).contiguous()
    fn = torch.randn(mixes, copies * hidden, device=device) * hidden**-0.5
    scale, base = torch.ones(3, device=device), torch.randn(mixes, device=device)

    def run(rows: slice) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        given = (streams[rows], out[rows], post[rows], comb[rows], pre[rows])
        return advance(*given, fn, scale, base, _SINKHORN, 1e-6, _EPS)

    def check() -> str:
        some = slice(0, shapes.checked_rows)
        new, collapsed, coefficients = run(slice(None))
        wide = (streams[some].float(), out[some].float(), post[some], comb[some], pre[some])
        exact = advance_ref(*wide, fn, scale, base, _SINKHORN, 1e-6, _EPS)
        alone = run(slice(0, 1))
        return first_problem(
            compare(new[some], exact[0], exact[0].abs().double() * _ROUNDING + 1e-5),
            compare(collapsed[some], exact[1], exact[1].abs().double() * 4 * _ROUNDING + 0.05),
            *(compare(g[some], e, 2e-2) for g, e in zip(coefficients, exact[2], strict=True)),
            same_bits(alone[0], new[:1], "streams alone"),
            *(same_bits(a, g[:1], "alone") for a, g in zip(alone[2], coefficients, strict=True)),
        )

    moved = 4 * rows * hidden * (copies + 1)
    flops = rows * copies * hidden * (2 * (copies + 1) + 2 + 2 * mixes)
    return Case(lambda: run(slice(None)), check, float(moved), float(flops))


def _pool(rows: int, shapes: Shapes, device: str) -> Case:
    pair = torch.randn(rows, 2 * shapes.latent, device=device)
    content, gate = pair[:, : shapes.latent], pair[:, shapes.latent :]
    kept = torch.randn(2, 2, shapes.latent, device=device)
    closing = torch.arange(0, rows, 2, device=device)  # the first pair was opened in an earlier step
    slot = torch.where(closing == 0, 1, -1)
    opening = (closing - 1).clamp(min=0)
    keep_slot, keep_row = torch.tensor([0], device=device), torch.tensor([rows - 1], device=device)
    given = (opening, slot, closing, keep_slot, keep_row)

    def check() -> str:
        ours, theirs = kept.clone(), kept.clone()
        got = pool_entries(content, gate, ours, *given)
        expected = pool_entries_ref(content, gate, theirs, *given)
        return first_problem(compare(got, expected, 1e-5), same_bits(ours, theirs, "open pairs"))

    return Case(lambda: pool_entries(content, gate, kept, *given), check, len(closing) * shapes.latent * 20.0)


def _hash(rows: int, device: str) -> Case:
    compressed = torch.randint(-1, 100_000, (rows, 4), device=device)
    multipliers = torch.randint(1, 2**40, (4,), device=device) * 2 + 1
    primes = torch.randint(10_000_000, 16_000_000, (3, 8), device=device)
    offsets = torch.arange(24, device=device) * 16_000_000
    given = (compressed, 5, multipliers, primes, offsets)

    def check() -> str:
        return same_bits(ngram_rows(*given), ngram_rows_ref(*given), "rows")

    return Case(lambda: ngram_rows(*given), check, rows * 8.0 * 28)


def _gate(rows: int, shapes: Shapes, device: str) -> Case:
    copies, hidden = shapes.copies, shapes.hidden
    streams = bf16(rows, copies, hidden, device=device)
    kv = bf16(rows, copies + 1, hidden, device=device)
    q, k = (torch.randn(copies, hidden, device=device) for _ in range(2))

    def check() -> str:
        got, some = engram_gate(streams, kv[:, :-1], kv[:, -1], q, k, _EPS), slice(0, shapes.checked_rows)
        expected = engram_gate_ref(
            streams[some].float(), kv[some, :-1].float(), kv[some, -1].float(), q, k, _EPS
        )
        alone = engram_gate(streams[:1], kv[:1, :-1], kv[:1, -1], q, k, _EPS)
        return first_problem(
            compare(got[some], expected, expected.abs().double() * _ROUNDING + 1e-4),
            same_bits(alone, got[:1], "alone"),
        )

    moved = 2 * rows * hidden * (3 * copies + 1)
    return Case(lambda: engram_gate(streams, kv[:, :-1], kv[:, -1], q, k, _EPS), check, float(moved))


def _head(rows: int, shapes: Shapes, device: str) -> Case:
    x, weight = (
        bf16(rows, shapes.hidden, device=device),
        bf16(shapes.vocabulary, shapes.hidden, device=device),
    )

    def run() -> Tensor:
        return linear_bf16(x, weight, out_dtype=torch.float32)

    def check() -> str:
        got, some = run(), slice(0, min(rows, 2))
        exact = x[some].double() @ weight.double().t()
        bound = shapes.hidden * 2.0**-23 * (x[some].double().abs() @ weight.double().abs().t())
        alone = linear_bf16(x[:1], weight, out_dtype=torch.float32)
        return first_problem(compare(got[some], exact, bound), same_bits(alone, got[:1], "alone"))

    moved = 2.0 * (x.numel() + weight.numel()) + 4 * rows * shapes.vocabulary
    return Case(run, check, moved, 2.0 * rows * weight.numel())


def _sample(rows: int, shapes: Shapes, device: str) -> Case:
    logits = torch.randn(rows, shapes.vocabulary, device=device) * 3
    row = torch.arange(rows, device=device)
    given = (
        logits,
        torch.where(row % 3 == 0, 0.0, 0.8),
        torch.where(row % 2 == 0, 40, 0),
        torch.full((rows,), 0.9, device=device),
        torch.where(row % 4 == 0, 0.05, 0.0),
        row * 7 + 1,
        row + 100,
    )

    def check() -> str:
        return same_bits(sample(*given), sample_ref(*given), "tokens")

    return Case(lambda: sample(*given), check, 4.0 * logits.numel())


def _verify(rows: int, shapes: Shapes, device: str, drafts: int = 3) -> Case:
    target = (torch.randn(rows, drafts + 1, shapes.vocabulary, device=device) * 2).softmax(-1)
    drafter = (torch.randn(rows, drafts, shapes.vocabulary, device=device) * 2).softmax(-1)
    draft = drafter.argmax(-1)
    row = torch.arange(rows, device=device)
    given = (target, drafter, draft, row % (drafts + 1), row * 5 + 3, row + 50)

    def check() -> str:
        pairs = zip(verify_drafts(*given), verify_drafts_ref(*given), strict=True)
        return first_problem(*(same_bits(got, expected, "accepted or token") for got, expected in pairs))

    return Case(lambda: verify_drafts(*given), check, 4.0 * (target.numel() + drafter.numel()))
