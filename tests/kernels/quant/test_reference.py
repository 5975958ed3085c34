"""Number formats against the golden bytes and against rules written out naively."""

from collections.abc import Callable

import pytest
import torch
from epdserve.kernels.quant import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    dequantize_fp4_e4m3,
    dequantize_fp4_e8m0,
    dequantize_fp8,
    quantize_fp4_e4m3,
    quantize_fp4_e8m0,
    quantize_fp8,
    round_fp4_e4m3,
    round_fp4_e8m0,
    round_fp8,
)
from support.kernel_rows import assert_rows_independent, bits, block, generator, randn
from torch import Tensor

EVERY_BYTE = torch.arange(256, dtype=torch.int32).to(torch.uint8)
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
Dequantize = Callable[[Tensor, Tensor], Tensor]
Round = Callable[[Tensor], Tensor]
FORMATS = {
    "fp8": (quantize_fp8, dequantize_fp8, round_fp8, 32),
    "fp4_e8m0": (quantize_fp4_e8m0, dequantize_fp4_e8m0, round_fp4_e8m0, 32),
    "fp4_e4m3": (quantize_fp4_e4m3, dequantize_fp4_e4m3, round_fp4_e4m3, 16),
}
every_format = pytest.mark.parametrize(
    ("quantize", "dequantize", "round_trip", "group"), FORMATS.values(), ids=FORMATS
)


def hard_inputs(rows: int, channels: int) -> Tensor:
    """Random rows over the whole exponent range, with zeros of both signs, ties and tiny values."""
    draw = generator(3)
    x = torch.randn(rows, channels, generator=draw)
    x *= torch.exp2(torch.randint(-40, 30, (rows, 1), generator=draw).float())
    x[torch.rand(rows, channels, generator=draw) < 0.05] = 0.0
    x[torch.rand(rows, channels, generator=draw) < 0.05] = -0.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[::3] = ties[torch.randint(0, 8, (len(x[::3]), channels), generator=draw)] * x[::3].sign()
    x[-1] = 0.0
    return x


def test_byte_tables_are_the_golden_ones() -> None:
    table = block("byte_tables")
    for decoded, name in ((decode_e4m3(EVERY_BYTE), "e4m3"), (decode_e8m0(EVERY_BYTE), "e8m0")):
        is_nan = table[name].isnan()
        assert torch.equal(decoded.isnan(), is_nan)
        assert torch.equal(bits(decoded[~is_nan]), bits(table[name][~is_nan]))
    assert torch.equal(bits(decode_e2m1(EVERY_BYTE & 15)), bits(table["e2m1_low"]))
    assert torch.equal(bits(decode_e2m1(EVERY_BYTE >> 4)), bits(table["e2m1_high"]))


def test_published_bytes_of_the_released_model() -> None:
    row = torch.tensor([[0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5]], dtype=torch.uint8)
    scale = decode_e8m0(torch.tensor([0x73], dtype=torch.uint8))
    expected = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert (decode_e4m3(row) * scale).tolist() == [expected]
    powers = decode_e8m0(torch.tensor([127, 128, 0, 255], dtype=torch.uint8))
    assert powers[:3].tolist() == [1.0, 2.0, 2.0**-127]
    assert powers[3].isnan()


@pytest.mark.parametrize(
    ("name", "codes", "scales", "functions"),
    [
        ("fp8_ue8m0_block32", "q", "scale_e8m0", "fp8"),
        ("fp4_ue8m0_block32", "packed", "scale_byte", "fp4_e8m0"),
        ("fp4_e4m3_block16", "packed", "scale_byte", "fp4_e4m3"),
    ],
)
def test_quantisers_give_the_golden_bytes(name: str, codes: str, scales: str, functions: str) -> None:
    quantize, dequantize, round_trip, _ = FORMATS[functions]
    golden = block(name)
    got = quantize(golden["x"])
    assert torch.equal(got[0], golden[codes])
    assert torch.equal(got[1], golden[scales])
    decode_scale = decode_e4m3 if functions == "fp4_e4m3" else decode_e8m0
    assert torch.equal(bits(decode_scale(got[1])), bits(golden["scale"]))
    if "code" in golden:
        nibbles = torch.stack([got[0] & 15, got[0] >> 4], dim=-1).flatten(1)
        assert torch.equal(nibbles, golden["code"])
    assert torch.equal(bits(dequantize(*got)), bits(golden["dequant"]))
    assert torch.equal(bits(round_trip(golden["x"])), bits(golden["dequant"]))


@every_format
def test_a_round_trip_is_quantise_then_dequantise_to_the_bit(
    quantize: Quantize, dequantize: Dequantize, round_trip: Round, group: int
) -> None:
    x = hard_inputs(301, 96)
    assert torch.equal(bits(round_trip(x)), bits(dequantize(*quantize(x))))


@every_format
def test_rounding_twice_changes_nothing_more(
    quantize: Quantize, dequantize: Dequantize, round_trip: Round, group: int
) -> None:
    once = round_trip(randn(64, 96))
    assert torch.equal(bits(round_trip(once)), bits(once))


