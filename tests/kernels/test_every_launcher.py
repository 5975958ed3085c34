"""What every launcher promises, in Triton's interpreter: a row depends on itself alone, wherever it lies."""

import importlib
import pkgutil

import pytest
import torch
from epdserve import kernels
from epdserve.kernels.launch import LaunchRefusedError
from support.launcher_cases import ROWS, LauncherCase, launcher_cases
from support.triton_rows import assert_same_bits
from torch import Tensor

CASES = launcher_cases()
NO_ROWS = {"plan_experts"}  # sorts all pairs of a step; tests/kernels/moe/test_route_rows.py
BAD = {"nan": float("nan"), "inf": float("inf")}
every = pytest.mark.parametrize("name", CASES)


def test_every_exported_launcher_has_a_case() -> None:
    exported = set()
    for family in pkgutil.iter_modules(kernels.__path__, "epdserve.kernels."):
        package = importlib.import_module(family.name)
        names = getattr(package, "__all__", ())
        exported |= {name for name in names if hasattr(getattr(package, name), "launcher")}
    assert {name.partition("/")[0] for name in CASES} == exported - NO_ROWS


def assert_rows(case: LauncherCase, index: Tensor) -> None:
    for got, expected in zip(case.run(*(row[index] for row in case.rows)), case.whole, strict=True):
        assert_same_bits(got, expected[index])


@every
def test_a_row_has_its_bits_alone_and_at_any_place(name: str) -> None:
    case = CASES[name]
    assert_rows(case, torch.tensor([0]))
    if case.moves:
        assert_rows(case, torch.tensor([2, 1, 0, 1]))


@every
def test_no_row_is_legal(name: str) -> None:
    case = CASES[name]
    assert all(len(result) == 0 for result in case.run(*(row[:0] for row in case.rows)))


def spaced(row: Tensor) -> Tensor:
    """The same numbers at odd addresses, with other bytes between the rows."""
    if row.dim() < 2:
        return row
    wide = torch.full((*row.shape[:-1], row.shape[-1] + 5), 1, dtype=row.dtype)
    wide[..., 3:-2] = row
    return wide[..., 3:-2]


@every
def test_rows_with_gaps_have_the_same_bits_or_are_refused(name: str) -> None:
    case = CASES[name]
    try:
        found = case.run(*map(spaced, case.rows))
    except LaunchRefusedError as error:
        assert "strides" in str(error)  # noqa: PT017 - either will do
        return
    for got, expected in zip(found, case.whole, strict=True):
        assert_same_bits(got, expected)


def spoiled(row: Tensor, bad: float) -> Tensor:
    """Row 1 full of a bad number; of bytes, those of NaN in E4M3 and UE8M0."""
    changed = row.clone()
    if row.is_floating_point():
        changed[1] = bad
    elif row.dtype is torch.uint8:
        changed[1] = 0xFF
    return changed


@every
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_spoils_no_other(name: str, bad: str) -> None:
    case = CASES[name]
    others = torch.arange(ROWS) != 1
    found = case.run(*(spoiled(row, BAD[bad]) for row in case.rows))
    for got, expected in zip(found, case.whole, strict=True):
        assert_same_bits(got[others], expected[others])
