"""Sizes of a program's tile of a matrix product."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Weight rows, input rows, and the step along K; warps of a program and loads in flight."""

    n: int
    t: int
    k: int
    warps: int
    stages: int