def naive_scale(largest_in_group: Tensor, floor: float, largest: float) -> Tensor:
    """The published rule as it is written: from the exponent and mantissa of maximum * float32(1 / largest)."""
    pattern = (largest_in_group.clamp(min=floor) * torch.tensor(1.0 / largest)).view(torch.int32)
    exponent = (pattern >> 23) + ((pattern & 0x7FFFFF) != 0).int()
    return exponent.to(torch.uint8)


@pytest.mark.parametrize(
    ("quantize", "floor", "largest"),
    [(quantize_fp8, 1e-4, 448.0), (quantize_fp4_e8m0, 6.0 * 2.0**-126, 6.0)],
    ids=["fp8", "fp4"],
)
def test_power_of_two_scales_follow_the_published_rule(
    quantize: Quantize, floor: float, largest: float
) -> None:
    draw = generator(5)
    mantissa = torch.randint(0, 1 << 23, (60_000,), generator=draw)
    edges = torch.tensor([0x400000, 0x600000]).repeat(1000) + torch.arange(-1000, 1000)
    mantissa = torch.cat((mantissa, edges, torch.tensor([0, 1, 0x7FFFFF]))).int()
    for exponent in (1, 2, 113, 114, 127, 200, 253):
        amax = (mantissa | (exponent << 23)).view(torch.float32)
        x = torch.zeros(len(amax), 32)
        x[:, 17] = -amax
        assert torch.equal(quantize(x)[1].squeeze(1), naive_scale(amax, floor, largest)), exponent


@pytest.mark.parametrize("functions", ["fp4_e8m0", "fp4_e4m3"])
def test_fp4_takes_the_nearest_grid_value_and_ties_go_to_the_even_code(functions: str) -> None:
    quantize, _, _, group = FORMATS[functions]
    ratio = torch.arange(0, 6.0001, 1 / 64).repeat_interleave(2) * torch.tensor([1.0, -1.0]).repeat(385)
    ratio = torch.cat((ratio, torch.full((-len(ratio) % (group - 1),), 0.5))).view(-1, group - 1)
    x = torch.cat((torch.full((len(ratio), 1), 6.0), ratio), dim=1)  # the 6 fixes the scale at one
    distance = (ratio.double().abs().unsqueeze(-1) - GRID).abs()
    preference = torch.tensor([0.0, 1e-9] * 4)  # odd codes lose ties
    expected = (distance + preference).argmin(-1) | (ratio < 0) * 8
    packed, _ = quantize(x)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, 1:]
    signless_zero = (ratio == 0) & (codes == 8)
    assert torch.equal(codes.long().masked_fill(signless_zero, 0), expected)


@every_format
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0), (1, 1), (3, 5)], ids=str)
def test_any_leading_shape_works(
    quantize: Quantize, dequantize: Dequantize, round_trip: Round, group: int, shape: tuple[int, ...]
) -> None:
    x = randn(*shape, 2 * group)
    codes, scales = quantize(x)
    assert codes.shape[:-1] == scales.shape[:-1] == shape
    assert scales.shape[-1] == 2
    assert dequantize(codes, scales).shape == round_trip(x).shape == x.shape


@every_format
def test_channels_that_fill_no_group_are_refused(
    quantize: Quantize, dequantize: Dequantize, round_trip: Round, group: int
) -> None:
    with pytest.raises(ValueError, match=f"{group + 1} channels"):
        quantize(torch.zeros(2, group + 1))
    with pytest.raises(ValueError, match=f"{group - 1} channels"):
        round_trip(torch.zeros(2, group - 1))


@every_format
def test_bfloat16_comes_back_as_bfloat16_without_a_second_rounding(
    quantize: Quantize, dequantize: Dequantize, round_trip: Round, group: int
) -> None:
    x = randn(9, 64).bfloat16()
    result = round_trip(x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result.float(), dequantize(*quantize(x)))


@every_format
def test_inputs_are_left_alone_and_strides_do_not_matter(
    quantize: Quantize, dequantize: Dequantize, round_trip: Round, group: int
) -> None:
    x = randn(64, 12).t()
    before = x.clone()
    expected = quantize(before)
    assert all(torch.equal(a, b) for a, b in zip(quantize(x), expected, strict=True))
    assert torch.equal(round_trip(x), dequantize(*expected))
    assert torch.equal(x, before)
    joined = torch.cat(expected, dim=1)
    width = expected[0].shape[1]
    assert torch.equal(dequantize(joined[:, :width], joined[:, width:]), dequantize(*expected))


@every_format
def test_rows_are_independent(
    quantize: Quantize, dequantize: Dequantize, round_trip: Round, group: int
) -> None:
    x = hard_inputs(160, 96)
    assert_rows_independent(lambda rows: (round_trip(rows), *quantize(rows)), x)
    assert_rows_independent(dequantize, *quantize(x), most=20)
