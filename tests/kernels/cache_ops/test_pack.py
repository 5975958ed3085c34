"""RoPE, rounding, packing and the page write as one kernel, in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch
from epdserve.kernels.cache_ops import pack, reference
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.rope.reference import rotations_ref
from support.kernel_rows import randn
from support.triton_rows import assert_row_bits, assert_same_bits

ENTRIES, FIRST = 5, 16
Write = Callable[..., None]


def angles(rows: int, pairs: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return rotations_ref(torch.arange(rows) * 7919, torch.logspace(0, -3, pairs))


def places(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row elsewhere, the second without a page."""
    place = torch.arange(rows) * 3 % (4 * ENTRIES)
    page = place // ENTRIES
    page[1:2] = -1
    return page, place % ENTRIES


def written(write: Write, name: str, x: torch.Tensor, pages: int = 4) -> torch.Tensor:
    rows, channels = x.shape
    page, entry = places(rows)
    cos, sin = angles(rows)
    if name == "window":
        rings = torch.full((pages, ENTRIES, channels + channels // 32), 77, dtype=torch.uint8)
        write(rings, page, entry, x, cos, sin)
        return rings
    pool = torch.full((pages, FIRST + ENTRIES * channels), 77, dtype=torch.uint8)
    scales_offset = FIRST + ENTRIES * channels // 2
    write(pool, page, entry, x, cos, sin, entries=ENTRIES, values_offset=FIRST, scales_offset=scales_offset)
    return pool


FORMATS = {
    "main": (pack.write_main_kv, reference.write_main_kv_ref),
    "index": (pack.write_index_k, reference.write_index_k_ref),
    "window": (pack.write_window_kv, reference.write_window_kv_ref),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [(0, 32), (1, 64), (5, 96), (9, 128), (2, 512)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_reference(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    launcher, ref = FORMATS[name]
    x = (randn(*shape) * torch.logspace(-6, 6, shape[1])).to(dtype)
    assert_same_bits(written(launcher, name, x), written(ref, name, x))


@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_of_number_is_rounded_as_the_reference_rounds(name: str) -> None:
    """Ties, subnormals, zeros of both signs, huge values: random bit patterns that are finite."""
    launcher, ref = FORMATS[name]
    bits = torch.randint(-(2**31), 2**31, (16, 128), generator=torch.Generator().manual_seed(3)).int()
    x = bits.view(torch.float32)
    x = torch.where(x.abs() < 1e30, x, 0.375)
    x[0] = -0.0
    x[1] = torch.arange(128) / 8 - 8
    x[2] = 2.0**-149
    x[3] = torch.arange(128) * 2.0**-10
    assert_same_bits(written(launcher, name, x), written(ref, name, x))


def test_an_infinity_is_the_largest_number_of_its_group_and_the_others_are_zero() -> None:
    x = torch.ones(3, 64)
    x[0, 3], x[2, 35] = float("inf"), -float("inf")
    got, expected = (written(write, "window", x) for write in FORMATS["window"])
    assert_same_bits(got, expected)
    keys = written(pack.write_index_k, "index", x)
    codes = keys[0, FIRST : FIRST + 16]
    assert codes.tolist() == [0, 0x70, *[0] * 14]  # 6, in the second nibble of the second byte


def test_a_nan_spoils_the_scale_of_its_group_and_nothing_else() -> None:
    x = torch.ones(1, 64)
    x[0, 20] = float("nan")
    got, expected = (written(write, "main", x) for write in FORMATS["main"])
    values = slice(FIRST + 8, FIRST + 16)  # of the second group
    got[0, values] = expected[0, values]
    assert_same_bits(got, expected)
    assert int(got[0, FIRST + ENTRIES * 32 + 1]) == 0x7F


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_depends_on_itself_alone(name: str) -> None:
    cos, sin = angles(7)

    def rows(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        index, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
        if name == "window":
            pages = torch.zeros(count, 1, 66, dtype=torch.uint8)
            pack.write_window_kv(pages, index, zero, x, cos, sin)
            return pages
        pages = torch.zeros(count, 64, dtype=torch.uint8)
        FORMATS[name][0](pages, index, zero, x, cos, sin, entries=1, values_offset=0, scales_offset=32)
        return pages

    assert_row_bits(rows, randn(7, 64), cos, sin)


def test_rows_with_gaps() -> None:
    x = randn(5, 80)[:, 9:73]
    assert_same_bits(
        written(pack.write_main_kv, "main", x), written(pack.write_main_kv, "main", x.contiguous())
    )


def test_bad_arguments_are_refused_with_their_value() -> None:
    pages = torch.zeros(2, 256, dtype=torch.uint8)
    cos, sin = angles(1)
    one, zero = torch.tensor([1]), torch.tensor([0])

    def write(
        x: torch.Tensor, page: torch.Tensor = one, entry: torch.Tensor = zero, entries: int = 2
    ) -> None:
        pack.write_main_kv(
            pages, page, entry, x, cos, sin, entries=entries, values_offset=0, scales_offset=64
        )

    write(randn(1, 64))
    with pytest.raises(LaunchRefusedError, match="got 40"):
        write(randn(1, 40))
    with pytest.raises(LaunchRefusedError, match="page holds 2, of 2"):
        write(randn(1, 64), page=torch.tensor([2]))
    with pytest.raises(LaunchRefusedError, match="entry holds 2, of 2"):
        write(randn(1, 64), entry=torch.tensor([2]))
    with pytest.raises(LaunchRefusedError, match="end at 288 of a page of 256"):
        write(randn(1, 64), entries=9)
    with pytest.raises(LaunchRefusedError, match=r"got torch\.float16"):
        write(randn(1, 64).half())
