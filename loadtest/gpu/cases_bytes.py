"""Checks of what moves bytes in and out of pages, and of the other ways into kernels: rotations in place and back,
streams spread and collapsed by themselves, pairs pooled, distributions, drafts verified greedily and by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from epdserve.kernels.cache_ops.reference import gather_rows_ref, scatter_rows_ref
from epdserve.kernels.cache_ops.rows import gather_rows, scatter_rows
from epdserve.kernels.compress.pool import pool_pairs
from epdserve.kernels.compress.reference import pool_pairs_ref
from epdserve.kernels.mhc import reference as mhc_reference
from epdserve.kernels.mhc.streams import collapse, expand, hyper_coefficients
from epdserve.kernels.quant.reference import quantize_fp4_e8m0_ref
from epdserve.kernels.quant.rows import quantize_fp4_e8m0
from epdserve.kernels.rope.reference import apply_rope_inverse_ref, apply_rope_ref
from epdserve.kernels.rope.rotate import apply_rope_in_place, apply_rope_inverse
from epdserve.kernels.sampling.drafts import Method, accept_greedy_ref, filtered_probs_ref, verify_drafts_ref
from epdserve.kernels.sampling.draw import filtered_probs
from epdserve.kernels.sampling.verify import accept_greedy, verify_drafts
from epdserve.loadtest.gpu.case import Case, CaseMaker, compare, first_problem, same_bits
from epdserve.loadtest.gpu.data import bf16, nibbles
from epdserve.loadtest.gpu.shapes import Shapes
from torch import Tensor

_EPS = 1e-20
_ROUNDING = 2.0**-8
_GATHERED = 256  # bytes of a main KV entry's values


def makers(shapes: Shapes, device: str) -> Iterator[tuple[str, CaseMaker]]:
    """Name and maker of each case."""
    rows, few = shapes.prefill_rows, shapes.decode_rows[min(1, len(shapes.decode_rows) - 1)]
    entries, pages = 8 * rows, max(2, rows // 8)
    for scatter in (False, True):
        verb = "scatter" if scatter else "gather"
        yield (
            f"{verb} rows of {_GATHERED} B, N={entries}",
            partial(_rows, entries, scatter, False, shapes, device),
        )
        yield f"{verb} pages, N={pages}", partial(_rows, pages, scatter, True, shapes, device)
    yield f"rope in place, T={rows}", partial(_rope, rows, True, shapes, device)
    yield f"inverse rope, T={rows}", partial(_rope, rows, False, shapes, device)
    yield f"quantize FP4, T={rows}", partial(_fp4, rows, shapes, device)
    yield f"mhc expand, T={rows}", partial(_expand, rows, shapes, device)
    yield f"mhc collapse, T={rows}", partial(_collapse, rows, shapes, device)
    yield f"mhc predict, T={rows}", partial(_predict, rows, shapes, device)
    yield f"pool pairs, N={rows}", partial(_pairs, rows, shapes, device)
    yield f"filtered probabilities, R={few}", partial(_filtered, few, shapes, device)
    yield f"accept greedy drafts, R={few}", partial(_greedy, few, device)
    for method in ("token", "block"):
        name = f"verify drafts of a greedy drafter by {method}, R={few}"
        yield name, partial(_verify, few, method, None, shapes, device)
    yield f"verify drafts by block, R={few}", partial(_verify, few, "block", "any", shapes, device)


def _rows(count: int, scatter: bool, whole_pages: bool, shapes: Shapes, device: str) -> Case:
    page_bytes = shapes.entries_per_page * shapes.latent
    nbytes = page_bytes if whole_pages else min(_GATHERED, page_bytes)
    per_page = page_bytes // nbytes
    total = -(-count // per_page)
    pages = torch.randint(0, 256, (total, page_bytes), dtype=torch.uint8, device=device)
    place = torch.randperm(total * per_page, device=device)[:count]
    page, offset = place // per_page, place % per_page * nbytes
    data = nibbles(count, nbytes, device=device)

    def check() -> str:
        if not scatter:
            expected = gather_rows_ref(pages, page, offset, nbytes)
            return same_bits(gather_rows(pages, page, offset, nbytes), expected, "bytes")
        ours, theirs = pages.clone(), pages.clone()
        scatter_rows(ours, page, offset, data)
        scatter_rows_ref(theirs, page, offset, data)
        return same_bits(ours, theirs, "bytes")

    run: Callable[[], object] = partial(gather_rows, pages, page, offset, nbytes)
    if scatter:
        run = partial(scatter_rows, pages, page, offset, data)
    return Case(run, check, count * (2.0 * nbytes + 16))


def _rope(rows: int, in_place: bool, shapes: Shapes, device: str) -> Case:
    x = bf16(rows, shapes.heads, shapes.latent, device=device)
    angle = torch.randn(rows, shapes.rotary // 2, device=device)
    cos, sin = angle.cos(), angle.sin()

    def check() -> str:
        some = slice(0, shapes.checked_rows)
        reference = apply_rope_ref if in_place else apply_rope_inverse_ref
        expected = reference(x[some], cos[some], sin[some])
        given = (x[some].clone(), cos[some], sin[some])
        got = apply_rope_in_place(*given) if in_place else apply_rope_inverse(*given)
        return compare(got, expected, expected.abs().double() * _ROUNDING)

    moved = 4.0 * rows * shapes.heads * (shapes.rotary if in_place else shapes.latent)
    turn = apply_rope_in_place if in_place else apply_rope_inverse
    return Case(lambda: turn(x, cos, sin), check, moved + 8.0 * cos.numel())


def _fp4(rows: int, shapes: Shapes, device: str) -> Case:
    x = bf16(rows, shapes.index_heads, shapes.index_dim, device=device)

    def check() -> str:
        pairs = zip(quantize_fp4_e8m0(x), quantize_fp4_e8m0_ref(x), strict=True)
        return first_problem(*(same_bits(got, expected, "codes or scales") for got, expected in pairs))

    return Case(lambda: quantize_fp4_e8m0(x), check, x.numel() * (2 + 1 / 2 + 1 / 32))


def _update(rows: int, shapes: Shapes, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    comb = torch.rand(rows, shapes.copies, shapes.copies, device=device)
    return (
        bf16(rows, shapes.copies, shapes.hidden, device=device),
        bf16(rows, shapes.hidden, device=device),
        torch.rand(rows, shapes.copies, device=device),
        comb / comb.sum(1, keepdim=True),
    )


def _expand(rows: int, shapes: Shapes, device: str) -> Case:
    streams, out, post, comb = _update(rows, shapes, device)

    def check() -> str:
        some = slice(0, shapes.checked_rows)
        wide = (streams[some].float(), out[some].float(), post[some], comb[some])
        exact = mhc_reference.expand_ref(*wide)
        return compare(expand(streams, out, post, comb)[some], exact, exact.abs().double() * _ROUNDING + 1e-5)

    moved = 2.0 * rows * shapes.hidden * (2 * shapes.copies + 1)
    return Case(lambda: expand(streams, out, post, comb), check, moved)


def _collapse(rows: int, shapes: Shapes, device: str) -> Case:
    streams, _, pre, _ = _update(rows, shapes, device)

    def check() -> str:
        some = slice(0, shapes.checked_rows)
        exact = mhc_reference.collapse_ref(streams[some].float(), pre[some])
        return compare(collapse(streams, pre)[some], exact, exact.abs().double() * _ROUNDING + 1e-5)

    return Case(lambda: collapse(streams, pre), check, 2.0 * rows * shapes.hidden * (shapes.copies + 1))


def _predict(rows: int, shapes: Shapes, device: str) -> Case:
    streams = bf16(rows, shapes.copies, shapes.hidden, device=device)
    mixes = shapes.copies * (shapes.copies + 2)
    fn = torch.randn(mixes, shapes.copies * shapes.hidden, device=device) * shapes.hidden**-0.5
    given = (fn, torch.ones(3, device=device), torch.randn(mixes, device=device), 20, 1e-6, _EPS)

    def check() -> str:
        some = slice(0, shapes.checked_rows)
        exact = mhc_reference.hyper_coefficients_ref(streams[some].float(), *given)
        found = hyper_coefficients(streams, *given)
        alone = hyper_coefficients(streams[:1], *given)
        return first_problem(
            *(compare(g[some], e, 2e-2) for g, e in zip(found, exact, strict=True)),
            *(same_bits(a, g[:1], "alone") for a, g in zip(alone, found, strict=True)),
        )

    moved = 2.0 * streams.numel() + 4.0 * fn.numel()
    return Case(
        lambda: hyper_coefficients(streams, *given), check, moved, 2.0 * streams.numel() * (mixes + 1)
    )


def _pairs(rows: int, shapes: Shapes, device: str) -> Case:
    parts = tuple(torch.randn(rows, shapes.latent, device=device) for _ in range(4))

    def check() -> str:
        return compare(pool_pairs(*parts), pool_pairs_ref(*parts), 1e-5)

    return Case(lambda: pool_pairs(*parts), check, 20.0 * rows * shapes.latent)


def _filtered(rows: int, shapes: Shapes, device: str) -> Case:
    logits, row = torch.randn(rows, shapes.vocabulary, device=device) * 3, torch.arange(rows, device=device)
    given = (
        logits,
        torch.where(row % 3 == 0, 0.0, 0.8),
        torch.where(row % 2 == 0, 40, 0),
        torch.full((rows,), 0.9, device=device),
        torch.where(row % 4 == 0, 0.05, 0.0),
    )

    def check() -> str:
        return compare(filtered_probs(*given), filtered_probs_ref(*given), 1e-5)

    return Case(lambda: filtered_probs(*given), check, 8.0 * logits.numel())


def _greedy(rows: int, device: str, drafts: int = 3) -> Case:
    best = torch.randint(0, 2, (rows, drafts + 1), device=device)
    draft = torch.randint(0, 2, (rows, drafts), device=device)
    given = (best, draft, torch.arange(rows, device=device) % (drafts + 1))

    def check() -> str:
        pairs = zip(accept_greedy(*given), accept_greedy_ref(*given), strict=True)
        return first_problem(*(same_bits(got, expected, "accepted or token") for got, expected in pairs))

    return Case(lambda: accept_greedy(*given), check, 8.0 * rows * (2 * drafts + 4))


def _verify(
    rows: int, method: Method, drafter: str | None, shapes: Shapes, device: str, drafts: int = 3
) -> Case:
    target = (torch.randn(rows, drafts + 1, shapes.vocabulary, device=device) * 2).softmax(-1)
    likely = (torch.randn(rows, drafts, shapes.vocabulary, device=device) * 2).softmax(-1)
    row = torch.arange(rows, device=device)
    given = (
        target,
        likely if drafter else None,
        likely.argmax(-1),
        row % (drafts + 1),
        row * 5 + 3,
        row + 50,
    )

    def check() -> str:
        found, expected = verify_drafts(*given, method=method), verify_drafts_ref(*given, method=method)
        if method == "block":  # shares of float64 sums in another order: a draw may fall between them
            other = int((found[0] != expected[0]).sum() + (found[1] != expected[1]).sum())
            return "" if other <= rows // 16 else f"{other} of {rows} rows decided otherwise"
        pairs = zip(found, expected, strict=True)
        return first_problem(*(same_bits(got, wanted, "accepted or token") for got, wanted in pairs))

    moved = 4.0 * (target.numel() + (likely.numel() if drafter else 0))
    return Case(lambda: verify_drafts(*given, method=method), check, moved)
