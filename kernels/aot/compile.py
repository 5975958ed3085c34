"""Compiles catalogue entries without a GPU and reads what the machine code takes out of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton
from epdserve.kernels.catalogue import Entry
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS: Final = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes: registers and spilled bytes (its whole stack) of a thread, shared bytes of a program."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def compile_entry(entry: Entry, target: str) -> Usage:
    """Compile for a target of ``TARGETS``.

    Raises:
        ValueError: The entry's signature and constexprs are not the kernel's arguments.
        triton.CompilationError: Of the kernel.
    """
    compiled = triton.compile(
        _source(entry),
        target=TARGETS[target],
        options={
            "num_warps": entry.num_warps,
            "num_stages": entry.num_stages,
            "enable_fp_fusion": entry.fp_fusion,
        },
    )
    read = _of_cubin if "cubin" in compiled.asm else _of_amdgcn
    registers, spilled = read(compiled.asm)
    return Usage(registers, spilled, compiled.metadata.shared)


def _source(entry: Entry) -> ASTSource:
    names = list(entry.kernel.arg_names)
    given = [*entry.signature, *entry.constexprs]
    if sorted(names) != sorted(given):
        raise ValueError(f"{entry.name}: arguments {names} are described as {given}")
    signature, attributes = {}, {}
    for position, name in enumerate(names):
        kind, _, multiple = entry.signature.get(name, "constexpr").partition(":")
        signature[name] = kind
        if kind.startswith("*") or multiple:
            attributes[(position,)] = [["tt.divisibility", int(multiple or 16)]]
    return ASTSource(entry.kernel, signature, dict(entry.constexprs), attributes)


def _of_cubin(asm: dict[str, Any]) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    number = _reader(text, r"{}:(\d+)")
    return number("REG"), number("STACK")


def _of_amdgcn(asm: dict[str, Any]) -> tuple[int, int]:
    number = _reader(asm["amdgcn"], r"\.{}:\s+(\d+)")
    return number("vgpr_count"), number("private_segment_fixed_size")


def _reader(text: str, pattern: str) -> Callable[[str], int]:
    def number(name: str) -> int:
        found = re.search(pattern.format(name), text)
        if found is None:
            raise ValueError(f"no {name} in: {text[:500]}")
        return int(found[1])

    return number
