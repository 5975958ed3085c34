"""Native stand-ins against their references: number formats to the bit, the rest to the last bits; row by row."""

from collections.abc import Callable

import pytest
import torch
from epdserve.kernels.dispatch import on_host, stand_in
from epdserve.kernels.host import rows
from epdserve.kernels.mhc import reference as mhc
from epdserve.kernels.moe import reference as moe
from epdserve.kernels.norm import reference as norm
from epdserve.kernels.quant import reference as quant
from epdserve.kernels.rope import reference as rope
from support.kernel_rows import bits, randn

ROWS = (1, 2, 7, 8, 9, 33)
Made = tuple[Callable[..., object], tuple[object, ...]]

pytestmark = pytest.mark.skipif(
    rows.native is None, reason="built without a C compiler: references do the work"
)


def calls(count: int) -> dict[str, Made]:
    """A call of every stand-in with ``count`` rows; the first rows of a longer call are those of a shorter one."""
    x, wide = randn(64, 3, 32, seed=1)[:count], randn(64, 96, seed=2)[:count]
    angle = randn(64, 5, seed=3)[:count]
    streams, copies = randn(64, 4, 24, seed=4)[:count], 4
    fn, scale, base = randn(24, 96, seed=5), randn(3, seed=6), randn(24, seed=7)
    raw = torch.randint(0, 126, (64, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(8))[
        :count
    ]
    logits, biases = randn(64, 10, seed=9)[:count], randn(64, 10, seed=10)
    return {
        "norm": (norm.rms_norm_ref, (wide, randn(96, seed=11), 1e-6)),
        "rope": (rope.apply_rope_ref, (x, angle.cos(), angle.sin())),
        "rope back": (rope.apply_rope_inverse_ref, (x, angle.cos(), angle.sin())),
        "hyper": (mhc.hyper_coefficients_ref, (streams, fn, scale, base, 20, 1e-6, 1e-20)),
        "mixes": (mhc.coefficients_from_mixes_ref, (wide[:, :24].contiguous(), scale, base, copies, 3, 1e-6)),
        "fp8": (quant.dequantize_fp8_ref, (raw[:, :32], raw[:, 39:])),
        "fp4": (quant.dequantize_fp4_e4m3_ref, (raw[:, :16], raw[:, 38:])),
        "fp4 keys": (quant.dequantize_fp4_e8m0_ref, (raw[:, 4:36], raw[:, 36:38])),
        "to fp8": (quant.quantize_fp8_ref, (wide * 10.0 ** randn(64, 1, seed=12)[:count],)),
        "route": (moe.route_ref, (logits, biases[:count], 3, 1.5)),
        "route, one bias": (moe.route_ref, (logits, biases[0], 3, 1.5)),
        "swiglu": (moe.swiglu_ref, (*(9 * wide).chunk(2, dim=-1), 5.0)),
    }


def results(made: Made, *, native: bool) -> list[torch.Tensor]:
    function, arguments = made
    out = (stand_in(function) if native else function)(*arguments)
    return list(out) if isinstance(out, tuple) else [out]  # type: ignore[list-item]


@pytest.mark.parametrize("name", list(calls(1)))
def test_it_equals_the_reference(name: str) -> None:
    for ours, wanted in zip(*(results(calls(33)[name], native=n) for n in (True, False)), strict=True):
        assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
        if "fp" in name or not ours.is_floating_point():
            assert torch.equal(ours, wanted)
        else:
            torch.testing.assert_close(ours, wanted, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("name", list(calls(1)))
def test_a_row_depends_on_itself_alone(name: str) -> None:
    whole = results(calls(64)[name], native=True)
    for count in ROWS:
        for ours, wanted in zip(results(calls(count)[name], native=True), whole, strict=True):
            same = wanted[: len(ours)]
            assert (
                torch.equal(bits(ours), bits(same)) if ours.is_floating_point() else torch.equal(ours, same)
            )


@pytest.mark.parametrize("name", list(calls(1)))
def test_no_row_is_legal(name: str) -> None:
    for ours, wanted in zip(*(results(calls(0)[name], native=n) for n in (True, False)), strict=True):
        assert ours.shape == wanted.shape


def test_every_fp8_and_fp4_code_decodes_to_the_bit() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.arange(0, 256, 32, dtype=torch.uint8).view(8, 1)
    assert torch.equal(
        bits(rows.dequantize_fp8(codes, scales)), bits(quant.dequantize_fp8_ref(codes, scales))
    )
    packed, wide = codes.view(16, 16), torch.arange(16, dtype=torch.uint8).view(16, 1)
    ours, theirs = rows.dequantize_fp4_e8m0(packed, wide), quant.dequantize_fp4_e8m0_ref(packed, wide)
    assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 2.0**-9, 1.0, 448.0, 3e38])
def test_fp8_codes_are_the_references_at_every_size(scale: float) -> None:
    x = randn(16, 64, seed=13) * scale / 4
    x[:, 0], x[:, 1], x[:, 2] = 0.0, -0.0, x[:, 3] * 2.0**-12
    for ours, wanted in zip(rows.quantize_fp8(x), quant.quantize_fp8_ref(x), strict=True):
        assert torch.equal(ours, wanted)


def test_ties_round_to_even() -> None:
    x = (
        torch.arange(-256, 256, dtype=torch.float32).view(16, 32) / 16 * 28
    )  # 448 is among each group's neighbours
    for ours, wanted in zip(rows.quantize_fp8(x), quant.quantize_fp8_ref(x), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize(
    "x",
    [
        randn(4, 32).double(),
        randn(4, 32).bfloat16(),
        randn(4, 32).requires_grad_(),
        torch.full((4, 32), float("nan")),
        torch.full((4, 32), float("inf")),
    ],
    ids=["float64", "bfloat16", "gradient", "nan", "inf"],
)
def test_what_native_code_does_not_take_goes_to_the_reference(x: torch.Tensor) -> None:
    for function, more in ((norm.rms_norm_ref, (torch.ones(32), 1e-6)), (quant.quantize_fp8_ref, ())):
        ours, wanted = (results((function, (x, *more)), native=n) for n in (True, False))  # type: ignore[arg-type]
        for a, b in zip(ours, wanted, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(
                a.nan_to_num(7.0) if a.is_floating_point() else a,
                b.nan_to_num(7.0) if b.is_floating_point() else b,
            )


@pytest.mark.parametrize(
    "name", ["norm", "rope", "hyper", "mixes", "to fp8", "route", "swiglu", "fp8", "fp4"]
)
def test_gaps_between_elements_change_no_bit(name: str) -> None:
    """Whether rows lie side by side depends on how many there are."""
    function, arguments = calls(9)[name]
    strided = [
        a.transpose(0, 1).contiguous().transpose(0, 1) if isinstance(a, torch.Tensor) and a.dim() > 1 else a
        for a in arguments
    ]
    for ours, wanted in zip(
        results((function, tuple(strided)), native=True),
        results((function, arguments), native=True),
        strict=True,
    ):
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))


def test_without_native_code_the_reference_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "STAND_INS", {})
    assert stand_in(norm.rms_norm_ref) is norm.rms_norm_ref
    assert on_host(norm.rms_norm_ref)(torch.ones(1, 4), torch.ones(4), 0.0).tolist() == [[1.0] * 4]
