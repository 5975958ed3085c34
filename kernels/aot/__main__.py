"""Compile every kernel ahead of time and print what it takes.

    python -m epdserve.kernels.aot [--only NAME]... [--target sm_90]... [--json FILE] [--markdown FILE]

Exit status 1 if a hot kernel spills and the catalogue does not say why. Needs no GPU, and not Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from epdserve.kernels.aot.compile import TARGETS, Usage, compile_entry
from epdserve.kernels.aot.table import render, spills
from epdserve.kernels.catalogue import Entry, entries

_HEADER = """# Compiled kernels

Made by `python -m epdserve.kernels.aot --markdown kernels/COMPILED.md` (Triton's own compilers, no GPU). Registers of a
thread, bytes of them that spill to memory, bytes of shared memory a program. Times are rooflines at the data sheets'
peaks (`kernels/aot/hardware.py`): no call is faster, and none was measured here.

"""


def main() -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="epdserve.kernels.aot", description="Compile kernels ahead of time."
    )
    parser.add_argument("--only", action="append", default=[], help="part of an entry's name")
    parser.add_argument("--target", action="append", default=[], choices=list(TARGETS))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    wanted = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: the interpreter's kernels cannot be compiled")
    chosen = [
        entry for entry in entries() if not wanted.only or any(part in entry.name for part in wanted.only)
    ]
    usages = {entry.name: _compile(entry, wanted.target or TARGETS) for entry in chosen}
    table = render(chosen, usages)
    print(table)
    if wanted.markdown:
        wanted.markdown.write_text(_HEADER + table.rstrip() + "\n")
    if wanted.json:
        figures = {
            name: {target: asdict(usage) for target, usage in by_target.items()}
            for name, by_target in usages.items()
        }
        wanted.json.write_text(json.dumps(figures, indent=1) + "\n")
    failures = spills(chosen, usages)
    print(*failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


def _compile(entry: Entry, targets: Iterable[str]) -> dict[str, Usage]:
    began = time.perf_counter()
    usages = {target: compile_entry(entry, target) for target in targets if target not in entry.not_for}
    print(f"{entry.name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return usages


if __name__ == "__main__":
    sys.exit(main())
