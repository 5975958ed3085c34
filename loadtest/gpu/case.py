"""One check of one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """A call that can be timed, and what is known of it.

    Attributes:
        run: The call.
        check: Compares its result; returns what is wrong, "" if nothing.
        bytes_moved: To and from device memory at least once.
        flops: Of the formula, without padding.
    """

    run: Callable[[], object]
    check: Callable[[], str]
    bytes_moved: float
    flops: float = 0.0


CaseMaker = Callable[[], Case]


def compare(got: Tensor, exact: Tensor, bound: Tensor | float) -> str:
    """ "" if every difference is within its bound, else the worst one."""
    difference = (got.double() - exact.double()).abs()
    allowed = torch.as_tensor(bound, dtype=torch.float64, device=difference.device).expand_as(difference)
    if bool((difference <= allowed).all()):
        return ""
    worst = int((difference - allowed).nan_to_num(nan=float("inf")).flatten().argmax())
    return (
        f"{float(got.flatten()[worst]):.6g} where {float(exact.flatten()[worst]):.6g} is exact, "
        f"bound {float(allowed.flatten()[worst]):.2g}"
    )


def same_bits(got: Tensor, expected: Tensor, what: str) -> str:
    """ "" if equal to the bit, else how many elements are not."""
    if got.shape == expected.shape and torch.equal(got, expected):
        return ""
    return f"{what}: {int((got != expected).sum())} of {got.numel()} elements have other bits"


def first_problem(*problems: str) -> str:
    """The first that is not empty."""
    return next((problem for problem in problems if problem), "")
