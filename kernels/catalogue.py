"""What each kernel is compiled with ahead of time, and what it moves and computes at the released model's shapes.

A module with kernels is named in ``MODULES`` and holds ``ENTRIES``, a tuple of ``Entry``. ``python -m
epdserve.kernels.aot`` compiles them all for the real targets; this file itself needs neither torch nor Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

MODULES: Final = (
    "norm.rms",
    "rope.rotate",
    "cache_ops.rows",
    "cache_ops.pack",
    "compress.pool",
    "engram.hash",
    "engram.gate",
    "mhc.streams",
    "mhc.coefficients",
    "sampling.draw",
    "sampling.verify",
    "attention.shapes",
    "indexer.shapes",
    "linear.shapes",
    "moe.shapes",
    "quant.rows",
)
# Sizes of the released model, for signatures and formulas (spec/backbone.md 1.1)
HIDDEN: Final = 5120
COPIES: Final = 4  # residual streams
HEADS: Final = 64
LATENT: Final = 512  # channels of a head, and of a KV entry
ROTARY: Final = 64
INDEX_HEADS: Final = 32
INDEX_DIM: Final = 128
VOCABULARY: Final = 129_280
Rate = Literal["fp32", "tf32", "bf16", "fp8"]


@dataclass(frozen=True, slots=True)
class Work:
    """One call: what goes to and from device memory at least once, and what is computed.

    Attributes:
        shape: ``"T=8192"``.
        bytes_moved: Of inputs and outputs; what is read again from a cache does not count.
        flops: Multiplications and additions of the formula, not of padding.
        rate: The arithmetic unit that does most of them.
    """

    shape: str
    bytes_moved: int
    flops: int = 0
    rate: Rate = "fp32"


@dataclass(frozen=True, slots=True)
class Entry:
    """One compilation of one kernel.

    Attributes:
        name: Unique; shown in the table.
        kernel: What ``@triton.jit`` returned.
        signature: Type of each argument that is no constexpr: ``"*bf16"``, ``"*u8"``, ``"i32"``, ``"i64"``, ``"fp32"``.
            Pointers are taken to be 16-byte aligned, as torch's are; ``"i32:16"`` is a number that Triton would find
            to be a multiple of 16.
        constexprs: Value of every other argument.
        work: Calls at the released model's shapes.
        num_warps, num_stages, fp_fusion: As the launcher has them.
        hot: A step launches it; a spill then fails the build unless ``spill_reason`` says why it may stand.
        not_for: Target -> why the kernel is not compiled for it.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, int | float | bool | str]
    work: tuple[Work, ...]
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    hot: bool = True
    spill_reason: str = ""
    not_for: Mapping[str, str] = field(default_factory=dict)


def entries() -> tuple[Entry, ...]:
    """Those of all modules; imports Triton.

    Raises:
        ValueError: A name stands twice.
    """
    found: list[Entry] = []
    for module in MODULES:
        found.extend(importlib.import_module(f"epdserve.kernels.{module}").ENTRIES)
    names = [entry.name for entry in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"entries of the same name: {', '.join(sorted(twice))}")
    return tuple(found)
