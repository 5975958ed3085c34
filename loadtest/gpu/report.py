"""Rows of a run on an accelerator: on the screen as they come, and in a file after every one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

HEADER: Final = ("what", "verdict", "us", "GB/s", "TFLOP/s", "of the ceiling")
NO_TIME: Final = "no time left"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; None where a column does not apply."""

    what: str
    verdict: str  # "ok", or what is wrong
    us: float | None = None
    gbytes_per_s: float | None = None
    tflops_per_s: float | None = None
    of_ceiling: float | None = None  # fraction of max(bytes / copy, FLOPs / product) reached
    graph: bool | None = None  # timed from a captured graph

    def cells(self) -> tuple[str, ...]:
        """Text of each column."""

        def number(value: float | None, form: str) -> str:
            return "" if value is None else format(value, form)

        return (
            self.what,
            self.verdict,
            number(self.us, ",.1f"),
            number(self.gbytes_per_s, ",.0f"),
            number(self.tflops_per_s, ",.1f"),
            number(self.of_ceiling, ".0%"),
        )


class Report:
    """Rows as they come."""

    def __init__(self, path: Path | None) -> None:
        self.device = ""
        self.kernels: list[str] = []  # that a dry run launched
        self.rows: list[Row] = []
        self._path = path

    def begin(self, device: str) -> None:
        """Name the device, once known."""
        if not self.device:
            self.device = device
            print(f"{device}\n\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)

    def add(self, row: Row) -> None:
        """Show and keep a row."""
        self.rows.append(row)
        print(f"| {' | '.join(row.cells())} |", flush=True)
        if self._path is not None:
            self.write(self._path)

    def write(self, path: Path) -> None:
        """All rows, as JSON."""
        rows = [asdict(row) for row in self.rows]
        document = {"device": self.device, "rows": rows, "kernels": self.kernels}
        path.write_text(json.dumps(document, indent=1) + "\n")

    @property
    def failed(self) -> bool:
        """Whether any row is wrong."""
        return any(row.verdict not in ("ok", "", NO_TIME) for row in self.rows)
