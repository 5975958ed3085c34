"""Integer arithmetic on number formats inside kernels, in Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from epdserve.kernels.quant import codes
from epdserve.kernels.quant.reference import decode_e2m1_ref, decode_e4m3_ref, decode_e8m0_ref
from support.kernel_rows import generator
from support.triton_rows import assert_same_bits

N = 4096


@triton.jit
def _decode_kernel(out_ptr: tl.tensor, FORMAT: tl.constexpr) -> None:
    code = tl.arange(0, 256)
    if FORMAT == "e4m3":
        value = codes.e4m3_value(code)
    elif FORMAT == "e2m1":
        value = codes.e2m1_value(code)
    else:
        value = codes.e8m0_value(code)
    tl.store(out_ptr + code, value)


@triton.jit
def _encode_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, FORMAT: tl.constexpr, COUNT: tl.constexpr) -> None:
    i = tl.arange(0, COUNT)
    x = tl.load(x_ptr + i)
    if FORMAT == "e4m3":
        tl.store(out_ptr + i, codes.e4m3_code(x).to(tl.uint8))
    else:
        tl.store(out_ptr + i, codes.narrow(x, tl.bfloat16))


@pytest.mark.parametrize(
    ("name", "decode"), [("e4m3", decode_e4m3_ref), ("e8m0", decode_e8m0_ref)], ids=["e4m3", "e8m0"]
)
def test_every_byte_has_its_value(name: str, decode: object) -> None:
    got = torch.empty(256)
    _decode_kernel[(1,)](got, FORMAT=name)
    expected = decode(torch.arange(256).to(torch.uint8))  # type: ignore[operator]
    assert torch.equal(got.isnan(), expected.isnan())
    assert_same_bits(got.nan_to_num(), expected.nan_to_num())


def test_every_nibble_has_its_value() -> None:
    got = torch.empty(256)
    _decode_kernel[(1,)](got, FORMAT="e2m1")
    assert_same_bits(got[:16], decode_e2m1_ref(torch.arange(16)))


def _patterns() -> torch.Tensor:
    x = torch.randint(-(2**31), 2**31, (N,), generator=generator()).int().view(torch.float32)
    x[:4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    x[4:1028] = torch.arange(1024) / 512 - 1  # ties of both formats
    return x


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    x, got = _patterns(), torch.empty(N, dtype=torch.bfloat16)
    _encode_kernel[(1,)](x, got, FORMAT="bf16", COUNT=N)
    expected = x.to(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert_same_bits(got[number], expected[number])


def test_e4m3_is_rounded_to_nearest_even() -> None:
    x = _patterns()
    x = torch.where(x.abs() <= 448, x, 448.0)
    got = torch.empty(N, dtype=torch.uint8)
    _encode_kernel[(1,)](x, got, FORMAT="e4m3", COUNT=N)
    assert_same_bits(got, x.to(torch.float8_e4m3fn).view(torch.uint8))
